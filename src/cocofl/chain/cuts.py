"""Where a traced model may be cut, and where it is cut.

A cut lies before a step. It is possible where exactly one *main* tensor is alive, one that comes
from the samples and that a gradient flows through. Beside it may cross what no gradient flows
through (sizes, masks, the inputs), and what comes from parameters alone (a tied weight, a table of
relative positions that all layers add): gradients flow back to the block that made it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from cocofl.chain.graphs import (
    BY_HAND,
    Call,
    does_not_run,
    is_container,
    left_as_it_was,
    tensors_in,
)
from cocofl.chain.shared import kept_together
from cocofl.chain.trace import Trace
from cocofl.errors import CannotSplit
from cocofl.named import nearest

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU)
# Functions that apply a parameter as part of a norm, activation or offset, not as a layer.
ELEMENTWISE = {
    *(F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm, F.rms_norm, F.prelu),
    *(operator.add, operator.mul, operator.sub, operator.truediv, operator.iadd, operator.imul),
    *(torch.add, torch.mul, torch.sub, torch.div, torch.prelu),
}


@dataclass(frozen=True)
class Layout:
    """What is known about each possible place of a cut; cut ``p`` lies before step ``p``."""

    trace: Trace
    alive: tuple[tuple[fx.Node, ...], ...]
    """The main values alive at each place."""
    weighty: tuple[bool, ...]
    """Whether each step reads parameters that none reads before it."""
    possible: frozenset[int]

    def has_weights(self, start: int, stop: int) -> bool:
        """Whether any of the steps ``start:stop`` is the first to read a parameter."""
        return any(self.weighty[start:stop])

    def is_block(self, start: int, stop: int) -> bool:
        """Whether the steps ``start:stop`` have parameters and make the next main tensor."""
        return self.has_weights(start, stop) and (
            start == 0 or stop == len(self.weighty) or self.alive[start] != self.alive[stop]
        )


def lay_out(trace: Trace, example: Sequence[Any], model: nn.Module) -> Layout:
    """Run the example to see which values are tensors that a gradient flows through."""
    n = len(trace.steps)
    weighty = [False] * n
    read: set[nn.Parameter] = set()
    for node in trace.graph.nodes:
        held = set(trace.parameters(node).values())
        if 0 <= trace.places[node] < n and held - read:
            weighty[trace.places[node]] = True
        read |= held
    alive: list[list[fx.Node]] = [[] for _ in range(n + 1)]
    main = _MainValues(trace, example, model)
    with left_as_it_was(model, training=False), torch.no_grad():
        main.run(*[value.clone() for value in example])  # it may be overwritten
    is_single = main.is_single
    for node in is_single:
        last = max((trace.places[user] for user in node.users), default=-1)
        for place in range(trace.places[node] + 1, last + 1):
            alive[place].append(node)
    single = [[value for value in values if is_single[value]] for values in alive]
    possible = frozenset(p for p in range(1, n) if len(alive[p]) == len(single[p]) == 1)
    return Layout(trace, tuple(map(tuple, alive)), tuple(weighty), possible)


def default_cuts(layout: Layout) -> list[int]:
    """Cut at both ends of the model's own repeated modules, else around its layers."""
    cuts = _tidy(layout, _unit_cuts(layout))
    return cuts or fine_cuts(layout)


def fine_cuts(layout: Layout) -> list[int]:
    """Cut before each layer where possible; norm and activation stay with the layer before."""
    layers = [-1, *(i for i, node in enumerate(layout.trace.steps) if _is_layer(layout, i, node))]
    cuts = []
    for before, layer in pairwise(layers):
        between = [place for place in range(before + 1, layer + 1) if place in layout.possible]
        cuts += between[-1:]
    cuts = _tidy(layout, cuts)
    if not cuts:
        raise CannotSplit(_why_whole(layout))
    return cuts


def named_cuts(layout: Layout, names: Sequence[str]) -> list[int]:
    """Cut after each named module or operation, or say why not."""
    ends = {node.name: i + 1 for i, node in enumerate(layout.trace.steps)}
    ends |= {call.path: call.stop for call in layout.trace.calls}
    cuts = {}
    for name in names:
        if name not in ends:
            hint = nearest(name, ends)
            raise CannotSplit(f"cuts: no module or operation {name!r} is called{hint}")
        if ends[name] not in layout.possible:
            raise CannotSplit(f"cannot cut after {name!r}: {_why_not(layout, ends[name])}")
        cuts[ends[name]] = name
    places = sorted(cuts)
    for name, (first, last) in kept_together(layout.trace).items():
        for place in places:
            if first < place <= last:
                raise CannotSplit(
                    f"cannot cut after {cuts[place]!r}: the parameter {name!r} is used on both "
                    "sides, and one could be frozen while the other trains"
                )
    for start, stop in pairwise([0, *places, len(layout.weighty)]):
        if not layout.is_block(start, stop):
            where = f"after {cuts[start]!r}" if start else f"before the cut after {cuts[stop]!r}"
            raise CannotSplit(f"cuts: the block {where} has no parameters, so it cannot be trained")
    if not places:
        raise CannotSplit("cuts is empty; expected the names of modules after which to cut")
    return places


