"""A worker process: one thread, one trainer, one pipe to the process that gives it tasks.

A second pipe says every second that it is alive: one that was stopped says nothing.

It is started as ``python -m cocofl.engine.worker READ_FD WRITE_FD PULSE_FD`` rather than by
``multiprocessing``, which would run the user's own script a second time, and which cannot give
workers an environment of their own.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from cocofl.allocator import keep_freed_memory
from cocofl.engine import wire
from cocofl.errors import CocoflError
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.trainer import Task, Trainer, TrainerSpec
from cocofl.freeze import KernelPlan


class Worker:
    """Answers one request after the other."""

    _trainer: Trainer
    _state: ServerState
    _made_of = b""

    def path(self, path: list[str]) -> None:
        """Find modules where the parent finds them: the user's own functions live there."""
        sys.path[:] = path

    def prepare(self, spec: TrainerSpec, choices: dict[str, str]) -> None:
        """Make a trainer for an experiment; the last one's will do if it is the same."""
        made_of = wire.dumps(spec)  # names and paths
        if made_of != self._made_of:
            self._trainer, self._made_of = Trainer(spec), made_of
        if self._trainer.kernels.choices != choices:
            self._trainer.kernels = KernelPlan(choices)

    def state(self, flat: Tensors) -> None:
        """Keep the server's state for the requests that follow."""
        self._state = ServerState.from_flat(flat)

    def choose_kernels(self) -> dict[str, str]:
        """Choose kernels under the conditions that devices train in."""
        self._trainer.choose_kernels(self._state)
        return self._trainer.kernels.choices

    def train(self, task: Task) -> Contribution:
        """Train a device; what is sent in an encoded form, too, is needed decoded here."""
        return replace(self._trainer.train(task, self._state), payloads={})

    def test(self, chunks: Any, statistics: str) -> Any:
        """Test the server's model on some of the test data."""
        return self._trainer.test(self._state, chunks, statistics)


Send = Callable[[Any], None]


def serve(worker: object, requests: Connection, send: Send) -> None:
    """Answer with what the worker's methods return, until the other side goes away."""
    while True:
        try:
            name, arguments = wire.receive(requests)
        except EOFError:
            return
        method: Callable[..., Any] = getattr(worker, name)
        if name == "state":  # nobody waits for an answer to this
            method(*arguments)
            continue
        try:
            reply = ("done", method(*arguments))
        except CocoflError as error:
            reply = ("mistake", (type(error).__name__, str(error)))
        except Exception as error:
            reply = ("failed", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        try:
            send(reply)
        except BrokenPipeError:
            return


def end_with_reader(pipe: int) -> None:
    """End this process, in the middle of a task, too, when nobody can read its replies any more."""
    readers = select.poll()
    readers.register(pipe, 0)  # no event but the error that a pipe without a reader has
    readers.poll()
    os._exit(1)


def show_life(pipe: int) -> None:
    """Say once a second that this process runs; while nobody listens, nothing is lost."""
    while True:
        try:
            os.write(pipe, b".")
        except BlockingIOError:
            pass
        except OSError:
            return
        time.sleep(1.0)


def sender(replies: Connection) -> Send:
    """Sends one object after the other, whichever threads have some."""
    alone = threading.Lock()

    def send(item: Any) -> None:
        content = wire.dumps(item)
        with alone:  # a connection writes a large message in several pieces
            replies.send_bytes(content)

    return send


def serve_parent(make: Callable[[Send], object]) -> None:
    """Be a worker process, of what is made here.

    It is made with a function that sends news: the parent hears them before the answer. Any thread
    may call it.
    """
    requests, replies, pulse = map(int, sys.argv[1:4])
    for task, pipe in ((end_with_reader, replies), (show_life, pulse)):
        threading.Thread(target=task, args=(pipe,), daemon=True).start()
    # What is printed here must not mix with the parent's output.
    os.dup2(2, 1)
    send = sender(Connection(replies, readable=False))
    worker = make(lambda news: send(("news", news)))
    serve(worker, Connection(requests, writable=False), send)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    serve_parent(lambda _tell: Worker())
