"""What the round loop asks of an executor, and the simplest one: this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from cocofl.fl.batches import Ints
from cocofl.fl.metrics import Sums
from cocofl.fl.state import Contribution, ServerState
from cocofl.fl.trainer import Task, Trainer
from cocofl.freeze import KernelPlan


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """What is to be collected in a round."""

    round_index: int
    lr: float
    tasks: Sequence[Task]
    """Of the devices that are simulated; none where devices plan by themselves."""
    purpose: Literal["train", "statistics"] = "train"


QUARANTINED = "quarantined"
"""Instead of a fate: the device was there, and was not asked."""


class Answer(NamedTuple):
    """What came back from a device, before anybody has judged it."""

    device: int
    sent: Contribution | bytes | None
    """As bytes where it comes from a device that nobody trusts; None where nothing came."""
    fate: str = "merged"
    reason: str = ""
    broadcast_bytes: int | None = None
    """What the device was sent."""


Asked = Sequence[tuple[RoundPlan, ServerState]]
"""What each of several runs wants collected, and what its devices begin with."""


def answers(tasks: Sequence[Task], sent: Iterable[Contribution]) -> Iterator[Answer]:
    """The answers of devices that always answer."""
    return (Answer(task.device, one) for task, one in zip(tasks, sent, strict=True))


def added(sums: Iterable[Sequence[Sums]]) -> list[Sums]:
    """The sums over all chunks, in their order: so they are the same whoever made them."""
    return [np.add.reduce(list(parts)) for parts in zip(*sums, strict=True)]


class Executor(ABC):
    """Carries out rounds: a subclass says how it collects.

    What it does not say besides happens in this process, with one thread.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def prepare(self, trainer: Trainer, plan: KernelPlan) -> None:
        """Get ready for an experiment; all int8 work obeys ``plan`` from now on."""
        trainer.kernels = plan
        self._trainer = trainer

    def choose_kernels(self, state: ServerState) -> KernelPlan:
        """Choose kernels where the plan has not, under the conditions that devices train in."""
        self._trainer.choose_kernels(state)
        return self._trainer.kernels

    def placed(self, state: ServerState) -> ServerState:
        """The state where this executor wants it."""
        return state

    @abstractmethod
    def collect(self, plan: RoundPlan, state: ServerState) -> Iterable[Answer]:
        """What devices answer, in the order of the tasks. It is good until the next call."""

    def collect_runs(self, asked: Asked) -> list[Iterable[Answer]]:
        """The same of several runs; one follows another."""
        return [self.collect(plan, state) for plan, state in asked]

    def test(self, state: ServerState, chunks: Sequence[Ints], statistics: str) -> list[Sums]:
        """The sums of the metrics over chunks of the test data."""
        return added(self._trainer.test(state, chunks, statistics))

    def close(self) -> None:
        """Let go of what the executor holds."""
        torch.set_num_threads(self._threads)


class InProcess(Executor):
    """Trains one device after the other in this process, as workers do."""

    def collect(self, plan: RoundPlan, state: ServerState) -> Iterable[Answer]:
        """One device after the other."""
        return answers(plan.tasks, (self._trainer.train(task, state) for task in plan.tasks))
