"""One torch.fx graph of a whole model that is right in train and in eval mode.

A plain trace has two flaws for our purpose. It bakes in ``training``, so a functional dropout
traced in eval mode never drops anything again; and it gives up on the whole model for the sake of
one module with data-dependent control flow. Here the model is traced in both modes and constants
that differ are read from the block's ``training`` flag; and a submodule that cannot be traced
stays whole, as one operation.

There are two ways to trace, which write graphs in one vocabulary: symbolically, and, where that
fails, by running an example.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from cocofl.chain.graphs import BY_HAND, Call, Failure, Recorded, is_layer
from cocofl.chain.recording import is_random, record
from cocofl.chain.symbolic import trace_symbolically
from cocofl.errors import CannotSplit

CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
_EACH_TIME = "other operations each time it is called, or with another batch size"
TraceMode = Callable[..., Recorded]
"""Traces one mode, given the modules that stay whole; ``again`` asks for a comparison."""


@dataclass(frozen=True)
class Trace:
    """A model as a list of steps (operations) in the order in which they run.

    Constants, parameters and flags are no steps: such a node belongs to the step it stands before.
    That is the only one that reads it, so that no cut can come between them; but a tied weight
    stands before the first, and the others take it as a value.
    """

    graph: fx.Graph
    steps: tuple[fx.Node, ...]
    calls: tuple[Call, ...]
    attributes: dict[str, Any]
    opaque: dict[str, str]
    """Why submodules could not be traced, by path."""
    owners: dict[str, tuple[str, ...]]
    """By node name the paths of the modules it was made in, outermost first."""

    @functools.cached_property
    def places(self) -> dict[fx.Node, int]:
        """For each node the step that it is or belongs to; inputs are -1, the output is last."""
        index = {step: i for i, step in enumerate(self.steps)}
        places, place = {}, len(self.steps)
        for node in reversed(self.graph.nodes):
            place = index.get(node, place)
            places[node] = -1 if node.op == "placeholder" else place
        return places

    def parameters(self, node: fx.Node) -> dict[str, nn.Parameter]:
        """The parameters that a step, or a constant before it, reads directly."""
        if node.op not in ("call_module", "get_attr"):
            return {}
        value = self.attributes[str(node.target)]
        if isinstance(value, nn.Module):
            return {f"{node.target}.{name}": p for name, p in value.named_parameters()}
        return {str(node.target): value} if isinstance(value, nn.Parameter) else {}


def in_mode(training: bool, when_training: Any, otherwise: Any) -> Any:
    """A constant that depends on the mode, such as ``0.1 if self.training else 0.0``."""
    return when_training if training else otherwise


def if_training(training: bool, function: str, *args: Any, **kwargs: Any) -> Any:
    """A random draw of ``torch`` that is made in train mode only."""
    return getattr(torch, function)(*args, **kwargs) if training else None


def trace(
    model: nn.Module,
    inputs: int | Sequence[str],
    example: Sequence[Tensor] | None = None,
    *,
    by_running: bool = False,
) -> Trace:
    """Trace the model, which is left as it was; submodules that cannot be traced stay whole.

    ``inputs`` is their number, or the names by which they are given. With an example a model that
    cannot be traced symbolically is traced by running it.
    """
    symbolic = functools.partial(_symbolic_mode, model, inputs)
    with _without_cache(model):
        if example is None:
            return _with_opaque(model, symbolic)
        recorded = functools.partial(_recorded_mode, model, inputs, example)
        if by_running:
            return _with_opaque(model, recorded)
        try:
            return _trace_modes(model, symbolic, {})
        except Failure:
            return _with_opaque(model, recorded)


def _symbolic_mode(
    model: nn.Module,
    inputs: int | Sequence[str],
    opaque: dict[str, str],
    *,
    training: bool,
    again: bool = False,  # noqa: ARG001
) -> Recorded:
    return trace_symbolically(model, inputs, opaque, training=training)


def _recorded_mode(
    model: nn.Module,
    inputs: int | Sequence[str],
    example: Sequence[Tensor],
    opaque: dict[str, str],
    *,
    training: bool,
    again: bool = False,
) -> Recorded:
    return record(model, inputs, _samples(example, more=again), opaque, training=training)


def _samples(example: Sequence[Tensor], *, more: bool) -> Sequence[Tensor]:
    """The example with two samples at least, or one more, if its inputs have a batch axis.

    A single sample would be broadcast, and has no variance.
    """
    if len({x.shape[:1] for x in example}) > 1 or not example[0].ndim:
        return example
    size = max(len(example[0]), 2) + more
    return [torch.cat([x] * size)[:size] for x in example]


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Let a language model not return its keys and values: no training reads them."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [c for c in configs.values() if getattr(c, "use_cache", False) is True]
    for config in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config in before:
            config.use_cache = True


def _with_opaque(model: nn.Module, trace_mode: TraceMode) -> Trace:
    """Keep modules whole, from the inside out, until the model can be traced."""
    opaque: dict[str, str] = {}
    while True:
        try:
            result = _trace_modes(model, trace_mode, opaque)
            break
        except Failure as failure:
            path = next((path for path in failure.suspects if path not in opaque), None)
            if path is None:
                raise CannotSplit(
                    f"cannot trace {type(model).__name__}: {failure}. {BY_HAND}"
                ) from failure.__cause__
            opaque[path] = str(failure)
    _warn_about(model, result.opaque)
    return result


def _warn_about(model: nn.Module, opaque: dict[str, str]) -> None:
    """Say once for each class of modules with parameters that they stay whole, and why."""
    paths: dict[type[nn.Module], list[str]] = {}
    for path in opaque:
        module = model.get_submodule(path)
        if next(module.parameters(), None) is not None:
            paths.setdefault(type(module), []).append(path)
    for kind, where in paths.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        warnings.warn(
            f"cocofl.split keeps {kind.__name__} ({where[0]!r}{more}) whole, as one operation in "
            f"float32, because it cannot be traced: {opaque[where[0]]}",
            stacklevel=5,
        )


def _trace_modes(model: nn.Module, trace_mode: TraceMode, opaque: dict[str, str]) -> Trace:
    """Trace in train mode and in eval mode, and merge the two.

    A second trace in train mode shows what differs for other reasons, such as randomness; one that
    runs the model does so with another batch size.
    """
    train = trace_mode(opaque, training=True)
    again = trace_mode(opaque, training=True, again=True)
    evaluation = trace_mode(opaque, training=False)
    _Merge(train, again, _EACH_TIME, flags=False).run()
    other = "other operations in train mode than in eval mode"
    _Merge(train, evaluation, other, flags=True).run()

    _place_before_users(train)
    calls = [node for node in train.graph.nodes if node.op.startswith("call_")]
    called = {call.path for call in train.calls}
    return Trace(
        graph=train.graph,
        steps=tuple(node for node in calls if node.target is not in_mode),
        calls=tuple(train.calls),
        attributes=train.values | {"training": model.training},
        opaque={path: reason for path, reason in opaque.items() if path in called},
        owners=train.owners,
    )


class _Merge:
    """Compares two traces, and may put the flag ``training`` where their constants differ.

    With ``flags`` constants may differ, and the graph of ``one`` then serves both modes.
    """

    def __init__(self, one: Recorded, other: Recorded, difference: str, *, flags: bool) -> None:
        self.one, self.other = one, other
        self.difference, self.flags = difference, flags
        self.twin: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        others = iter(self.other.graph.nodes)
        b = next(others, None)
        for a in list(self.one.graph.nodes):
            if b is None or not self.same_operation(a, b):
                if self.flags and is_random(a) and not a.users and a.op == "call_function":
                    self.draw_in_training(a)
                    continue
                raise self.failure(a, b)
            self.twin[b] = a
            args, kwargs = self.merged(a, b, (a.args, a.kwargs), (b.args, b.kwargs))
            if self.flags:
                a.args, a.kwargs = args, kwargs
            b = next(others, None)
        if b is not None:
            raise self.failure(None, b)

    def draw_in_training(self, draw: fx.Node) -> None:
        """Keep a random draw that only train mode makes and nobody reads: others come after it."""
        with self.one.graph.inserting_before(draw):
            flag = self.one.graph.create_node("get_attr", "training")
        draw.args = (flag, draw.target.__name__, *draw.args)  # type: ignore[union-attr]
        draw.target = if_training

    def same_operation(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op == b.op == "get_attr":
            x, y = self.one.values[str(a.target)], self.other.values[str(b.target)]
            tensors = isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype
            return x is y or (tensors and torch.equal(x, y))
        return a.op == b.op and a.target == b.target

    def merged(self, a: fx.Node, b: fx.Node, x: Any, y: Any) -> Any:
        if isinstance(x, fx.Node) or isinstance(y, fx.Node):
            if not isinstance(y, fx.Node) or self.twin.get(y) is not x:
                raise self.failure(a, b)
            return x
        if type(x) is type(y) and isinstance(x, tuple | list) and len(x) == len(y):
            return type(x)([self.merged(a, b, i, j) for i, j in zip(x, y, strict=True)])
        if isinstance(x, dict) and isinstance(y, dict) and list(x) == list(y):
            return {key: self.merged(a, b, x[key], y[key]) for key in x}
        if isinstance(x, slice) and isinstance(y, slice):
            parts = ((x.start, y.start), (x.stop, y.stop), (x.step, y.step))
            return slice(*(self.merged(a, b, i, j) for i, j in parts))
        if type(x) is type(y) and (x == y or repr(x) == repr(y)):
            return x
        if self.flags and isinstance(x, CONSTANTS) and isinstance(y, CONSTANTS):
            return self.flag(a, x, y)
        raise self.failure(a, b)

    def flag(self, user: fx.Node, x: Any, y: Any) -> fx.Node:
        graph = self.one.graph
        with graph.inserting_before(user):
            flag = graph.create_node("get_attr", "training")
            if x is True and y is False:
                return flag
            return graph.create_node("call_function", in_mode, (flag, x, y))

    def failure(self, a: fx.Node | None, b: fx.Node | None) -> Failure:
        """Suspect first what only one trace was in, and then what both were in."""
        stacks = [
            () if node is None else tracer.owners.get(node.name, ())
            for tracer, node in ((self.one, a), (self.other, b))
        ]
        root = self.one.model
        common = [path for path in stacks[0] if path in stacks[1]]
        single = [path for stack in stacks for path in stack[::-1] if path not in common]
        seen = [(self.one, a), (self.other, b)]
        where = dict.fromkeys(_where(traced, node) for traced, node in seen if node is not None)
        return Failure(
            f"it does {self.difference}: see {' and '.join(where)}",
            [path for path in single + common[::-1] if not is_layer(root.get_submodule(path))],
        )


def _where(traced: Recorded, node: fx.Node) -> str:
    if node.op == "output":
        return "what it returns"
    line = traced.lines.get(node.name)
    return repr(node.name) + (f", at {line}" if line else "")


def _place_before_users(recorded: Recorded) -> None:
    """Give each reader of a constant its own node, right before it; parameters have one node.

    That stands before the first reader, so the parameter belongs to the block of that one. Later
    blocks take it like any other value: gradients flow back to it, and to them it is a constant
    where that block is frozen.
    """
    graph, parameters = recorded.graph, dict[nn.Parameter, fx.Node]()
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = recorded.values.get(str(node.target))
        if isinstance(value, nn.Parameter):
            node.replace_all_uses_with(parameters.setdefault(value, node))
        for user in list(node.users) if node not in parameters.values() else ():
            with graph.inserting_before(user):
                copy = graph.create_node("get_attr", node.target, name=node.name)
            user.replace_input_with(node, copy)
        if not node.users:
            graph.erase_node(node)
    for parameter, node in parameters.items():
        layers = {path for path, value in recorded.values.items() if _has(value, parameter)}
        for first in graph.nodes:
            if first in node.users or (first.op == "call_module" and first.target in layers):
                first.prepend(node)
                break


def _has(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, nn.Module) and any(p is parameter for p in value.parameters())
