"""An experiment on Flower's simulation: the devices of a round train wherever Ray has a core.

The round loop is the project's own and runs inside a ServerApp; :class:`OnFlower` is one more
executor. Nodes of the simulation are workers, not devices: a request names its device, and the
node finds out by itself, from the experiment, what that device has, plans and trains.
"""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from cocofl.allocator import keep_freed_memory
from cocofl.config import Experiment
from cocofl.engine.executor import Answer, Executor, RoundPlan, answers
from cocofl.engine.rounds import Job, Watcher, task_of
from cocofl.engine.workers import default_workers
from cocofl.experiment import Run, Setup, Watch
from cocofl.experiment import simulate as simulate_with
from cocofl.fl.state import ServerState
from cocofl.fl.widths import StatisticsWork
from cocofl.flower import records
from cocofl.flower.replies import ask
from cocofl.freeze import KernelPlan

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class NodeFailed(RuntimeError):
    """A node of the simulation broke down; its own account is in the message."""


def simulate(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    watchers: Sequence[Watcher] = (),
    watch: Watch = lambda _path, _experiment: (),
) -> Run:
    """As :func:`cocofl.experiment.simulate`, with the devices on Flower's simulation.

    Ray starts on this machine with ``engine.workers`` cores, unless ``RAY_ADDRESS`` names a
    cluster.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # Its own account of every round would drown ours; what goes wrong is raised.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cores = experiment.engine.workers or default_workers()
    backend: dict[str, Any] = {
        "init_args": {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": cores},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    play = partial(
        simulate_with, experiment, out=out, resume=resume, watchers=watchers, watch=watch
    )
    outcome, over, server = Future[Run](), Event(), ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        executor = OnFlower(grid, experiment, over)
        try:
            outcome.set_result(play(executor=executor))
        except Exception as error:
            outcome.set_exception(error)
        finally:
            executor.close()

    try:
        run_simulation(server, node, experiment.devices.per_round, backend_config=backend)
    finally:
        over.set()  # if Ray is gone, the server's thread must not wait for it
    return outcome.result(timeout=0)


class OnFlower(Executor):
    """An executor whose devices are trained by the nodes of a grid."""

    def __init__(self, grid: Grid, experiment: Experiment, over: Event) -> None:
        super().__init__()
        self._grid, self._experiment, self._over = grid, experiment.to_toml(), over
        self._nodes = experiment.devices.per_round

    def choose_kernels(self, state: ServerState) -> KernelPlan:
        """One node measures; then all obey."""
        (reply,) = self._replies(MessageType.QUERY, [(records.state_record(state.tensors), {})])
        self.prepare(self._trainer, KernelPlan(records.unpacked(reply)[1], fixed=True))
        return self._trainer.kernels

    def collect(self, plan: RoundPlan, state: ServerState) -> Iterator[Answer]:
        """Each device on a node of its own."""
        common = records.state_record(replace(state, devices={}).flat())
        requests = []
        for task in plan.tasks:
            state_of_device = common
            if task.memory:
                own = replace(state, devices={task.device: task.memory})
                state_of_device = records.state_record(own.flat())
            about: dict[str, Any] = {"device": task.device, "purpose": plan.purpose}
            about |= {"draw": task.round_index, "moment": task.moment, "lr": task.lr}
            requests.append((state_of_device, about))
        for first in range(0, len(requests), self._nodes):
            some = slice(first, first + self._nodes)
            replies = self._replies(MessageType.TRAIN, requests[some])
            yield from answers(plan.tasks[some], map(records.unpacked_contribution, replies))

    def _replies(
        self, kind: str, requests: Sequence[tuple[ConfigRecord, dict[str, Any]]]
    ) -> list[Message]:
        """What nodes reply, each to one request."""
        # At the start some may still be on their way.
        while len(nodes := sorted(self._grid.get_node_ids())) < len(requests):
            if self._over.wait(0.05):
                raise NodeFailed("Flower's simulation has ended")
        common = {"experiment": self._experiment, "plan": self._trainer.kernels.choices}
        messages = [
            Message(records.packed(state, common | about), node, kind)
            for node, (state, about) in zip(nodes, requests, strict=False)
        ]
        good = []
        for reply in ask(self._grid, messages, poll_s=0.02, is_over=self._over.is_set):
            if not isinstance(reply, Message) or reply.has_error():
                told = reply.error.reason if isinstance(reply, Message) else reply
                raise NodeFailed(
                    f"a node of the simulation failed: {told}; nothing is lost, --resume continues "
                    "the run"
                )
            good.append(reply)
        return good


# --- on the node ---------------------------------------------------------------------------------

node = ClientApp()


@node.train()
def train(message: Message, _context: Context) -> Message:
    """Do what the round loop would have given to a worker, for the device that is named."""
    job, state, about = _opened(message)
    task = task_of(job, state, *(about[what] for what in ("device", "draw", "moment", "lr")))
    if about["purpose"] == "statistics":
        task = replace(task, work=StatisticsWork())
    return Message(records.packed_contribution(job.trainer.train(task, state)), reply_to=message)


@node.query()
def choose_kernels(message: Message, _context: Context) -> Message:
    """Choose kernels under the conditions that devices train in."""
    job, state, _ = _opened(message)
    job.trainer.choose_kernels(state)
    content = records.packed(records.state_record({}), job.trainer.kernels.choices)
    return Message(content, reply_to=message)


def _opened(message: Message) -> tuple[Job, ServerState, dict[str, Any]]:
    tensors, about = records.unpacked(message)
    job = _job(about["experiment"], json.dumps(about["plan"]))
    return job, job.trainer.server_state(tensors), about


@lru_cache(maxsize=1)
def _job(experiment: str, plan: str) -> Job:
    """Kept while requests are of one experiment: a process serves many devices."""
    torch.set_num_threads(1)
    keep_freed_memory()
    job = Setup(Experiment.parse(tomllib.loads(experiment))).job()
    job.trainer.kernels = KernelPlan(json.loads(plan))
    return job
