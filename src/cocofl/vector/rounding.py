"""Where each device of a cohort rounds to int8, and to which grid.

A *tap* is a place of the shared computation where a value or a gradient may be rounded. Which of
a chain's taps a device uses depends on the blocks it trains: on the frozen region before them and
on the passing regions after them, each of which :func:`~cocofl.freeze.speech.roundings` knows.
Devices that train other blocks differ in numbers only, so they share one computation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from cocofl.chain import BlockChain
from cocofl.freeze.grids import GRADIENT, OUTPUT, Grids, scale_key
from cocofl.freeze.lowering import LoweredBlock, NodeOp, ValueName
from cocofl.freeze.net import region_borders
from cocofl.freeze.speech import Rounding, Roundings, roundings
from cocofl.numerics import StackedGrid, stacked_grid
from cocofl.span import Blocks, Role
from cocofl.vector.fused import kernels_for


class Tap(NamedTuple):
    """A conversion for those who read codes, an output, or the gradient that arrives at a value."""

    kind: str
    value: str


CONVERSION = "conversion"
Taps = dict[Tap, Rounding]


class Sites:
    """The scales of a chain: which there are, and their places in one row of numbers."""

    def __init__(self, plain: Sequence[LoweredBlock]) -> None:
        self.values = [(i, site) for i, low in enumerate(plain) for site in low.sites]
        self.keys = [scale_key(v, way) for _, v in self.values for way in (OUTPUT, GRADIENT)]
        self.place = {key: i for i, key in enumerate(self.keys)}


def region_ends(blocks: Blocks, n_blocks: int) -> frozenset[int]:
    """The blocks before which regions that pass gradients end."""
    regions = blocks.regions(n_blocks)
    return frozenset(region.blocks.stop for region in regions if region.role is Role.PASSING)


class Rounder:
    """The taps of a chain, whatever blocks are trained."""

    def __init__(self, chain: BlockChain, lowered: Sequence[LoweredBlock], sites: Sites) -> None:
        self._chain, self._lowered, self._sites = chain, tuple(lowered), sites
        self._positive = frozenset[str]().union(*(low.non_negative for low in lowered))
        self._stands_for = _dropped(lowered)
        self._region = cache(self._taps_of)
        self.taps = cache(self._taps_under)
        self.possible = cache(self._possible_taps)
        self.widest = cache(self._most_scales)

    def _taps_under(self, blocks: Blocks, known: frozenset[str]) -> Taps:
        """What a ``qff`` device that trains these rounds, if the server knows these scales."""
        found: Taps = {}
        for region, role in blocks.regions(len(self._chain)):
            if role is not Role.TRAINED:
                found |= self._region(region, role is Role.PASSING, known)
        return found

    def _possible_taps(
        self, known: frozenset[str], ends: frozenset[int]
    ) -> tuple[frozenset[Tap], frozenset[Tap]]:
        """The taps that some device uses, and those that some device scales on the fly.

        ``ends`` are where regions end beside the chain's own end.
        """
        found = [item for taps in self._regions(known, ends) for item in taps.items()]
        on_the_fly = frozenset(tap for tap, rounding in found if not rounding.keys)
        return frozenset(tap for tap, _ in found), on_the_fly

    def _most_scales(self) -> int:
        """The most scales that can make one grid."""
        regions = self._regions(frozenset(self._sites.keys), frozenset())
        counts = (len(rounding.keys) for taps in regions for rounding in taps.values())
        return max(1, max(counts, default=1))

    def _regions(self, known: frozenset[str], ends: frozenset[int]) -> Iterator[Taps]:
        """The taps of each region that a device may have."""
        n = len(self._chain)
        for border in range(1, n):
            yield self._region(range(border), False, known)
            for end in {n, *ends}:
                yield self._region(range(border, end), True, known)

    def _taps_of(self, blocks: range, passing: bool, known: frozenset[str]) -> Taps:
        if not blocks:
            return {}
        operations = [op for i in blocks for op in self._lowered[i].operations]
        borders = region_borders(self._chain, blocks, self._lowered)
        ends = [x for x in pytree.tree_leaves(borders.returned) if isinstance(x, ValueName)]
        grids = Grids(operations, self._positive, self._scales(known), headroom=1.0)
        taken = list(borders.taken.values())
        found: Roundings = roundings(
            operations, grids, taken, list(dict.fromkeys(ends)), passing=passing
        )
        kinds = {
            CONVERSION: found.conversions,
            OUTPUT: found.outputs,
            GRADIENT: found.gradients,
        }
        return {
            Tap(kind, value): Rounding(tuple(map(self._own_key, r.keys)), r.unsigned)
            for kind, group in kinds.items()
            for value, r in group.items()
        }

    def _scales(self, known: frozenset[str]) -> dict[str, float]:
        """Scales by key, also of what dropout makes of a value; only their presence counts here."""
        also = {
            scale_key(made, way)
            for made, value in self._stands_for.items()
            for way in (OUTPUT, GRADIENT)
            if scale_key(value, way) in known
        }
        return dict.fromkeys(known | also, 1.0)

    def _own_key(self, key: str) -> str:
        if key in self._sites.place:
            return key
        value, _, way = key.removeprefix("scales.").rpartition(".")
        return scale_key(self._stands_for[value], way)


def _dropped(lowered: Iterable[LoweredBlock]) -> dict[str, str]:
    """What dropouts make, by the value it stands for when frozen."""
    found: dict[str, str] = {}
    for low in lowered:
        for op in low.operations:
            if isinstance(op, NodeOp) and op.drops:
                found[op.name] = found.get(op.inputs[0], op.inputs[0])
    return found


class RoundingPlan(NamedTuple):
    """For each tap (and device): whether it rounds, on the fly or not, which scales it takes."""

    active: NDArray[np.bool_]
    on_the_fly: NDArray[np.bool_]
    unsigned: NDArray[np.bool_]
    members: NDArray[np.int64]
    """Places of scales, padded with one place after the last."""

    @classmethod
    def of(cls, taps: Taps, order: Sequence[Tap], place: dict[str, int], wide: int) -> RoundingPlan:
        """One device's taps in the given order; ``wide`` is room for the scales of one tap."""
        shape = len(order)
        active, fly, unsigned = (np.zeros(shape, bool) for _ in range(3))
        members = np.full((shape, wide), len(place))
        for i, tap in enumerate(order):
            if (rounding := taps.get(tap)) is not None:
                active[i], unsigned[i], fly[i] = True, rounding.unsigned, not rounding.keys
                members[i, : len(rounding.keys)] = [place[key] for key in rounding.keys]
        return cls(active, fly, unsigned, members)

    @classmethod
    def stack(cls, devices: Sequence[RoundingPlan]) -> RoundingPlan:
        """Many devices' plans as one."""
        return cls(*(np.stack(arrays, 1) for arrays in zip(*devices, strict=True)))


