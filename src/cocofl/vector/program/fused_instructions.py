"""Instructions that one pass over memory can do, fused into one.

What lies between them must be of use to nobody else: no other instruction reads it, and no scale
is measured there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeGuard, TypeVar

from cocofl.freeze.lowering import is_sum_of_maps
from cocofl.freeze.operations import LoweredBlock
from cocofl.freeze.scheme import named_values
from cocofl.vector.program.instructions import (
    Drop,
    Instruction,
    Layer,
    Linears,
    Node,
    NormaliseSamples,
    NormaliseSum,
)
from cocofl.vector.program.node_calls import MERGED
from cocofl.vector.rounding.points import Sites

_TOGETHER = 3  # layers whose gradients one kernel takes in
_Kind = TypeVar("_Kind", bound=Instruction)


def fused(
    instructions: Sequence[Instruction], lowered: Sequence[LoweredBlock], sites: Sites
) -> list[Instruction]:
    """LayerNorms take in what is added before them, and linear layers of one input go together."""
    fuser = _Fuser(instructions, lowered, sites)
    found = [fuser.norm(one) if _is_over_channels(one) else one for one in instructions]
    return _with_groups([one for one in found if one.name not in fuser.taken], fuser.readers)


def _with_groups(instructions: Sequence[Instruction], readers: Counter[str]) -> list[Instruction]:
    """Each group of linear layers in the place of its first."""
    groups: dict[Hashable, list[Layer]] = {}
    for one in instructions:
        if _is_linear(one):
            groups.setdefault(_traits(one), []).append(one)
    found: list[Instruction] = []
    for one in instructions:
        if not _is_linear(one):
            found.append(one)
        elif one is groups[_traits(one)][0]:
            layers = groups[_traits(one)]
            for i in range(0, len(layers), _TOGETHER):
                group = tuple(layers[i : i + _TOGETHER])
                found.append(Linears(group, shares=readers[one.op.x] > len(group)))
    return found


def _is_linear(one: Instruction) -> TypeGuard[Layer]:
    """Whether it is a linear layer to which nothing is added."""
    return (
        isinstance(one, Layer)
        and one.weight is not None
        and one.geometry is None
        and one.norm is None
        and one.op.addend is None
        and not one.reshapes
    )


def _traits(layer: Layer) -> Hashable:
    """What layers that go together have in common."""
    assert layer.weight is not None
    return layer.block, layer.op.x, layer.weight.shape, layer.op.activation


def _is_over_channels(one: Instruction) -> TypeGuard[NormaliseSamples]:
    return isinstance(one, NormaliseSamples) and one.is_over_channels


class _Fuser:
    def __init__(
        self, instructions: Sequence[Instruction], lowered: Sequence[LoweredBlock], sites: Sites
    ) -> None:
        self._lowered = lowered
        self._made = {one.name: one for one in instructions}
        self._measured = sites.values
        self.readers = Counter(x for low in lowered for op in low.operations for x in op.inputs)
        self.readers.update(named_values(lowered[-1].outputs))
        self.taken: set[str] = set()

    def norm(self, norm: NormaliseSamples) -> NormaliseSum:
        """With what it can take in."""
        total = self._only_for_one(norm.x, Node)
        if total is None or not self._adds(total):
            return NormaliseSum(norm, None, None, norm.x, None)
        self.taken.add(total.name)
        x, addend = total.call.inputs
        for dropped, other in ((x, addend), (addend, x)):
            drop = self._only_for_one(dropped, Drop)
            if drop is not None and drop.is_elementwise:
                self.taken.add(drop.name)
                return NormaliseSum(norm, total, drop, drop.x, other)
        return NormaliseSum(norm, total, None, x, addend)

    def _only_for_one(self, value: str, kind: type[_Kind]) -> _Kind | None:
        """What makes a value, if it is of this kind and only one other needs the value."""
        maker = self._made.get(value)
        alone = self.readers[value] == 1 and value not in self._measured
        return maker if alone and isinstance(maker, kind) else None

    def _adds(self, node: Node) -> bool:
        """Whether it adds two values of one shape, and no more."""
        call = node.call
        return (
            call.way == MERGED
            and len(call.pieces) == 1
            and is_sum_of_maps(call.pieces[0].op, self._lowered[node.block].shapes)
        )
