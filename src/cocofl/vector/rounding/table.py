"""The grids of a cohort's devices at all rounding points, in tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.numerics import StackedGrid, stacked_grid
from cocofl.span import Blocks
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.rounding.points import PointRoundings, RoundingPoint, RoundingPoints, Sites


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
        devices: int,
        on: torch.device,
        sites: Sites,
        kernels: KernelSet,
    ) -> None:
        self.order = sorted(points)
        self.of_device = cache(self._of_device)
        self._sites, self._kernels = sites, kernels
        shape = (len(self.order), devices)
        self._index = {point: i for i, point in enumerate(self.order)}
        self._grid = StackedGrid(*(torch.zeros(shape, device=on) for _ in range(4)))
        self.on_the_fly = torch.zeros(shape, dtype=torch.bool, device=on)
        self.unsigned = torch.zeros(shape, dtype=torch.bool, device=on)

    def _of_device(
        self, of_chain: RoundingPoints, blocks: Blocks | None, known: frozenset[str]
    ) -> DeviceRounding:
        """What one device rounds: nothing where no blocks are given."""
        points = {} if blocks is None else of_chain.used_by(blocks, known)
        return DeviceRounding.of(points, self.order, self._sites.place, of_chain.most_scales())

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
