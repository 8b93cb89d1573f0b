"""What a strategy is: how a device plans its round, and how the server merges what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from cocofl.budget import Budget
from cocofl.fl.arrival import Arrival
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Merge
from cocofl.fl.select import SLACK
from cocofl.fl.state import Tensors
from cocofl.fl.trainer import Trainer, Work
from cocofl.freeze import FLOAT32
from cocofl.profiling.table import Configuration, ProfileTable
from cocofl.span import Blocks


@dataclass(frozen=True)
class Plan:
    """A device's decision: its work, and how much of the time until the deadline that takes."""

    work: Work
    time: float


@dataclass(frozen=True)
class Strategy:
    """How devices plan, how the server merges, and a few facts about both."""

    plan: Callable[[Situation], Plan | None]
    """None where nothing fits the device's budget."""
    merge: Merge
    only_able: bool = False
    """Whether the server asks only devices that have a plan, instead of letting them sit out."""
    tracks_statistics: bool = True
    """Whether devices send norm statistics; else they are measured before an evaluation."""
    begin: Callable[[Trainer, Mapping[str, Tensor]], Tensors] | None = None
    """What the server begins with, of the network's own weights; None for these."""
    width: float = 1.0
    """Of the network that server and devices have, as a share of the experiment's."""
    integers: bool = False
    """Whether devices compute frozen blocks in int8, for which kernels have to be chosen."""
    arrival: Arrival | None = None
    """Where there is no deadline: how updates are merged as they come."""


class Tables(Protocol):
    """The profile tables of an experiment, loaded when a strategy asks for them."""

    n_blocks: int
    everything: Blocks
    """All blocks that have something to learn."""
    is_text: bool
    labels: str
    """What they are: ``classes``, ``tokens``, ``multilabel`` or ``numbers``."""

    def spans(self, variant: str | None = None, precision: str = FLOAT32) -> ProfileTable:
        """The costs of spans frozen so; without a variant only that of training everything."""

    def checkpointed(self, variant: str, precision: str = FLOAT32) -> ProfileTable:
        """The same where trained blocks are computed again in the backward pass."""

    def first_blocks(self, variant: str) -> ProfileTable:
        """The costs of the first blocks alone: ``0:1``, ``0:2``, …"""

    def narrow_ends(self, variant: str) -> Mapping[float, ProfileTable]:
        """By width, those of spans up to the end, all blocks of which but the first have it."""

    def widths(self) -> ProfileTable:
        """The costs of widths."""

    def least_budgets(self) -> Iterable[Budget]:
        """What each simulated device has at least in any round."""

    def check_rolls(self) -> None:
        """Complain about a network of which a window of channels cannot roll."""


def without_deadline(budget: Budget) -> Budget:
    """The same memory and upload, and all the time in the world."""
    return replace(budget, time=math.inf, time_s=math.inf)


def steps_in_time(table: ProfileTable, configuration: Configuration, situation: Situation) -> int:
    """How many of its mini-batches a device can train on before the deadline, at most all."""
    limit = table.limits(situation.budget)[0]
    share = min(1.0, limit / table.row(configuration)[0])
    return int(share * situation.steps * (1 + SLACK))


def time_share(
    table: ProfileTable, configurations: Iterable[Configuration], budget: Budget
) -> float:
    """The mean time of configurations as a share of what the budget allows.

    Where time is not limited, as a share of full training.
    """
    times = [table.row(item)[0] for item in configurations]
    return share_of_deadline(sum(times) / len(times), table.limits(budget)[0])


def share_of_deadline(time: float, limit: float) -> float:
    """A time as a share of a limit; where there is none, of full training."""
    return time / limit if limit < math.inf else time
