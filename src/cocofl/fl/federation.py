"""Who takes part: devices with their data, what each may spend in a round, and the deadline.

The deadline is what a strong device needs for full training on the mean share of data. A device's
time budget is a fraction of that: one with 1/3 is three times as slow, or has a third of the time.
A device with more data than the mean takes more steps and must find a cheaper configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cocofl.budget import Budget
from cocofl.checks import check_number
from cocofl.data import Partition
from cocofl.fl.devices import Devices, Group
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
    steps: int = 1
    """How many mini-batches its data comes to in a round."""


@dataclass(frozen=True)
class Faults:
    """The section ``[faults]`` of an experiment: what goes wrong on purpose.

    ``jitter`` spreads durations (the σ of a log-normal factor); ``dropout`` loses updates.
    """

    jitter: float = 0.0
    """Spreads durations: the σ of a log-normal factor."""
    dropout: float = 0.0
    """The share of updates that get lost."""

    def __post_init__(self) -> None:
        check_number("faults.jitter", self.jitter, least=0)
        check_number("faults.dropout", self.dropout, least=0, most=1)

    def fate(self, seed: int, round_index: int, device: int, time: float) -> tuple[str, float]:
        """``merged``, ``late`` or ``lost``, and how long it took in parts of the deadline.

        >>> Faults().fate(0, 0, 0, 0.5)
        ('merged', 0.5)
        >>> Faults(dropout=1.0).fate(0, 0, 0, 0.5)[0]
        'lost'
        """
        rng = stream(seed, "faults", round_index, device)
        lost = rng.random() < self.dropout
        duration = time * float(np.exp(self.jitter * rng.standard_normal()))
        if lost:
            return "lost", duration
        # Without jitter a device that planned to need all of the time is in time.
        return ("late" if duration > 1 + 1e-9 else "merged"), duration


@dataclass(frozen=True, eq=False)
class Federation:
    """Devices, their data, and how they are drawn."""

    devices: Devices
    partition: Partition
    training: Training
    per_round: int
    seed: int
    by_coin: bool = False
    """Whether each device's coin decides if it has its turn; ``per_round`` have it on average."""
    step_s: float = 1.0
    """What a step of full training takes a strong device."""

    @cached_property
    def mean_steps(self) -> int:
        """The steps of a device with the mean share of data."""
        return max(1, self.training.steps(round(float(self.partition.sizes.mean()))))

    @property
    def deadline_s(self) -> float:
        """How long a round lasts at most."""
        return self.mean_steps * self.step_s

    def power(self, device: int) -> float:
        """The watts of a device that trains; 0 where they are not known."""
        return self._group(device).power

    def active_share(self, device: int) -> float:
        """How much of the time until the deadline a device's energy lasts."""
        group = self._group(device)
        full = group.power * self.deadline_s
        return min(1.0, group.energy / full) if full else 1.0

    def coins(self, round_index: int) -> int | None:
        """How many devices have their turn by their coin; None where as many as wanted are asked.

        Each coin on its own is the same as a number from the binomial distribution, and as many
        of all devices in random order.
        """
        if not self.by_coin:
            return None
        count = len(self.devices)
        return int(stream(self.seed, "coins", round_index).binomial(count, self.per_round / count))

    def in_random_order(
        self, round_index: int, first: int | None = None, moment: int | None = None
    ) -> Iterator[int]:
        """All who have data and can be asked, in the order in which this round asks them.

        With ``first`` only these of all, whether they can be asked or not. ``moment`` is the round
        in which they can be asked, if it is not this one.
        """
        when = round_index if moment is None else moment
        order = stream(self.seed, "sample", round_index).permutation(len(self.devices))[:first]
        sizes = self.partition.sizes
        return (
            device
            for device in order.tolist()
            if sizes[device] > 0 and self.devices.is_available(device, when)
        )

    def situation(self, device: int, round_index: int) -> Situation:
        """What a device has in a round."""
        steps = self.training.steps(len(self.partition[device]))
        budget = self.devices.budget(device, round_index, samples=steps * self.training.batch)
        rng = stream(self.seed, "select", round_index, device)
        budget = self._for_steps(device, budget, steps)
        return Situation(device, round_index, budget, rng, steps)

    def _for_steps(self, device: int, budget: Budget, steps: int) -> Budget:
        """A budget with its time as a fraction of so many steps, while the device is active."""
        active, load = self.active_share(device), steps / self.mean_steps
        if active < 1 and budget.time == budget.time_s == math.inf:
            # Time without end is no energy: that lasts for so much at a strong device's pace.
            budget = replace(budget, time=1.0)
        return replace(budget, time=budget.time * active / load, time_s=budget.time_s * active)

    def least_budgets(self, rounds: int) -> Iterator[Budget]:
        """What devices with data have at least in any of so many rounds."""
        for device in np.flatnonzero(self.partition.sizes).tolist():
            steps = self.training.steps(len(self.partition[device]))
            for budget in self.devices.least(device, rounds, steps * self.training.batch):
                yield self._for_steps(device, budget, steps)

    def group_name(self, device: int) -> str:
        """The name of a device's group."""
        return self._group(device).name

    def _group(self, device: int) -> Group:
        return self.devices.groups[int(self.devices.group_of[device])]
