"""How much of a network's work int8 can do: multiplications, since layers differ by a lot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from cocofl.chain import BlockChain
from cocofl.chain.graphs import left_as_it_was
from cocofl.freeze.dispatch import OperationWatch
from cocofl.freeze.operations import LoweredBlock, MapOp, NodeOp
from cocofl.freeze.traced_blocks import called_module

_PRODUCTS = {
    "linear", "bilinear", "matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
_GROUPED = "grouped_mm"
"""In the names of functions for experts: PyTorch's own, and those of libraries."""


class Work(NamedTuple):
    """The multiplications of a block on the example, forward."""

    every: int
    int8: int
    """Of them, those of layers with an int8 form."""
    float_layers: frozenset[str]
    """The types of layers without one."""


def run_example(
    chain: BlockChain, call: Callable[[nn.Module, list[Any]], Any], stop: int | None = None
) -> dict[str, Any]:
    """What the example has become after the blocks before ``stop``, by name."""
    assert chain.example is not None, "a chain without one is not lowered"
    own = [x.clone() if isinstance(x, Tensor) else x for x in chain.example]
    values: dict[str, Any] = dict(zip(chain.wiring[0].inputs, own, strict=True))
    with left_as_it_was(chain, training=False), torch.no_grad():
        for block, wiring in list(zip(chain.blocks, chain.wiring, strict=True))[:stop]:
            result = call(block, [values[name] for name in wiring.inputs])
            values |= wiring.handed_on(result)
    return values


def work_of(chain: BlockChain, lowered: Sequence[LoweredBlock]) -> tuple[Work, ...]:
    """Block by block."""
    counts: list[int] = []

    def call(block: nn.Module, arguments: list[Any]) -> Any:
        count, result = _multiplications(block, arguments)
        counts.append(count)
        return result

    with _countable_attention():
        run_example(chain, call)
    parts = zip(chain.blocks, lowered, counts, strict=True)
    return tuple(_work(block, low, every) for block, low, every in parts)


def _work(block: nn.Module, low: LoweredBlock, every: int) -> Work:
    graph, int8, floats = low.graph(block), 0, set[str]()
    for op in low.operations:
        if isinstance(op, MapOp) and op.kind is not None and op.layer is not None:
            weight = op.kind.weight_of(graph.get_submodule(op.layer))
            int8 += math.prod(low.shapes[op.name]) * weight.numel() // len(weight)
        elif isinstance(op, NodeOp):
            floats |= {name for node in op.nodes for name in _multiplying_in(node, graph)}
    return Work(max(every, int8), int8, frozenset(floats))


def _multiplying_in(node: fx.Node, graph: fx.GraphModule) -> set[str]:
    """What multiplies matrices in a node: a layer's type, or a function by its name."""
    if node.op in ("call_function", "call_method"):
        name = str(getattr(node.target, "__name__", node.target))
        return {name} if name in _PRODUCTS or _GROUPED in name else set()
    return _multiplying(called_module(node, graph))


def _multiplying(module: nn.Module | None) -> set[str]:
    """The type of a layer with matrices; those of all layers in a block that stays whole."""
    if isinstance(module, fx.GraphModule):
        return {name for node in module.graph.nodes for name in _multiplying_in(node, module)}
    if module is None or isinstance(module, nn.Embedding):
        return set()
    matrices = any(parameter.ndim > 1 for parameter in module.parameters())
    return {type(module).__name__} if matrices else set()


@contextmanager
def _countable_attention() -> Iterator[None]:
    """PyTorch counts nothing of what its encoder layers do in one call."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Counter(OperationWatch):
    """Counts by PyTorch's own formulas, which know attention on a GPU only, and no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what is asked, and count."""
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.operations += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif _GROUPED in func.name():
            self.operations += 2 * result.numel() * args[0].shape[-1]
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.operations += formula(*args, **kwargs or {}, out_val=result)
        return result


def _multiplications(block: nn.Module, arguments: list[Any]) -> tuple[int, Any]:
    """How many there are, and what the block returns."""
    recurrent = Counter[str]()

    def count(layer: nn.Module, inputs: tuple[Any, ...], _result: Any) -> None:
        # PyTorch counts none of theirs: each step multiplies with every weight.
        steps = inputs[0].numel() // inputs[0].shape[-1]
        recurrent["all"] += steps * sum(p.numel() for p in layer.parameters() if p.ndim > 1)

    hooks = [m.register_forward_hook(count) for m in block.modules() if isinstance(m, nn.RNNBase)]
    try:
        with _Counter() as counter:
            result = block(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return counter.operations // 2 + recurrent["all"], result
