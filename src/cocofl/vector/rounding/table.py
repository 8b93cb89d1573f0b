"""The grids of a cohort's devices at all rounding points, in tensors; and a point in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.numerics import StackedGrid, stacked_grid
from cocofl.span import Blocks
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.rounding.points import PointRoundings, RoundingPoint, RoundingPoints, region_ends

# Rounds after which the scales that are known count as settled.
_SETTLED = 3


class DeviceRounding(NamedTuple):
    """For each point (and device): whether it rounds, on the fly or not, which scales it takes."""

    active: NDArray[np.bool_]
    on_the_fly: NDArray[np.bool_]
    unsigned: NDArray[np.bool_]
    members: NDArray[np.int64]
    """Places of scales, padded with one place after the last."""

    @classmethod
    def of(
        cls,
        points: PointRoundings,
        order: Sequence[RoundingPoint],
        place: dict[str, int],
        wide: int,
    ) -> DeviceRounding:
        """One device's points in the given order; ``wide`` is room for the scales of one point."""
        shape = len(order)
        active, fly, unsigned = (np.zeros(shape, bool) for _ in range(3))
        members = np.full((shape, wide), len(place))
        for i, point in enumerate(order):
            if (rounding := points.get(point)) is not None:
                active[i], unsigned[i], fly[i] = True, rounding.unsigned, not rounding.keys
                members[i, : len(rounding.keys)] = [place[key] for key in rounding.keys]
        return cls(active, fly, unsigned, members)

    @classmethod
    def stack(cls, devices: Sequence[DeviceRounding]) -> DeviceRounding:
        """Of many devices."""
        return cls(*(np.stack(arrays, 1) for arrays in zip(*devices, strict=True)))


class RoundingTable:
    """The grids of one cohort at its points, as tensors that a captured graph can read.

    ``scales`` of each device, (device, place), are NaN where not known.
    """

    def __init__(
        self,
        points: Collection[RoundingPoint],
        of_chain: RoundingPoints,
        devices: int,
        on: torch.device,
        kernels: KernelSet,
    ) -> None:
        self.order = sorted(points)
        self.of_device = cache(self._of_device)
        self._of_chain, self._kernels = of_chain, kernels
        shape = (len(self.order), devices)
        self._index = {point: i for i, point in enumerate(self.order)}
        self._grid = StackedGrid(*(torch.zeros(shape, device=on) for _ in range(4)))
        self.on_the_fly = torch.zeros(shape, dtype=torch.bool, device=on)
        self.unsigned = torch.zeros(shape, dtype=torch.bool, device=on)

    def _of_device(self, blocks: Blocks | None, known: frozenset[str]) -> DeviceRounding:
        """What one device rounds: nothing where no blocks are given."""
        points = {} if blocks is None else self._of_chain.used_by(blocks, known)
        place, widest = self._of_chain.sites.place, self._of_chain.most_scales()
        return DeviceRounding.of(points, self.order, place, widest)

    def fill(self, devices: DeviceRounding, scales: Tensor, headroom: float) -> None:
        """Set every grid from the devices' scales."""
        on = scales.device
        active, fly, unsigned, members = (torch.from_numpy(a).to(on) for a in devices)
        padded = torch.nn.functional.pad(scales, (0, 1), value=-torch.inf)
        which = torch.arange(len(scales), device=on)[None, :, None]
        widest = padded[which, members].amax(2)
        widest = torch.where(active & ~fly, widest, torch.nan)
        for own, new in zip(self._grid, stacked_grid(widest, unsigned, headroom), strict=True):
            own.copy_(new)
        self.on_the_fly.copy_(fly)
        self.unsigned.copy_(unsigned)

    def known(self, point: RoundingPoint) -> StackedGrid | None:
        """The devices' grids at a point; None if nobody ever rounds there."""
        i = self._index.get(point)
        return None if i is None else StackedGrid(*(part[i] for part in self._grid))

    def measured(self, point: RoundingPoint, scale: Tensor) -> StackedGrid:
        """The same, with grids of the tensor's own scale where they are made on the fly."""
        i = self._index[point]
        known = StackedGrid(*(part[i] for part in self._grid))
        kernels = self._kernels.rows(scale)
        return kernels.measured_grid(scale, self.on_the_fly[i], self.unsigned[i], known)


