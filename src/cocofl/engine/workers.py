"""Training devices side by side: one thread each, in worker processes that share the data.

Data sets are memory-mapped, so all workers read one copy. A device's result depends on its task
and the server's state only, and results are handed on in the order of the tasks: the number of
workers changes how long a round takes, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from threading import Event, Thread
from typing import Any

from cocofl import errors
from cocofl.engine import wire
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


# A small model's state fits, so that writing it does not wait for the reader.
PIPE_BYTES = 2**20
# A worker that has shown no sign of life for so long will not come back: it is ended. Loading its
# libraries from a slow disk may take longer.
SILENT_S, STARTING_S = 60, 600


def default_workers() -> int:
    """As many as this process has cores."""
    return len(os.sched_getaffinity(0))


class WorkerFailed(RuntimeError):
    """A worker broke down; its own account is in the message, and where in a note."""


class _Channel:
    """One worker process and the pipes to it."""

    def __init__(self) -> None:
        their_requests, our_requests = os.pipe()
        our_replies, their_replies = os.pipe()
        self._pulse, their_pulse = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        theirs = (their_requests, their_replies, their_pulse)
        for fd in theirs[:2]:
            with suppress(OSError):  # beyond the system's limit for a user's pipes
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cocofl.engine.worker", *map(str, theirs)],
            pass_fds=theirs,
            env=os.environ | ENVIRONMENT,
            process_group=0,  # Ctrl-C is for the parent, which ends its workers itself
        )
        for fd in theirs:
            os.close(fd)
        self._room_bytes = fcntl.fcntl(our_requests, fcntl.F_GETPIPE_SZ)
        self._requests = Connection(our_requests, readable=False)
        self.replies = Connection(our_replies, writable=False)
        self._silent_s, self._allowed_s, self._was_ended = 0, STARTING_S, False

    def watch(self) -> None:
        """Called once a second: end the worker if it has been silent for too long.

        Seconds are counted, not read off a clock: while a machine sleeps, everybody is silent.
        """
        with suppress(BlockingIOError):
            if os.read(self._pulse, 2**16):
                self._silent_s, self._allowed_s = 0, SILENT_S
                return
        self._silent_s += 1
        if self._silent_s >= self._allowed_s and self.process.poll() is None:
            self._was_ended = True
            self.process.kill()  # whoever waits for it is told by its pipes

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a request; its answer is read by :meth:`answer`."""
        try:
            self._requests.send_bytes(wire.dumps((name, arguments)))
        except BrokenPipeError as error:
            raise self._gone() from error

    def takes_at_once(self, name: str, *arguments: Any) -> bool:
        """Whether a request can be sent while the worker is busy with another.

        Waiting for room in its pipe, this process would not read the answer that the worker may
        be waiting to send: both would wait forever.
        """
        return 2 * len(wire.dumps((name, arguments))) < self._room_bytes

    def answer(self) -> Any:
        """Wait for the answer to the oldest request."""
        try:
            kind, content = wire.receive(self.replies)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if kind == "mistake":
            name, message = content
            raise getattr(errors, name, errors.CocoflError)(message)
        if kind == "failed":
            account, where = content
            failed = WorkerFailed(account)
            failed.add_note(where)
            raise failed
        return content

    def close(self) -> None:
        """End the worker."""
        self._requests.close()
        self.replies.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._pulse)

    def _gone(self) -> WorkerFailed:
        code = self.process.wait()
        what = f"a worker process ended with exit code {code}"
        if self._was_ended:
            what = f"a worker process did not answer for {self._allowed_s} s and was ended"
        elif code == -9:
            what += " (killed: out of memory?)"
        return WorkerFailed(f"{what}; nothing is lost, --resume continues the run")


class Workers(Executor):
    """An executor of several processes, which can serve one experiment after the other."""

    def __init__(self, count: int | None = None) -> None:
        # Merging with several threads would take the cores from the workers, the longer as
        # OpenMP's threads spin for a while when they have nothing left to do.
        super().__init__()
        self._channels = [_Channel() for _ in range(count or default_workers())]
        self._over = Event()
        self._watching = Thread(target=self._watch, name="watch workers", daemon=True)
        self._watching.start()
        self._all("path", sys.path)

    def prepare(self, trainer: Trainer, plan: KernelPlan) -> None:
        """Each worker makes a trainer of its own."""
        self._spec = trainer.spec
        self._all("prepare", self._spec, plan.choices)

    def choose_kernels(self, state: ServerState) -> KernelPlan:
        """One worker measures while the others wait; then all obey."""
        self._share(state)
        self._channels[0].ask("choose_kernels")
        plan = KernelPlan(self._channels[0].answer(), fixed=True)
        self._all("prepare", self._spec, plan.choices)
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
        self._over.set()
        self._watching.join()
        for channel in self._channels:
            channel.close()
        super().close()

    def _watch(self) -> None:
        """A worker that was stopped would be waited for without end, in reading and in writing."""
        while not self._over.wait(1.0):
            self._each(_Channel.watch)

    def _share(self, state: ServerState) -> None:
        flat = replace(state, devices={}).flat()
        self._each(lambda channel: channel.ask("state", flat))  # tasks follow at once

    def _all(self, name: str, *arguments: Any) -> None:
        self._each(lambda channel: channel.ask(name, *arguments))
        self._each(_Channel.answer)

    def _each(self, do: Callable[[_Channel], Any]) -> None:
        for channel in self._channels:
            do(channel)

    def _scatter(self, name: str, requests: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """The answers in the order of the requests.

        A worker gets its next request before it has answered the last, so that it never waits for
        this process; but not the last few, which go to whoever is free, nor very large ones.
        """
        waiting = deque(enumerate(requests))
        asked: dict[Any, deque[tuple[_Channel, int]]] = {c.replies: deque() for c in self._channels}
        answers: dict[int, Any] = {}

        def give(channel: _Channel) -> None:
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
