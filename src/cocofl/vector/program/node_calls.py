"""Operations without a batched form of their own, for many devices.

Three ways, the fastest that is right: all devices' samples as one large batch, ``vmap`` over
devices, or one device after the other. Which is right was tried out on the example: each must
give what one device after the other gives. They are tried out on the CPU, wherever they will run: a
GPU takes seconds to load what a few samples need.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.rnn import pad_sequence

from cocofl.chain.graphs import called_with
from cocofl.freeze.fusion import with_batch_statistics
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, NodeOp, Operation, node_function
from cocofl.freeze.traced_blocks import copy_block
from cocofl.vector.program.row_layout import ChainLayout, Segment

MERGED, MAPPED, LOOPED = "merged", "mapped", "looped"
_SAMPLES = 3  # on which ways are tried out


@dataclass(frozen=True)
class Held:
    """A tensor that nodes read beside their inputs, with its segment."""

    node: fx.Node
    name: str
    """Within the module that the node calls; empty for the tensor itself."""
    segment: Segment
    learns: bool
    value: Tensor = field(compare=False, repr=False)
    """As the chain has it."""


class Modes:
    """A block's modules ready to be called: trained, with still statistics, and frozen."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.original = graph
        self.frozen = copy_block(graph, {}).eval()
        self.trained = copy_block(graph, {}).train()
        self.still = with_batch_statistics(copy_block(graph, {}).train())
        self.move(torch.device("cpu"))

    def move(self, on: torch.device) -> None:
        """Where the program runs."""
        for block in (self.frozen, self.trained, self.still):
            block.to(on).requires_grad_(False)


@dataclass(frozen=True, eq=False)
class Piece:
    """One operation and the block it belongs to."""

    op: NodeOp
    modes: Modes


class NodeCall:
    """An operation, after those that make the sizes and constants it needs."""

    def __init__(self, pieces: tuple[Piece, ...], layout: ChainLayout) -> None:
        self.pieces = pieces
        made = {piece.op.name for piece in pieces}
        read = (name for piece in pieces for name in piece.op.inputs if name not in made)
        self.inputs = tuple(dict.fromkeys(read))
        self.held = [h for piece in pieces for h in _held(piece, layout)]
        self.has_modes = any(_has_modes(node, piece) for piece in pieces for node in piece.op.nodes)
        self.way, self.mixes_samples = LOOPED, False

    def one(
        self, values: Mapping[str, Any], held: Mapping[Held, Tensor], mode: str = "frozen"
    ) -> Any:
        """For one device."""
        results: dict[str, Any] = {}
        for piece in self.pieces:
            function = _substituted(getattr(piece.modes, mode), held, mode != "frozen")
            overwrites = piece.op.overwrites

            def read(name: str, *, clone: bool = overwrites) -> Any:
                value = results[name] if name in results else values[name]
                return value.clone() if clone and isinstance(value, Tensor) else value

            results[piece.op.name] = piece.op.run(read, function)
        return results[self.pieces[-1].op.name]

    def merged(self, values: Mapping[str, Tensor]) -> Tensor:
        """For all devices' samples as one batch."""
        devices = len(next(iter(values.values())))
        result: Tensor = self.one({name: x.flatten(0, 1) for name, x in values.items()}, {})
        return result.reshape(devices, -1, *result.shape[1:])

    def mapped(self, values: Mapping[str, Tensor], held: Mapping[Held, Tensor]) -> Tensor:
        """For all devices through ``vmap``."""
        result = torch.vmap(self.one, randomness="different")(dict(values), dict(held))
        assert isinstance(result, Tensor)
        return result

    def looped(
        self,
        values: Mapping[str, Tensor],
        held: Mapping[Held, Tensor],
        modes: list[str],
        counts: list[int] | None,
    ) -> Tensor:
        """One device after the other; ``counts`` says how many samples of each there are."""
        results = []
        for d in range(len(modes)):
            own = {name: x[d] for name, x in values.items()}
            if counts is not None:
                own = {name: x[: max(counts[d], 1)] for name, x in own.items()}
            # A device that rests is not to track statistics of no samples.
            mode = "frozen" if counts is not None and counts[d] == 0 else modes[d]
            # Statistics are written to where they are; others of the device read the same row.
            state = {
                h: t[d] if h.learns or mode == "trained" else t[d].clone() for h, t in held.items()
            }
            result = self.one(own, state, mode)
            assert isinstance(result, Tensor)
            results.append(result)
        return torch.stack(results) if counts is None else pad_sequence(results, batch_first=True)

    def try_out(self, example: Mapping[str, Any]) -> None:
        """Find the fastest way that gives what one device after the other gives."""
        values = {name: example[name] for name in self.inputs}
        if self.has_modes or not values or not all(isinstance(v, Tensor) for v in values.values()):
            self.mixes_samples = self.has_modes
            return
        stacked = {name: torch.stack([x, _other(x)]) for name, x in values.items()}
        held = {h: torch.stack([h.value, h.value * 1.1]).cpu() for h in self.held}
        with torch.no_grad():
            expected = self.looped(stacked, held, ["frozen"] * 2, None)
            self.mixes_samples = self._mixes(values, {h: t[0] for h, t in held.items()})
            if self.mixes_samples:
                return
            if not held and _agrees(lambda: self.merged(stacked), expected):
                self.way = MERGED
            elif _agrees(lambda: self.mapped(stacked, held), expected):
                self.way = MAPPED

    def _mixes(self, values: Mapping[str, Tensor], held: Mapping[Held, Tensor]) -> bool:
        """Whether a sample's result depends on the other samples."""
        n = min(len(x) if x.ndim else 0 for x in values.values())
        if n < 2:
            return False
        whole = self.one(values, held)
        few = {name: x[: n - 1] if len(x) == n else x for name, x in values.items()}
        return not _agrees(lambda: self.one(few, held), whole[: n - 1] if whole.ndim else whole)