class RoundingTable:
    """The grids of one cohort at its taps, as tensors that a captured graph can read.

    ``scales`` of each device, (device, place), are NaN where not known.
    """

    def __init__(self, taps: Collection[Tap], devices: int, on: torch.device, sites: Sites) -> None:
        self.order = sorted(taps)
        self.plan = cache(self._plan_of)
        self._sites = sites
        shape = (len(self.order), devices)
        self._index = {tap: i for i, tap in enumerate(self.order)}
        self._grid = StackedGrid(*(torch.zeros(shape, device=on) for _ in range(4)))
        self.on_the_fly = torch.zeros(shape, dtype=torch.bool, device=on)
        self.unsigned = torch.zeros(shape, dtype=torch.bool, device=on)

    def _plan_of(
        self, rounder: Rounder, blocks: Blocks | None, known: frozenset[str]
    ) -> RoundingPlan:
        """One device's plan; nothing is rounded where no blocks are given."""
        taps = {} if blocks is None else rounder.taps(blocks, known)
        return RoundingPlan.of(taps, self.order, self._sites.place, rounder.widest())

    def fill(self, plan: RoundingPlan, scales: Tensor, headroom: float) -> None:
        """Set every grid from the devices' scales."""
        on = scales.device
        active, fly, unsigned, members = (torch.from_numpy(a).to(on) for a in plan)
        padded = torch.nn.functional.pad(scales, (0, 1), value=-torch.inf)
        which = torch.arange(len(scales), device=on)[None, :, None]
        widest = padded[which, members].amax(2)
        widest = torch.where(active & ~fly, widest, torch.nan)
        for own, new in zip(self._grid, stacked_grid(widest, unsigned, headroom), strict=True):
            own.copy_(new)
        self.on_the_fly.copy_(fly)
        self.unsigned.copy_(unsigned)

    def known(self, tap: Tap) -> StackedGrid | None:
        """The devices' grids at a tap; None if nobody ever rounds there."""
        i = self._index.get(tap)
        return None if i is None else StackedGrid(*(part[i] for part in self._grid))

    def measured(self, tap: Tap, scale: Tensor) -> StackedGrid:
        """The same, with grids of the tensor's own scale where they are made on the fly."""
        i = self._index[tap]
        known = StackedGrid(*(part[i] for part in self._grid))
        grid: StackedGrid = kernels_for(scale).measured_grid(
            scale, self.on_the_fly[i], self.unsigned[i], known
        )
        return grid
