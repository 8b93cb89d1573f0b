"""Worker processes and the pipes to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from cocofl.config import Experiment
from cocofl.engine import channels, wire
from cocofl.engine.channels import PIPE_BYTES, WorkerFailed
from cocofl.engine.worker import sender
from cocofl.engine.workers import Workers
from cocofl.experiment import Setup
from cocofl.fl.state import Contribution, ServerState
from cocofl.fl.trainer import Task, Trainer
from cocofl.freeze import KernelPlan
from tests.engine.collecting import collected


@dataclass(frozen=True)
class SendsMuch:
    """Work that is done at once, and whose result is larger than a pipe."""

    def train(self, _trainer: Trainer, task: Task, _state: ServerState) -> Contribution:
        return Contribution({"much": torch.zeros(PIPE_BYTES)}, len(task.indices))


def test_requests_and_answers_that_are_larger_than_a_pipe() -> None:
    """Nobody waits for room in a pipe whose reader waits for room in the other one."""
    job = Setup(Experiment()).job()
    indices = np.zeros(PIPE_BYTES, np.int64)
    tasks = [Task(0, 0, device, indices, SendsMuch(), 0.1) for device in range(4)]
    executor, pool = Workers(1), ThreadPoolExecutor(1)
    try:
        executor.prepare(job.trainer, KernelPlan())
        answers = pool.submit(lambda: list(collected(executor, tasks, job.initial)))
        assert [one.samples for one in answers.result(timeout=15)] == [PIPE_BYTES] * 4
    finally:
        for channel in executor._channels:
            channel.process.kill()
        pool.shutdown()
        executor.close()


def test_news_of_two_threads_do_not_mix() -> None:
    """A warning may come from one while another tells of a round."""
    ours, theirs = Pipe(duplex=False)
    send, news = sender(theirs), {letter * PIPE_BYTES for letter in "abcdefgh"}
    with ThreadPoolExecutor(5) as pool, ours, theirs:
        heard = pool.submit(lambda: {wire.receive(ours) for _ in news})
        for one in news:
            pool.submit(send, one)
        assert heard.result(timeout=30) == news


BUSY = """
import os, time
from cocofl.engine.workers import Workers

class LongTask:
    def __reduce__(self):
        return time.sleep, (1000,)

workers = Workers(1)
(channel,) = workers._channels
channel.ask("path", LongTask())
print(channel.process.pid, flush=True)
os._exit(1)  # as after kill -9: nobody ends the workers
"""


def test_a_busy_worker_does_not_outlive_the_process_that_asked() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, check=False)
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 60
    while _runs(stat) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(stat)


@pytest.mark.parametrize("much", [False, True], ids=["waiting", "writing"])
def test_a_worker_that_was_stopped_is_ended_and_said_so(
    monkeypatch: pytest.MonkeyPatch, much: bool
) -> None:
    """Waiting for its answer, or for room in its pipe, would have no end."""
    monkeypatch.setattr(channels, "SILENT_S", 2)
    executor = Workers(1)
    (channel,) = executor._channels
    os.kill(channel.process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerFailed, match=r"did not answer for 2 s and was ended; nothing is"):
        executor._channels.ask_all("path", ["x" * 3 * PIPE_BYTES * much])
    executor.close()


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"  # not even as a zombie
    except (FileNotFoundError, ProcessLookupError):
        return False