def _substituted(
    root: nn.Module, held: Mapping[Held, Tensor], training: bool
) -> Callable[[fx.Node], Callable[..., Any]]:
    """What nodes call in a block whose tensors are replaced by those of one device."""
    by_node: dict[fx.Node, dict[str, Tensor]] = {}
    for h, tensor in held.items():
        by_node.setdefault(h.node, {})[h.name] = tensor

    def function(node: fx.Node) -> Callable[..., Any]:
        own = by_node.get(node)
        if node.op == "get_attr" and node.target == "training":
            return lambda: training
        if own is None:
            return node_function(node, root)
        if node.op == "get_attr":
            return lambda: own[""]
        module = root.get_submodule(str(node.target))
        return lambda *args, **kwargs: called_with(module, own, args, kwargs)

    return function


def _held(piece: Piece, layout: ChainLayout) -> list[Held]:
    found = []
    for node in piece.op.nodes:
        if node.op == "call_module":
            module = piece.modes.original.get_submodule(str(node.target))
            tensors = [*module.named_parameters(), *module.named_buffers()]
        elif node.op == "get_attr" and node.target != "training":
            value = attrgetter(str(node.target))(piece.modes.original)
            tensors = [("", value)] if isinstance(value, Tensor) else []
        else:
            continue
        for name, tensor in tensors:
            for kind, learns in ((layout.parameters, True), (layout.statistics, False)):
                if (segment := kind.find(tensor)) is not None:
                    found.append(Held(node, name, segment, learns, tensor.detach()))
    return found


def _has_modes(node: fx.Node, piece: Piece) -> bool:
    """Whether it computes something else when it is trained."""
    if node.op == "get_attr":
        return node.target == "training"
    if node.op != "call_module":
        return False
    module = piece.modes.original.get_submodule(str(node.target))
    return any(
        isinstance(part, _NormBase)
        or (isinstance(part, _DropoutNd) and bool(part.p))
        or bool(getattr(part, "dropout", 0) and not isinstance(part.dropout, nn.Module))
        or not type(part).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def _other(x: Tensor) -> Tensor:
    """Other values of the same shape and kind."""
    rolled = x.roll(1, 0) if x.ndim else x
    return rolled * 0.9 + 0.1 if rolled.is_floating_point() or rolled.is_complex() else rolled


def _agrees(run: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        with warnings.catch_warnings():
            # Where vmap has no rule it loops, slowly, and says so: our own loop is as good.
            warnings.filterwarnings("error", "There is a performance drop")
            result = run()
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError, UserWarning):
        return False
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = result.to(wide), expected.to(wide)
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def values_on_example(
    example: tuple[Any, ...],
    lowered: tuple[LoweredBlock, ...],
    modes: Sequence[Modes],
) -> dict[str, Any]:
    """Every value of a frozen chain, for a few samples of its example."""
    inputs = [x.cpu() for x in example]
    few = [x[:_SAMPLES] if len(x) == len(inputs[0]) else x for x in inputs]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return _values_of(few, lowered, modes)
        except RuntimeError:  # a size that is written into the model
            return _values_of(inputs, lowered, modes)


def _values_of(
    inputs: Sequence[Tensor], lowered: tuple[LoweredBlock, ...], modes: Sequence[Modes]
) -> dict[str, Any]:
    env: dict[str, Any] = dict(zip(lowered[0].inputs, inputs, strict=True))

    def read(name: str) -> Any:
        return env[name].clone() if isinstance(env[name], Tensor) else env[name]

    def result(op: Operation, root: nn.Module) -> Any:
        if isinstance(op, ActOp):
            return op.activation(env[op.x])
        if isinstance(op, CatOp):
            return torch.cat([env[name] for name in op.inputs], op.dim)
        if isinstance(op, NodeOp) and op.drops:
            return env[op.inputs[0]]
        if isinstance(op, NodeOp):
            return op.run(read, partial(node_function, root=root))
        y = env[op.x]
        for path in (op.layer, op.norm):
            y = y if path is None else root.get_submodule(path)(y)
        y = y if op.addend is None else y + env[op.addend]
        return y if op.activation is None else op.activation(y)

    for low, own in zip(lowered, modes, strict=True):
        for op in low.operations:
            env[op.name] = result(op, own.frozen)
    return env
