"""Where each device of a cohort rounds to int8, and to which grid.

A *rounding point* is a place of the shared computation where a value or a gradient may be
rounded. Which of a chain's points a device uses depends on the blocks it trains: on the frozen
region before them and on the passing regions after them, each of which has its quantization
scheme. Devices that train other blocks differ in numbers only, so they share one computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from cocofl.freeze import Network
from cocofl.freeze.operations import LoweredBlock, NodeOp
from cocofl.freeze.scheme import GRADIENT, OUTPUT, QuantizationScheme, Rounding, scale_key
from cocofl.span import Blocks, Role


class RoundingPoint(NamedTuple):
    """A conversion for those who read codes, an output, or the gradient that arrives at a value."""

    kind: str
    value: str


CONVERSION = "conversion"
PointRoundings = dict[RoundingPoint, Rounding]


class Sites:
    """The scales of a chain: which there are, and their places in one row of numbers."""

    def __init__(self, network: Network) -> None:
        self.values = frozenset(site for low in network.lowered.blocks for site in low.sites)
        self.keys = network.scale_keys
        self.place = {key: i for i, key in enumerate(self.keys)}


class RoundingPoints:
    """The points of a chain, whatever blocks are trained."""

    def __init__(self, network: Network, sites: Sites) -> None:
        self._lowered, self.sites, self.n_blocks = network.with_dropout, sites, len(network)
        self._stands_for = _dropped(self._lowered.blocks)
        self._region = cache(self._points_of)
        self.used_by = cache(self._points_under)
        self.possible = cache(self._possible_points)
        self.most_scales = cache(self._most_scales)

    def _points_under(self, blocks: Blocks, known: frozenset[str]) -> PointRoundings:
        """What a ``qff`` device that trains these rounds, if the server knows these scales."""
        found: PointRoundings = {}
        for region, role in blocks.regions(self.n_blocks):
            if role is not Role.TRAINED:
                found |= self._region(region, role is Role.PASSING, known)
        return found

    def _possible_points(
        self, known: frozenset[str], ends: frozenset[int]
    ) -> tuple[frozenset[RoundingPoint], frozenset[RoundingPoint]]:
        """The points that some device uses, and those that some device scales on the fly.

        ``ends`` are where regions end beside the chain's own end.
        """
        found = [item for points in self._regions(known, ends) for item in points.items()]
        on_the_fly = frozenset(point for point, rounding in found if not rounding.keys)
        return frozenset(point for point, _ in found), on_the_fly

    def _most_scales(self) -> int:
        """The most scales that can make one grid."""
        regions = self._regions(frozenset(self.sites.keys), frozenset())
        counts = (len(rounding.keys) for points in regions for rounding in points.values())
        return max(1, max(counts, default=1))

    def _regions(self, known: frozenset[str], ends: frozenset[int]) -> Iterator[PointRoundings]:
        """The points of each region that a device may have."""
        n = self.n_blocks
        for border in range(1, n):
            yield self._region(range(border), False, known)
            for end in {n, *ends}:
                yield self._region(range(border, end), True, known)

    def _points_of(self, blocks: range, passing: bool, known: frozenset[str]) -> PointRoundings:
        if not blocks:
            return {}
        scheme = self._lowered.scheme(blocks, passing, self._with_dropped(known))
        return {
            point: Rounding(tuple(map(self._own_key, r.keys)), r.unsigned)
            for point, r in _points_in(scheme)
        }

    def _with_dropped(self, known: frozenset[str]) -> frozenset[str]:
        """Also the scales of what dropout makes of a value."""
        return known | {
            scale_key(made, way)
            for made, value in self._stands_for.items()
            for way in (OUTPUT, GRADIENT)
            if scale_key(value, way) in known
        }

    def _own_key(self, key: str) -> str:
        if key in self.sites.place:
            return key
        value, _, way = key.removeprefix("scales.").rpartition(".")
        return scale_key(self._stands_for[value], way)


def _points_in(scheme: QuantizationScheme) -> Iterator[tuple[RoundingPoint, Rounding]]:
    """Where the steps of a region round."""
    for step in scheme.steps:
        if step.op is None and step.output is not None:
            yield RoundingPoint(CONVERSION, step.inputs[0]), step.output
        elif step.output is not None:
            yield RoundingPoint(OUTPUT, step.name), step.output
        if step.passes_gradient and step.gradient is not None and not step.gradient_in_codes:
            yield RoundingPoint(GRADIENT, step.name), step.gradient
        if step.input_gradient is not None:
            yield RoundingPoint(GRADIENT, step.inputs[0]), step.input_gradient


def _dropped(lowered: Iterable[LoweredBlock]) -> dict[str, str]:
    """What dropouts make, by the value it stands for when frozen."""
    found: dict[str, str] = {}
    for low in lowered:
        for op in low.operations:
            if isinstance(op, NodeOp) and op.drops:
                found[op.name] = found.get(op.inputs[0], op.inputs[0])
    return found