class _MainValues(fx.Interpreter):
    """Runs the graph on the example and finds the values that a gradient flows through."""

    def __init__(self, trace: Trace, example: Sequence[Any], model: nn.Module) -> None:
        super().__init__(model, graph=trace.graph)
        self.extra_traceback = False  # our own message says where
        self.trace, self.example, self.model = trace, example, model
        self.is_single: dict[fx.Node, bool] = {}
        """Whether each of them is a single tensor."""
        self.learned: set[fx.Node] = set()
        """What comes from parameters alone."""
        self.samples: set[fx.Node] = set()
        """Tensors that come from the inputs."""

    def fetch_attr(self, target: str) -> Any:
        return False if target == "training" else self.trace.attributes[target]

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            owner = (self.trace.owners.get(n.name) or ("",))[-1]
            module = str(n.target) if n.op == "call_module" else owner
            raise does_not_run(self.model, self.example, module, error) from error
        if n.op in ("get_attr", "output"):
            return value
        sources = n.all_input_nodes
        given = n.op == "placeholder"
        if tensors_in(value) and (given or not self.samples.isdisjoint(sources)):
            self.samples.add(n)
        reads = any(self.trace.parameters(source) for source in (n, *sources))
        learned = reads or not self.learned.isdisjoint(sources)
        main = any(source in self.is_single for source in sources)
        floats = any(t.is_floating_point() or t.is_complex() for t in tensors_in(value))
        if floats and (main or (learned and n in self.samples)):
            self.is_single[n] = isinstance(value, Tensor)
        elif floats and learned:
            self.learned.add(n)
        return value


def _unit_cuts(layout: Layout) -> list[int]:
    """Both ends of each unit: an instance of a repeated module that is not a mere container."""
    calls = [
        call
        for call in layout.trace.calls
        if not is_container(call.module) and layout.has_weights(call.start, call.stop)
    ]
    instances = Counter(type(module) for module in {call.module for call in calls})
    calls = [call for call in calls if instances[type(call.module)] > 1]
    stages = _stages(layout, calls)
    cuts: set[int] = set()
    done = 0
    for call in calls:  # in the order in which they began, so outer ones come first
        if call.start >= done and type(call.module) not in stages:
            cuts |= {call.start, call.stop}
            done = call.stop
    return sorted(cuts & layout.possible)


def _stages(layout: Layout, calls: Sequence[Call]) -> set[type[nn.Module]]:
    """The classes that merely run repeated modules one after the other, in all their instances.

    An instance around a single repeated module may belong to such a class, but does not show it.
    """
    shown: set[type[nn.Module]] = set()
    refuted: set[type[nn.Module]] = set()
    around: dict[type[nn.Module], set[type[nn.Module]]] = {}
    for index, call in enumerate(calls):
        kind, inner = type(call.module), _inner_calls(calls, index)
        ends = {place for c in inner for place in (c.start, c.stop)}
        inside = {place for place in ends if call.start < place < call.stop}
        if not inner or not inside <= layout.possible:
            refuted.add(kind)
        elif any(
            layout.has_weights(call.start, place) and layout.has_weights(place, call.stop)
            for place in inside
        ):
            shown.add(kind)
        else:
            around.setdefault(kind, set()).update(type(c.module) for c in inner)
    while more := {kind for kind, inner in around.items() if inner & (shown - refuted)} - shown:
        shown |= more
    return shown - refuted


def _inner_calls(calls: Sequence[Call], index: int) -> list[Call]:
    """The outermost of the calls made by the call at ``index``."""
    inner: list[Call] = []
    for call in calls[index + 1 :]:
        if call.start >= calls[index].stop:
            break
        if not inner or call.start >= inner[-1].stop:
            inner.append(call)
    return inner


def _is_layer(layout: Layout, place: int, node: fx.Node) -> bool:
    if not layout.weighty[place]:
        return False
    if node.op == "call_module":
        return not isinstance(layout.trace.attributes[str(node.target)], NORMS)
    return node.target not in ELEMENTWISE


def _tidy(layout: Layout, cuts: Sequence[int]) -> list[int]:
    """Keep shared weights in one block, and let pieces without parameters join a neighbour."""
    for first, last in kept_together(layout.trace).values():
        cuts = [place for place in cuts if not first < place <= last]
    kept: list[int] = []
    for place in cuts:
        if layout.is_block(kept[-1] if kept else 0, place):
            kept.append(place)
    if kept and not layout.is_block(kept[-1], len(layout.weighty)):
        kept.pop()
    return kept


def _why_not(layout: Layout, place: int) -> str:
    if place >= len(layout.weighty):
        return "nothing comes after it"
    names = [node.name for node in layout.alive[place]]
    if not any(layout.weighty[:place]):
        return "no layer comes before it"
    if not names:
        return "no tensor that a gradient flows through is alive there"
    if len(names) == 1:
        return f"what is alive there, {names[0]!r}, is several tensors in one"
    return (
        f"{len(names)} tensors are alive there, {', '.join(names)}; "
        "a cut is possible where only one is"
    )


def _why_whole(layout: Layout) -> str:
    shared = kept_together(layout.trace)
    opaque = "".join(f" {path!r} stays whole: {why}." for path, why in layout.trace.opaque.items())
    if shared and layout.possible:
        names = ", ".join(repr(name) for name in shared)
        return (
            f"the model cannot be cut into two blocks: it uses the parameter {names} in several "
            "places, and what lies between must stay in one block, or one place could be frozen "
            f"while another trains.{opaque} {BY_HAND}"
        )
    return (
        "the model cannot be cut into two blocks with parameters: nowhere between two of its "
        f"layers is exactly one tensor alive.{opaque} {BY_HAND}"
    )
