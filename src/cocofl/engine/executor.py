"""What the round loop asks of an executor, and the simplest one: this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cocofl.fl.batches import Ints
from cocofl.fl.local import Materials, Task, Workshop
from cocofl.fl.merge import Contribution, State
from cocofl.fl.strategies import Merge
from cocofl.freeze import KernelPlan


class Executor(Protocol):
    """Carries out the tasks of a round. Results come in the order of the tasks."""

    def prepare(self, materials: Materials, plan: KernelPlan) -> None:
        """Get ready for an experiment; all int8 work obeys ``plan`` from now on."""

    def resolve_plan(self, state: State) -> KernelPlan:
        """Choose kernels where the plan has not, under the conditions that devices train in."""

    def train(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """Each device's local training."""

    def statistics(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """Each device's norm statistics of the whole network, nothing trained."""

    def confusion(self, state: State, chunks: Sequence[Ints], statistics: str) -> NDArray[np.int64]:
        """How often each true class was taken for each class, over chunks of the test data."""

    def merger(self, merge: Merge) -> Merge:
        """The strategy's merge, or one that gives the same from where the executor has things."""

    def close(self) -> None:
        """Let go of what the executor holds."""


class JointExecutor(Executor, Protocol):
    """One that can carry out the tasks of several runs at once."""

    def train_together(
        self, asked: Sequence[tuple[Sequence[Task], State]]
    ) -> list[Iterable[Contribution]]:
        """Of each run its tasks and state; of each its devices' contributions."""


class InProcess:
    """Trains one device after the other in this process, with one thread, as workers do."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def prepare(self, materials: Materials, plan: KernelPlan) -> None:
        """Make a workshop."""
        self._workshop = Workshop(materials, plan)

    def resolve_plan(self, state: State) -> KernelPlan:
        """Measure here."""
        self._workshop.resolve_plan(state)
        return self._workshop.plan

    def train(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """One after the other."""
        return (self._workshop.train(task, state) for task in tasks)

    def statistics(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """One after the other."""
        return (self._workshop.statistics(task, state) for task in tasks)

    def confusion(self, state: State, chunks: Sequence[Ints], statistics: str) -> NDArray[np.int64]:
        """All chunks here."""
        return self._workshop.confusion(state, list(chunks), statistics)

    def merger(self, merge: Merge) -> Merge:
        """The strategy's own."""
        return merge

    def close(self) -> None:
        """Give the threads back."""
        torch.set_num_threads(self._threads)
