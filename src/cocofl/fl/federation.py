"""Who takes part: devices with their data, what each may spend in a round, and the deadline.

The deadline is what a strong device needs for full training on the mean share of data. A device's
time budget is a fraction of that: one with 1/3 is three times as slow, or has a third of the time.
A device with more data than the mean takes more steps and must find a cheaper configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cocofl.budget import Budget
from cocofl.data import Partition
from cocofl.errors import InvalidSetting
from cocofl.fl.devices import Devices
from cocofl.fl.training import Training
from cocofl.rng import stream


@dataclass(frozen=True)
class Situation:
    """What a device knows when it plans its round; it decides by itself, as in the paper."""

    device: int
    round_index: int
    budget: Budget
    """Time as a fraction of full training on the device's *own* number of steps."""
    rng: np.random.Generator


@dataclass(frozen=True, eq=False)
class Federation:
    """Devices, their data, and how they are drawn."""

    devices: Devices
    partition: Partition
    training: Training
    per_round: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.per_round <= len(self.devices):
            raise InvalidSetting(
                f"devices.per_round is {self.per_round}, but there are {len(self.devices)} devices"
            )

    @cached_property
    def mean_steps(self) -> int:
        """The steps of a device with the mean share of data."""
        sizes = self.partition.sizes
        return max(1, self.training.steps(round(float(sizes.mean()))))

    def steps(self, device: int) -> int:
        """How many steps a device takes in a round."""
        return self.training.steps(len(self.partition[device]))

    def in_random_order(self, round_index: int) -> Iterator[int]:
        """All who have data and can be asked, in the order in which this round asks them."""
        order = stream(self.seed, "sample", round_index).permutation(len(self.devices))
        sizes = self.partition.sizes
        return (
            device
            for device in order.tolist()
            if sizes[device] > 0 and self.devices.is_available(device, round_index)
        )

    def situation(self, device: int, round_index: int) -> Situation:
        """What a device has in a round."""
        steps = self.steps(device)
        load = steps / self.mean_steps
        budget = self.devices.budget(device, round_index, samples=steps * self.training.batch)
        return Situation(
            device,
            round_index,
            replace(budget, time=budget.time / load),
            stream(self.seed, "select", round_index, device),
        )

    def group_name(self, device: int) -> str:
        """The name of a device's group."""
        return self.devices.groups[int(self.devices.group_of[device])].name
