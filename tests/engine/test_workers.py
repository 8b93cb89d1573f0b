"""Worker processes and the pipes to them."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cocofl.config import Experiment
from cocofl.engine.workers import PIPE_BYTES, Workers
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
    workers, pool = Workers(1), ThreadPoolExecutor(1)
    try:
        workers.prepare(job.trainer, KernelPlan())
        answers = pool.submit(lambda: list(collected(workers, tasks, job.initial)))
        assert [one.samples for one in answers.result(timeout=15)] == [PIPE_BYTES] * 4
    finally:
        for channel in workers._channels:
            channel.process.kill()
        pool.shutdown()
        workers.close()


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


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"  # not even as a zombie
    except (FileNotFoundError, ProcessLookupError):
        return False
