"""What a strategy is: how a device plans its round, and how the server merges what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cocofl.budget import Budget
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Merge
from cocofl.fl.trainer import Work
from cocofl.profiling.table import Configuration, ProfileTable


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
    integers: bool = False
    """Whether devices compute frozen blocks in int8, for which kernels have to be chosen."""


class Tables(Protocol):
    """The profile tables of an experiment, loaded when a strategy asks for them."""

    n_blocks: int
    is_text: bool
    labels: str
    """What they are: ``classes``, ``tokens``, ``multilabel`` or ``numbers``."""

    def spans(self, variant: str | None = None) -> ProfileTable:
        """The costs of spans frozen so; without a variant only that of training everything."""

    def widths(self) -> ProfileTable:
        """The costs of widths."""


def time_share(
    table: ProfileTable, configurations: Iterable[Configuration], budget: Budget
) -> float:
    """The mean time of configurations as a share of what the budget allows.

    Where time is not limited, as a share of full training.
    """
    times = [table.row(item)[0] for item in configurations]
    limit = table.limits(budget)[0]
    return sum(times) / len(times) / (limit if limit < float("inf") else 1.0)
