"""Instructions that one pass over memory can do, fused into one.

What lies between them must be of use to nobody else: no other instruction reads it, and no scale
is measured there. A layer that knows its only reader may leave it to that to finish what it made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

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
)
from cocofl.vector.program.node_calls import MERGED
from cocofl.vector.rounding.points import Sites

_TOGETHER = 3  # layers whose gradients one kernel takes in


def fused(
    instructions: Sequence[Instruction], lowered: Sequence[LoweredBlock], sites: Sites
) -> list[Instruction]:
    """LayerNorms take in what is added before them, and linear layers of one input go together."""
    readers = Counter(x for low in lowered for op in low.operations for x in op.inputs)
    readers.update(named_values(lowered[-1].outputs))
    for_one = {
        one.name: one
        for one in instructions
        if readers[one.name] == 1 and one.name not in sites.values
    }
    found: list[Instruction] = []
    taken: set[str] = set()
    for one in instructions:
        if isinstance(one, NormaliseSamples) and one.is_over_channels:
            norm = _with_sum(one, for_one, lowered)
            taken |= {part.name for part in (norm.total, norm.drop) if part is not None}
            found.append(norm)
        else:
            found.append(one)
    rest = [one for one in found if one.name not in taken]
    return _with_groups(_with_readers(rest, readers), readers)


def _with_readers(instructions: Sequence[Instruction], readers: Counter[str]) -> list[Instruction]:
    """Layers with a norm know the convolution of their block that alone reads them."""
    of_images = [one for one in instructions if _is_of_images(one)]
    convolutions = {
        (one.op.x, one.block): one
        for one in of_images
        if one.weight is not None and one.op.addend != one.op.x
    }
    leaving = {
        one.name
        for one in of_images
        if one.norm is not None and one.op.addend is None and readers[one.name] == 1
    }
    return [
        replace(one, reader=convolutions.get((one.name, one.block)))
        if one.name in leaving and isinstance(one, Layer)
        else one
        for one in instructions
    ]


def _is_of_images(one: Instruction) -> TypeGuard[Layer]:
    """Whether it is a convolution, or a norm by itself, of images."""
    reshapes = isinstance(one, Layer) and one.op.kind is not None and one.op.kind.reshapes
    return isinstance(one, Layer) and one.op.geometry is not None and not reshapes


def _with_sum(
    norm: NormaliseSamples, for_one: Mapping[str, Instruction], lowered: Sequence[LoweredBlock]
) -> NormaliseSamples:
    """The norm with what it can take in of instructions that make a value for one other only."""
    total = for_one.get(norm.x)
    if not isinstance(total, Node) or not _adds(total, lowered[total.block]):
        return norm
    makers = (for_one.get(name) for name in total.call.inputs)
    drops = (drop for drop in makers if isinstance(drop, Drop) and drop.is_elementwise)
    return replace(norm, total=total, drop=next(drops, None))


def _adds(node: Node, low: LoweredBlock) -> bool:
    """Whether it adds two values of one shape, and no more."""
    pieces = node.call.pieces
    alone = node.call.way == MERGED and len(pieces) == 1
    return alone and is_sum_of_maps(pieces[0].op, low.shapes)


def _with_groups(instructions: Sequence[Instruction], readers: Counter[str]) -> list[Instruction]:
    """Each group of linear layers in the place of its first."""
    groups: dict[Hashable, list[Instruction]] = {}
    for one in instructions:
        groups.setdefault(_traits(one) if _is_linear(one) else one.name, []).append(one)
    found: list[Instruction] = []
    for group in groups.values():
        layers = [one for one in group if _is_linear(one)]
        found += [] if layers else group
        for i in range(0, len(layers), _TOGETHER):
            some = tuple(layers[i : i + _TOGETHER])
            shares = readers[some[0].op.x] > len(some)
            found.append(Linears(some[-1].name, some[0].block, some, shares))
    return found


def _is_linear(one: Instruction) -> TypeGuard[Layer]:
    """Whether it is a linear layer to which nothing is added."""
    return (
        isinstance(one, Layer)
        and one.op.kind is not None
        and not one.op.kind.reshapes
        and one.op.geometry is None
        and one.norm is None
        and one.op.addend is None
    )


def _traits(layer: Layer) -> Hashable:
    """What layers that go together have in common."""
    assert layer.weight is not None
    return layer.block, layer.op.x, layer.weight.shape, layer.op.activation
