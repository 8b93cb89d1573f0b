"""Processes of our own that answer requests, and the pipes to them.

A process is a module that calls :func:`cocofl.engine.worker.serve_parent`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any, NamedTuple

from cocofl import errors
from cocofl.engine import wire

# A small model's state fits, so that writing it does not wait for the reader.
PIPE_BYTES = 2**20
# A worker that has shown no sign of life for so long will not come back: it is ended. Loading its
# libraries from a slow disk may take longer.
SILENT_S, STARTING_S = 60, 600


class WorkerFailed(RuntimeError):
    """A worker broke down; its own account is in the message, and where in a note."""


class Message(NamedTuple):
    """What a worker says: an answer, or how it is getting on with that."""

    content: Any
    is_news: bool


class Channel:
    """One worker process and the pipes to it."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        their_requests, our_requests = os.pipe()
        our_replies, their_replies = os.pipe()
        self._pulse, their_pulse = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        theirs = (their_requests, their_replies, their_pulse)
        for fd in theirs[:2]:
            with suppress(OSError):  # beyond the system's limit for a user's pipes
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, theirs)],
            pass_fds=theirs,
            env={**os.environ, **environment},
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
                self._lives()
                return
        self._silent_s += 1
        if self._silent_s >= self._allowed_s and self.process.poll() is None:
            self._was_ended = True
            self.process.kill()  # whoever waits for it is told by its pipes

    def _lives(self) -> None:
        self._silent_s, self._allowed_s = 0, SILENT_S

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
        """Wait for the answer to the oldest request, from a worker that sends no news."""
        return self.message().content

    def message(self) -> Message:
        """Wait for what the worker says next."""
        try:
            kind, content = wire.receive(self.replies)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        self._lives()
        if kind == "mistake":
            name, message = content
            raise getattr(errors, name, errors.CocoflError)(message)
        if kind == "failed":
            account, where = content
            failed = WorkerFailed(account)
            failed.add_note(where)
            raise failed
        return Message(content, is_news=kind == "news")

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


class Channels:
    """Some processes of a kind; one that falls silent is ended."""

    def __init__(
        self, module: str, count: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._all = [Channel(module, environment or {}) for _ in range(count)]
        self._over = Event()
        self._watching = Thread(target=self._watch, name="watch workers", daemon=True)
        self._watching.start()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._all)

    def ask_all(self, name: str, *arguments: Any) -> None:
        """Send all the same request, and wait for the answers."""
        for channel in self._all:
            channel.ask(name, *arguments)
        for channel in self._all:
            channel.answer()

    def close(self) -> None:
        """End all of them."""
        self._over.set()
        self._watching.join()
        for channel in self._all:
            channel.close()

    def _watch(self) -> None:
        """A worker that was stopped would be waited for without end, in reading and in writing."""
        while not self._over.wait(1.0):
            for channel in self._all:
                channel.watch()