Note = Callable[[Tensor], None]


@dataclass(frozen=True)
class ActivePoint:
    """A point in one step: its table, whether someone scales on the fly, whom to tell the scale."""

    kernels: KernelSet
    point: RoundingPoint
    table: RoundingTable | None
    on_the_fly: bool
    note: Note | None

    @property
    def must_measure(self) -> bool:
        """Whether the tensor's own scale is needed."""
        return self.on_the_fly or self.note is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens here."""
        return self.note is None and self.known() is None

    def idle(self) -> ActivePoint:
        """The same place, where nothing is left to do."""
        return ActivePoint(self.kernels, self.point, None, on_the_fly=False, note=None)

    def known(self) -> StackedGrid | None:
        """The grids, as far as they do not depend on the tensor."""
        return None if self.table is None else self.table.known(self.point)

    def measure(self, scale: Tensor) -> StackedGrid | None:
        """The grids, given the tensor's own scale on each device."""
        if self.note is not None:
            self.note(scale)
        if self.on_the_fly and self.table is not None:
            return self.table.measured(self.point, scale)
        return self.known()


class CohortRounding:
    """What all devices of a cohort round: one computation, and a table of grids for it.

    What differs between rounds are numbers; which points there are decides which computation is
    captured, so it should settle.
    """

    def __init__(
        self,
        of_chain: RoundingPoints,
        kernels: KernelSet,
        devices: int,
        on: torch.device,
        headroom: float,
    ) -> None:
        self._of_chain, self._headroom = of_chain, headroom
        self._new_table = partial(
            RoundingTable, of_chain=of_chain, devices=devices, on=on, kernels=kernels
        )
        self._tables: dict[frozenset[RoundingPoint], RoundingTable] = {}
        self._region_ends = frozenset[int]()
        self._seen_known: Counter[tuple[frozenset[str], ...]] = Counter()

    def table(self, points: frozenset[RoundingPoint]) -> RoundingTable | None:
        """For a computation with these points."""
        return self._tables.get(points)

    def begin(
        self, devices: Sequence[tuple[Blocks | None, frozenset[str]]], scales: Tensor
    ) -> tuple[frozenset[RoundingPoint], frozenset[RoundingPoint]]:
        """Set the grids of a round; its points, and those where some device scales on the fly.

        Devices train blocks and freeze the others in int8 (None: in float), with these scales
        known; their values are rows of ``scales``.
        """
        n = self._of_chain.n_blocks
        round_some = [(b, known) for b, known in devices if b is not None and len(b) < n]
        if not round_some:
            return frozenset(), frozenset()
        settled = tuple(dict.fromkeys(known for _, known in round_some))
        self._seen_known[settled] += 1
        if self._seen_known[settled] < _SETTLED:
            # In the first rounds new scales become known every time. One computation that can
            # scale anything on the fly serves them all, so that not each has to be captured.
            settled = (frozenset(), frozenset(self._of_chain.sites.keys), *settled)
        self._region_ends |= {end for blocks, _ in round_some for end in region_ends(blocks, n)}
        possible = [self._of_chain.possible(known, self._region_ends) for known in settled]
        points, on_the_fly = (frozenset().union(*kind) for kind in zip(*possible, strict=True))
        if points not in self._tables:
            self._tables[points] = self._new_table(points)
        table = self._tables[points]
        own = [table.of_device(blocks, known) for blocks, known in devices]
        table.fill(DeviceRounding.stack(own), scales, self._headroom)
        return points, on_the_fly
