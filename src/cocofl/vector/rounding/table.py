"""The grids of a cohort's devices at all rounding points, in tensors; and a point in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.numerics import HEADROOM, StackedGrid, stacked_grid
from cocofl.span import Blocks, Role
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.rounding.points import RoundingPoint, RoundingPoints

# Rounds after which the scales that are known count as settled.
_SETTLED = 3


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
    ) -> None:
        self._of_chain = of_chain
        self._index = {point: i for i, point in enumerate(sorted(points))}
        self._of_device = cache(self._rounding_of)
        shape = (len(points), devices)
        self._grid = StackedGrid(*(torch.zeros(shape, device=on) for _ in range(4)))
        self._on_the_fly = torch.zeros(shape, dtype=torch.bool, device=on)
        self._unsigned = torch.zeros(shape, dtype=torch.bool, device=on)

    def _rounding_of(
        self, blocks: Blocks | None, known: frozenset[str]
    ) -> tuple[NDArray[Any], ...]:
        """What one device rounds: nothing where no blocks are given.

        By point whether it rounds, on the fly, to an unsigned grid; and the places of the scales
        that it takes, padded with one place after the last.
        """
        points = {} if blocks is None else self._of_chain.used_by(blocks, known)
        place, shape = self._of_chain.sites.place, len(self._index)
        active, fly, unsigned = (np.zeros(shape, bool) for _ in range(3))
        members = np.full((shape, self._of_chain.most_scales()), len(place))
        for point, i in self._index.items():
            if (rounding := points.get(point)) is not None:
                active[i], unsigned[i], fly[i] = True, rounding.unsigned, not rounding.keys
                members[i, : len(rounding.keys)] = [place[key] for key in rounding.keys]
        return active, fly, unsigned, members

    def fill(self, devices: Sequence[tuple[Blocks | None, frozenset[str]]], scales: Tensor) -> None:
        """Set every grid from the devices' scales."""
        on, each = scales.device, [self._of_device(*device) for device in devices]
        active, fly, unsigned, members = (
            torch.from_numpy(np.stack(arrays, 1)).to(on) for arrays in zip(*each, strict=True)
        )
        padded = torch.nn.functional.pad(scales, (0, 1), value=-torch.inf)
        which = torch.arange(len(scales), device=on)[None, :, None]
        widest = padded[which, members].amax(2)
        widest = torch.where(active & ~fly, widest, torch.nan)
        for own, new in zip(self._grid, stacked_grid(widest, unsigned, HEADROOM), strict=True):
            own.copy_(new)
        self._on_the_fly.copy_(fly)
        self._unsigned.copy_(unsigned)

    def known(self, point: RoundingPoint) -> StackedGrid | None:
        """The devices' grids at a point; None if nobody ever rounds there."""
        i = self._index.get(point)
        return None if i is None else StackedGrid(*(part[i] for part in self._grid))

    def flags(self, point: RoundingPoint) -> tuple[Tensor, Tensor]:
        """Of each device, whether it scales on the fly there, and to an unsigned grid."""
        return self._on_the_fly[self._index[point]], self._unsigned[self._index[point]]


Note = Callable[[Tensor], None]


@dataclass(frozen=True)
class ActivePoint:
    """A point in one step; by default nothing happens there."""

    kernels: KernelSet
    known: StackedGrid | None = None
    """The grids, as far as they do not depend on the tensor."""
    flags: tuple[Tensor, Tensor] | None = None
    """Where someone scales on the fly: on which devices, and who has an unsigned grid."""
    note: Note | None = None
    """Who is told the tensor's own scale."""

    @property
    def must_measure(self) -> bool:
        """Whether the tensor's own scale is needed."""
        return self.flags is not None or self.note is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens here."""
        return self.note is None and self.known is None

    def measure(self, scale: Tensor) -> StackedGrid | None:
        """The grids, given the tensor's own scale on each device."""
        if self.note is not None:
            self.note(scale)
        if self.flags is None or self.known is None:
            return self.known
        measured_grid = self.kernels.rows(scale).measured_grid
        found: StackedGrid = measured_grid(scale, *self.flags, self.known)
        return found


class CohortRounding:
    """What all devices of a cohort round: one computation, and a table of grids for it.

    What differs between rounds are numbers; which points there are decides which computation is
    captured, so it should settle.
    """

    def __init__(self, of_chain: RoundingPoints, devices: int, on: torch.device) -> None:
        self._of_chain = of_chain
        self._new_table = partial(RoundingTable, of_chain=of_chain, devices=devices, on=on)
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
        regions = [region for blocks, _ in round_some for region in blocks.regions(n)]
        self._region_ends |= {r.blocks.stop for r in regions if r.role is Role.PASSING}
        possible = [self._of_chain.possible(known, self._region_ends) for known in settled]
        points, on_the_fly = (frozenset().union(*kind) for kind in zip(*possible, strict=True))
        if points not in self._tables:
            self._tables[points] = self._new_table(points)
        self._tables[points].fill(devices, scales)
        return points, on_the_fly
