"""Training devices side by side: one thread each, in worker processes that share the data.

Data sets are memory-mapped, so all workers read one copy. A device's result depends on its task
and the server's state only, and results are handed on in the order of the tasks: the number of
workers changes how long a round takes, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from cocofl.engine.channels import Channel, Channels
from cocofl.engine.executor import Answer, Executor, RoundPlan, added, answers
from cocofl.fl.batches import Ints
from cocofl.fl.metrics import Sums
from cocofl.fl.state import ServerState
from cocofl.fl.trainer import Trainer
from cocofl.freeze import KernelPlan

# One thread per worker; and oneDNN keeps compiled kernels for as many shapes as a run may have.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8192",
}


def default_workers() -> int:
    """As many as this process has cores."""
    return len(os.sched_getaffinity(0))


class Workers(Executor):
    """An executor of several processes, which can serve one experiment after the other."""

    def __init__(self, count: int | None = None) -> None:
        # Merging with several threads would take the cores from the workers, the longer as
        # OpenMP's threads spin for a while when they have nothing left to do.
        super().__init__()
        count = count or default_workers()
        self._channels = Channels("cocofl.engine.worker", count, ENVIRONMENT)
        self._channels.ask_all("path", sys.path)

    def prepare(self, trainer: Trainer, plan: KernelPlan) -> None:
        """Each worker makes a trainer of its own."""
        self._spec = trainer.spec
        self._channels.ask_all("prepare", self._spec, plan.choices)

    def choose_kernels(self, state: ServerState) -> KernelPlan:
        """One worker measures while the others wait; then all obey."""
        self._share(state)
        first = next(iter(self._channels))
        first.ask("choose_kernels")
        plan = KernelPlan(first.answer(), fixed=True)
        self._channels.ask_all("prepare", self._spec, plan.choices)
        return plan

    def collect(self, plan: RoundPlan, state: ServerState) -> Iterator[Answer]:
        """Whoever is free takes the next device."""
        self._share(state)
        yield from answers(plan.tasks, self._scatter("train", [(task,) for task in plan.tasks]))

    def test(self, state: ServerState, chunks: Sequence[Ints], statistics: str) -> list[Sums]:
        """Each worker tests on its part."""
        self._share(state)
        count = len(self._channels)
        requests = [(list(chunks[i::count]), statistics) for i in range(min(count, len(chunks)))]
        parts = list(self._scatter("test", requests))
        return added(parts[i % count][i // count] for i in range(len(chunks)))

    def close(self) -> None:
        """End all workers."""
        self._channels.close()
        super().close()

    def _share(self, state: ServerState) -> None:
        flat = replace(state, devices={}).flat()
        for channel in self._channels:
            channel.ask("state", flat)  # tasks follow at once

    def _scatter(self, name: str, requests: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """The answers in the order of the requests.

        A worker gets its next request before it has answered the last, so that it never waits for
        this process; but not the last few, which go to whoever is free, nor very large ones.
        """
        waiting = deque(enumerate(requests))
        asked: dict[Any, deque[tuple[Channel, int]]] = {c.replies: deque() for c in self._channels}
        answers: dict[int, Any] = {}

        def give(channel: Channel) -> None:
            if not waiting:
                return
            index, arguments = waiting[0]
            is_free, are_many = not asked[channel.replies], len(waiting) > len(self._channels)
            if is_free or (are_many and channel.takes_at_once(name, *arguments)):
                waiting.popleft()
                channel.ask(name, *arguments)
                asked[channel.replies].append((channel, index))

        for _ in range(2):
            for channel in self._channels:
                give(channel)
        for index in range(len(requests)):
            while index not in answers:
                for ready in wait([replies for replies, queue in asked.items() if queue]):
                    channel, done = asked[ready].popleft()
                    answers[done] = channel.answer()
                    give(channel)
            yield answers.pop(index)
