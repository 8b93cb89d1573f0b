"""From a block's graph to operations that have an int8 twin, and float operations for the rest.

One dispatch says what each node of a block's graph *is*. Convolutions and linear layers take in
the BatchNorm, the addition and the ReLU that follow them. What has no int8 twin stays in float:
nothing is ever replaced by something that computes something else.

The result depends on the graph and on shapes, not on weights or on the span, so a chain is
lowered once and serves every span of every round.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from cocofl.chain import BlockChain
from cocofl.errors import CannotLower


@dataclass(frozen=True)
class Activation:
    """ReLU, or ReLU6 where it has an upper bound."""

    upper: float | None = None


@dataclass(frozen=True)
class MapOp:
    """A convolution, linear layer or lone BatchNorm, with what was fused into it."""

    name: str
    x: str
    layer: str | None
    norm: str | None = None
    addend: str | None = None
    activation: Activation | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values it reads as codes."""
        return (self.x,) if self.addend is None else (self.x, self.addend)


@dataclass(frozen=True)
class ActOp:
    """A ReLU that nothing could take in; codes are clamped in place of values."""

    name: str
    x: str
    activation: Activation

    @property
    def inputs(self) -> tuple[str, ...]:
        """The one value it reads."""
        return (self.x,)


@dataclass(frozen=True)
class CatOp:
    """A concatenation of feature maps, which then share one grid."""

    name: str
    inputs: tuple[str, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class NodeOp:
    """A node of the graph as it is, after the nodes that make the tuples it takes apart.

    ``layout`` nodes only move elements around (or ask for a shape), so they work on codes as on
    floats; all others are computed in float.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    layout: bool
    names: dict[fx.Node, str]


Operation = MapOp | ActOp | CatOp | NodeOp


@dataclass(frozen=True)
class LoweredBlock:
    """A block as operations on named values; names carry the block's index, so they are unique."""

    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: Any
    """Value names in the structure that the block returns."""
    shapes: dict[str, tuple[int, ...]]
    non_negative: frozenset[str]
    """Values that ReLU and the like have left without negative entries."""
    sites: tuple[str, ...]
    """Values whose scales a device measures when it trains this block."""


_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_CONCATENATIONS = {torch.cat, torch.concat}
_DROPOUTS = {F.dropout, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_RELUS: dict[Any, Activation] = {
    F.relu: Activation(),
    torch.relu: Activation(),
    F.relu_: Activation(),
    torch.relu_: Activation(),
    "relu": Activation(),
    "relu_": Activation(),
    F.relu6: Activation(6.0),
    nn.ReLU: Activation(),
    nn.ReLU6: Activation(6.0),
}
_LAYOUTS = {
    torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.chunk, torch.split,
    torch.unsqueeze, torch.squeeze, torch.swapaxes, operator.getitem, getattr, F.channel_shuffle,
    "flatten", "reshape", "view", "permute", "transpose", "chunk", "split", "unsqueeze",
    "squeeze", "contiguous", "size", "dim", "expand", "t",
    nn.Flatten, nn.Unflatten, nn.ChannelShuffle, nn.PixelShuffle,
}  # fmt: skip
_NON_NEGATIVE = {nn.Sigmoid, nn.Hardsigmoid, torch.sigmoid, F.sigmoid, F.hardsigmoid, "sigmoid"}
_KEEP_SIGN = {
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
}  # fmt: skip


def lower(chain: BlockChain) -> tuple[LoweredBlock, ...]:
    """The operations of every block of the chain."""
    if chain not in _LOWERED:
        _LOWERED[chain] = tuple(_lower_chain(chain))
    return _LOWERED[chain]


_LOWERED: WeakKeyDictionary[BlockChain, tuple[LoweredBlock, ...]] = WeakKeyDictionary()


def _lower_chain(chain: BlockChain) -> Iterator[LoweredBlock]:
    if chain.example is None:
        raise CannotLower(
            "int8 needs the shapes of a real batch; build the chain with "
            "cocofl.split(model, example) or BlockChain(blocks, example=batch)"
        )
    last_linear = _last_linear(chain)
    modes = {module: module.training for module in chain.modules()}
    chain.eval()
    try:
        with torch.no_grad():
            env: dict[str, Any] = dict(zip(chain.wiring[0].inputs, chain.example, strict=True))
            where = {name: f"input.{name}" for name in env}
            positive: frozenset[str] = frozenset()
            for index, (block, wiring) in enumerate(zip(chain.blocks, chain.wiring, strict=True)):
                traced = as_graph(block)
                watch = _Watch(traced)
                result = watch.run(*[env[name] for name in wiring.inputs])
                inputs = tuple(where[name] for name in wiring.inputs)
                keep_float = last_linear if index == len(chain) - 1 else None
                lowered = _lower_block(index, traced, watch, inputs, keep_float, positive)
                positive |= lowered.non_negative
                yield lowered
                many = len(wiring.outputs) > 1
                env |= zip(wiring.outputs, result if many else [result], strict=True)
                where |= zip(
                    wiring.outputs, lowered.outputs if many else [lowered.outputs], strict=True
                )
    finally:
        for module, training in modes.items():
            module.training = training


class Opaque(fx.GraphModule):
    """A block that torch.fx cannot trace, as a graph of one node that calls it."""


def as_graph(block: nn.Module) -> fx.GraphModule:
    """The block's graph; of one node, computed in float, where it cannot be traced."""
    if isinstance(block, fx.GraphModule):
        return block
    try:
        return fx.symbolic_trace(block)
    except Exception:  # torch.fx raises whatever the traced code raises on a proxy
        root = nn.Module()
        root.add_module("block", block)
        graph = fx.Graph()
        graph.output(graph.call_module("block", (graph.placeholder("x"),)))
        return Opaque(root, graph)


def _last_linear(chain: BlockChain) -> str | None:
    """The classifier: the last linear layer, which is never quantized."""
    *_, last = [
        (name, m)
        for name, m in chain.blocks[-1].named_modules()
        if any(True for _ in m.parameters(recurse=False))
    ] or [("", None)]
    return last[0] if isinstance(last[1], nn.Linear) else None


class _Watch(fx.Interpreter):
    """Runs a block and remembers the shape of every float tensor, and who makes tuples of them."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[fx.Node, tuple[int, ...]] = {}
        self.tuples: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Also note the shape."""
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.seen[n] = tuple(result.shape)
        elif isinstance(result, list | tuple) and any(isinstance(x, Tensor) for x in result):
            self.tuples.add(n)
        return result


def _lower_block(
    index: int,
    block: fx.GraphModule,
    watch: _Watch,
    inputs: tuple[str, ...],
    keep_float: str | None,
    positive: frozenset[str],
) -> LoweredBlock:
    shapes, tuples = watch.seen, watch.tuples
    names: dict[fx.Node, str] = {}
    sized: dict[str, tuple[int, ...]] = {}
    operations: list[Operation] = []
    outputs: Any = None
    arriving = iter(inputs)
    for node in block.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(arriving)
        elif node.op == "output":
            outputs = fx.map_arg(node.args[0], lambda n: names[n])
        elif node in tuples and node.op != "output":
            if any(user.op == "output" for user in node.users):
                raise CannotLower(
                    f"block {index} returns the whole tuple of {node.format_node()}; "
                    "return its tensors one by one"
                )
        elif (source := _passed_through(node, block)) is not None:
            names[node] = names[source]
        else:
            names[node] = f"{index}.{node.name}"
            operations.append(_operation(node, block, dict(names), watch, keep_float))
            if (overwritten := mutated(node, block)) is not None:
                # Whoever reads the input after this node sees what the node wrote into it.
                old = names[overwritten]
                for other in [n for n, name in names.items() if name == old]:
                    names[other] = names[node]
        if node in shapes:
            sized.setdefault(names.get(node, ""), shapes[node])
    fused = _fuse(operations, sized, set(_leaves(outputs)), block)
    non_negative = frozenset(_non_negative(fused, block, set(positive)))
    return LoweredBlock(
        tuple(fused), inputs, outputs, sized, non_negative, _sites(fused, sized, outputs)
    )


def _leaves(structure: Any) -> list[str]:
    found: list[str] = []
    if isinstance(structure, str):
        found.append(structure)
    elif isinstance(structure, dict):
        for part in structure.values():
            found += _leaves(part)
    elif isinstance(structure, list | tuple):
        for part in structure:
            found += _leaves(part)
    return found


def _kind(node: fx.Node, block: nn.Module) -> Any:
    """The function, method name or module class that a node calls."""
    if node.op == "call_module":
        return type(block.get_submodule(str(node.target)))
    return node.target


def _passed_through(node: fx.Node, block: nn.Module) -> fx.Node | None:
    """The input of a node that, frozen, hands its input on: dropout and identity."""
    kind = _kind(node, block)
    is_module = isinstance(kind, type) and issubclass(kind, _DropoutNd | nn.Identity)
    is_function = node.op == "call_function" and kind in _DROPOUTS
    return node.all_input_nodes[0] if is_module or is_function else None


def mutated(node: fx.Node, block: nn.Module) -> fx.Node | None:
    """The input that a node overwrites, if it works in place."""
    in_place = (
        (node.op == "call_method" and str(node.target).endswith("_"))
        or node.kwargs.get("inplace") is True
        or (node.op == "call_function" and getattr(node.target, "__name__", "").endswith("_"))
        or node.target in {operator.iadd, operator.imul, operator.isub, operator.itruediv}
        or (
            node.op == "call_module"
            and getattr(block.get_submodule(str(node.target)), "inplace", False) is True
        )
    )
    return node.all_input_nodes[0] if in_place else None


def _operation(
    node: fx.Node,
    block: nn.Module,
    names: dict[fx.Node, str],
    watch: _Watch,
    keep_float: str | None,
) -> Operation:
    kind, name, shapes = _kind(node, block), names[node], watch.seen
    nodes = (*_tuple_makers(node, watch.tuples), node)
    sources = [n for inner in nodes for n in inner.all_input_nodes if n not in nodes]
    inputs = tuple(names[n] for n in dict.fromkeys(sources))
    shape = shapes.get(node, ())
    if node.op == "call_module" and node.target != keep_float:
        module, target = block.get_submodule(str(node.target)), str(node.target)
        if isinstance(module, nn.Linear) or (type(module) is nn.Conv2d and _convertible(module)):
            return MapOp(name, inputs[0], layer=target)
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            return MapOp(name, inputs[0], layer=None, norm=target)
    if (activation := _RELUS.get(kind)) is not None:
        return ActOp(name, inputs[0], activation)
    if kind in _CONCATENATIONS and len(shape) == 4 and set(node.all_input_nodes) <= set(shapes):
        parts, dim = _parts_and_dim(*node.args, **node.kwargs)
        if isinstance(parts, list | tuple) and isinstance(dim, int):
            return CatOp(name, tuple(names[part] for part in parts), dim)
    layout = all(_only_moves(inner, block) for inner in nodes)
    return NodeOp(name, nodes, inputs, layout, names)


def _parts_and_dim(tensors: Any, dim: Any = 0) -> tuple[Any, Any]:
    """The arguments of ``torch.cat``, wherever they were given."""
    return tensors, dim


def _tuple_makers(node: fx.Node, tuples: set[fx.Node]) -> list[fx.Node]:
    """The nodes whose tuples ``node`` takes apart: they run as part of it."""
    makers: list[fx.Node] = []
    for source in node.all_input_nodes:
        if source in tuples and source not in makers:
            makers += [*_tuple_makers(source, tuples), source]
    return makers


def _only_moves(node: fx.Node, block: nn.Module) -> bool:
    kind = _kind(node, block)
    return kind in _LAYOUTS and not (kind is getattr and node.args[1] != "shape")


def _convertible(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a plain one whose gradient is a convolution again."""
    strided, dilated = set(layer.stride) != {1}, set(layer.dilation) != {1}
    return (
        layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and not (strided and dilated)
    )


def _fuse(
    operations: list[Operation],
    shapes: dict[str, tuple[int, ...]],
    outputs: set[str],
    block: nn.Module,
) -> list[Operation]:
    """Let each layer take in the BatchNorm, the addition and the ReLU that follow it."""
    users = Counter(name for op in operations for name in op.inputs)
    users.update(outputs)
    made: dict[str, Operation] = {}

    def only_feeds(name: str) -> MapOp | None:
        """The map that made this value for one reader, if it has no ReLU yet."""
        maker = made.get(name)
        if isinstance(maker, MapOp) and users[name] == 1 and maker.activation is None:
            return maker
        return None

    for op in operations:
        fused: Operation = op
        if isinstance(op, MapOp) and op.layer is None and (maker := only_feeds(op.x)):
            if maker.layer and maker.norm is None and maker.addend is None:
                fused = replace(maker, name=op.name, norm=op.norm)
                del made[maker.name]
        elif isinstance(op, ActOp) and (maker := only_feeds(op.x)):
            fused = replace(maker, name=op.name, activation=op.activation)
            del made[maker.name]
        elif isinstance(op, NodeOp) and _is_sum_of_maps(op, shapes):
            for mine, other in (op.inputs[::-1], op.inputs):
                maker = only_feeds(mine)
                if maker and maker.layer and maker.addend is None and _is_convolution(maker, block):
                    fused = replace(maker, name=op.name, addend=other)
                    del made[maker.name]
                    break
        made[op.name] = fused
    return list(made.values())


def _is_sum_of_maps(op: NodeOp, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether this adds two different feature maps of one shape, without any factor."""
    return (
        op.nodes[-1].target in _ADDITIONS
        and "alpha" not in op.nodes[-1].kwargs
        and len(set(op.inputs)) == 2
        and len({shapes.get(name) for name in (*op.inputs, op.name)}) == 1
    )


def _is_convolution(op: MapOp, block: nn.Module) -> bool:
    return op.layer is not None and isinstance(block.get_submodule(op.layer), nn.Conv2d)


def _non_negative(
    operations: Iterable[Operation], block: nn.Module, known: set[str]
) -> Iterator[str]:
    for op in operations:
        if isinstance(op, MapOp):
            positive = op.activation is not None
        elif isinstance(op, ActOp):
            positive = True
        elif isinstance(op, CatOp):
            positive = known.issuperset(op.inputs)
        else:
            kind = _kind(op.nodes[-1], block)
            kept = op.layout or kind in _KEEP_SIGN
            positive = kind in _NON_NEGATIVE or (kept and known.issuperset(op.inputs[:1]))
        if positive:
            known.add(op.name)
            yield op.name


def _sites(
    operations: Iterable[Operation], shapes: dict[str, tuple[int, ...]], outputs: Any
) -> tuple[str, ...]:
    """Every value of this block that may be held in codes, wherever the span begins and ends."""
    operations = list(operations)
    read_as_codes = {n for op in operations if isinstance(op, MapOp | CatOp) for n in op.inputs}
    own = [op for op in operations if op.name in shapes]
    ends = set(_leaves(outputs))
    return tuple(
        op.name
        for op in own
        if not isinstance(op, NodeOp) or op.name in read_as_codes or op.name in ends
    )
