"""Narrower networks inside the full one, as factors on its parameters.

A place that a narrower network lacks has the factor 0. A channel whose weights are 0 stays 0 on
its way through layers, norms (their weight and bias are 0, too) and activations, and no gradient
comes back through it. Instructions that count channels, like LayerNorm, are told how many there
are, and use the leading ones. So one computation serves devices of every width, and one device
at a different width in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.models.widths import Place
from cocofl.vector.program.program import Program
from cocofl.vector.program.row_layout import Segment, Segments

# Captured steps read rows of factors where they are: room for more than one is made at a time.
_CAPACITY = 8
WHOLE = -1
"""The level of devices that have the whole network, and statistics as everybody has."""


def factor_row(
    layout: Segments, places: Mapping[str, Place], factors: Mapping[str, float] | None = None
) -> Tensor:
    """Of a narrower network: 1, or the tensor's own factor, at its ``places`` in a row; else 0."""
    found = {key: torch.tensor((factors or {}).get(key, 1.0)) for key in layout.by_key}
    return layout.pack(found, torch.zeros(0), places)


class Levels:
    """The narrower networks of a cohort, and at which of them each device takes its step."""

    def __init__(self, program: Program, devices: int, like: Tensor) -> None:
        """``like`` are the parameters of all devices."""
        layout, capacity = program.layout, _CAPACITY
        self.count = 0
        """How many there are."""
        # The last row stays: WHOLE.
        self._factors = like.new_ones(capacity, layout.parameters.size)
        whole = torch.tensor([*program.channels.values()], dtype=torch.int32, device=like.device)
        self._values = list(program.channels)
        self._channels = whole.repeat(capacity, 1)
        self._now = torch.zeros(devices, dtype=torch.long, device=like.device)
        self._held = torch.zeros_like(self._now)
        self._distillation = like.new_zeros(devices)
        self._schedule = self._now[None]
        self._rows = torch.arange(devices, device=like.device)
        self.statistics = like.new_zeros(devices, capacity, layout.statistics.size)
        """Of each device at each level: a norm sees other numbers at another width."""
        self._steps_done = like.new_zeros(devices, capacity)
        self._of_held = like.new_zeros(devices, layout.statistics.size)
        self._tracked_of_held = layout.statistics.views(self._of_held)
        self.parameters = torch.zeros_like(like)
        """Of each device at its level in this step."""
        self._leaves = layout.parameters.leaves(self.parameters)

    @property
    def is_full(self) -> bool:
        """Whether one more needs other memory than captured steps know."""
        return self.count == len(self._factors) - 1

    def add(self, factors: Tensor, channels: Mapping[str, int]) -> int:
        """A narrower network by its factors and its values' channels; the number of its level."""
        if self.is_full:
            self._factors = torch.cat([self._factors, torch.ones_like(self._factors)])
            whole = self._channels[-1:].expand_as(self._channels)
            self._channels = torch.cat([self._channels, whole])
            self.statistics = torch.cat([self.statistics, torch.zeros_like(self.statistics)], 1)
            self._steps_done = torch.cat([self._steps_done, torch.zeros_like(self._steps_done)], 1)
        self._factors[self.count] = factors
        for value, n in channels.items():
            self._channels[self.count, self._values.index(value)] = n
        self.count += 1
        return self.count - 1

    def hold(self, levels: Sequence[int | None]) -> Tensor:
        """The networks that devices have (None for the whole one).

        They take steps at these unless told otherwise. Returns, by device and place, whether its
        network has it.
        """
        rows = [WHOLE if level is None else level for level in levels]
        self._held.copy_(torch.tensor(rows))
        self._now.copy_(self._held)
        return self._factors[self._held] != 0

    def channels(self, *, of_held: bool = False) -> dict[str, Tensor]:
        """Of values, how many channels they have in this step, or as devices hold them."""
        levels = self._held if of_held else self._now
        return dict(zip(self._values, self._channels[levels].t().contiguous(), strict=True))

    def begin(
        self,
        schedule: NDArray[np.int64],
        statistics: Tensor,
        of_whole: Tensor,
        distillation: Sequence[float],
    ) -> None:
        """The levels of a round, (step, device), and what statistics begin with.

        These are (device, level, place), and of the whole network (device, place).
        ``distillation`` is the part of each device's loss that a teacher decides, where there is
        one.
        """
        self._distillation.copy_(torch.tensor(distillation, dtype=self._distillation.dtype))
        self._schedule = torch.from_numpy(schedule).to(self._now.device)
        self.statistics[: len(statistics), : statistics.shape[1]] = statistics
        self.statistics[:, WHOLE] = of_whole
        self._steps_done.zero_()

    def go_to(self, step: int) -> None:
        """The next step's levels."""
        self._now.copy_(self._schedule[step])

    def narrowed(self, parameters: Tensor, statistics: Tensor) -> dict[Segment, Tensor]:
        """What learns in this step; the statistics become those of its levels."""
        self.parameters.copy_(parameters * self._factors[self._now])
        statistics.copy_(self.statistics[self._rows, self._now])
        return self._leaves

    def steps_done(self, *, of_held: bool = False) -> Tensor:
        """How many steps each device has taken at this step's level, or at the one it holds."""
        return self._steps_done[self._rows, self._held if of_held else self._now]

    def settle(self, gradients: Tensor, statistics: Tensor) -> None:
        """From gradients of the narrowed to those of the parameters; keep the statistics."""
        gradients.mul_(self._factors[self._now])
        self.statistics[self._rows, self._now] = statistics
        self._steps_done[self._rows, self._now] += 1

    # Distillation: the network that a device holds teaches the narrower one of the step

    def distillation(self) -> Tensor:
        """Of each device's loss, the part that a teacher decides in this step; 0 without one."""
        return torch.where(self._now == self._held, 0.0, self._distillation)

    def statistics_of_held(self) -> dict[Segment, Tensor]:
        """The teachers' statistics, which they change."""
        self._of_held.copy_(self.statistics[self._rows, self._held])
        return self._tracked_of_held

    def settle_held(self) -> None:
        """Keep the statistics of those who taught; to be called after :meth:`settle`."""
        taught = self.distillation() > 0
        before = self.statistics[self._rows, self._held]
        after = torch.where(taught[:, None], self._of_held, before)
        self.statistics[self._rows, self._held] = after
        self._steps_done[self._rows, self._held] += taught
