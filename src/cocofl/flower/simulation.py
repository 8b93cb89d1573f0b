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
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from numpy.typing import NDArray

from cocofl.allocator import keep_freed_memory
from cocofl.config import Experiment
from cocofl.engine.executor import InProcess
from cocofl.engine.rounds import Job, Watcher
from cocofl.engine.workers import default_workers
from cocofl.experiment import Run, Setup
from cocofl.experiment import simulate as simulate_with
from cocofl.fl.batches import Ints
from cocofl.fl.local import Materials, Task, Workshop
from cocofl.fl.merge import Contribution, State
from cocofl.fl.strategies import Merge
from cocofl.flower.records import (
    ABOUT,
    ask,
    contribution_reply,
    read_contribution,
    read_request,
    request,
    state_record,
)
from cocofl.freeze import KernelPlan

TRAIN, STATISTICS, PLAN = MessageType.TRAIN, f"{MessageType.TRAIN}.statistics", MessageType.QUERY


QUIET = {
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
) -> Run:
    """As :func:`cocofl.experiment.simulate`, with the devices on Flower's simulation.

    Ray starts on this machine with ``engine.workers`` cores, unless ``RAY_ADDRESS`` names a
    cluster.
    """
    outcome: list[Run | Exception] = []
    over = Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        executor = OnFlower(grid, experiment, over)
        try:
            run = simulate_with(
                experiment, out=out, resume=resume, executor=executor, watchers=watchers
            )
            outcome.append(run)
        except Exception as error:
            outcome.append(error)
        finally:
            executor.close()

    try:
        run_simulation(
            server,
            client_app=node,
            num_supernodes=experiment.devices.per_round,
            backend_config=_backend(experiment.engine.workers or default_workers()),
        )
    finally:
        over.set()  # if Ray is gone, the server's thread must not wait for it
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    return found


def _backend(workers: int) -> dict[str, Any]:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # Its own account of every round would drown ours; what goes wrong is raised.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    arguments = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
    return {"init_args": arguments, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


class OnFlower:
    """An executor whose devices are trained by the nodes of a grid."""

    def __init__(self, grid: Grid, experiment: Experiment, over: Event) -> None:
        self._grid, self._experiment, self._over = grid, experiment.to_toml(), over
        self._here = InProcess()

    def prepare(self, materials: Materials, plan: KernelPlan) -> None:
        """Nodes make a workshop when the first request comes; the server only evaluates."""
        self._materials, self._plan = materials, plan
        self._here.prepare(materials, plan)

    def resolve_plan(self, state: State) -> KernelPlan:
        """One node measures; then all obey."""
        content = request(state_record(state), self._settings())
        (reply,) = self._replies([Message(content, self._nodes(1)[0], PLAN)])
        choices = json.loads(str(reply.content.config_records[ABOUT]["json"]))
        self.prepare(self._materials, KernelPlan(choices, fixed=True))
        return self._plan

    def train(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """Each device on a node of its own."""
        return self._spread(TRAIN, tasks, state)

    def statistics(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """Each device on a node of its own."""
        return self._spread(STATISTICS, tasks, state)

    def confusion(self, state: State, chunks: Sequence[Ints], statistics: str) -> NDArray[np.int64]:
        """The server tests its model itself."""
        return self._here.confusion(state, chunks, statistics)

    def merger(self, merge: Merge) -> Merge:
        """The strategy's own."""
        return merge

    def close(self) -> None:
        """Give the threads back."""
        self._here.close()

    def _spread(self, kind: str, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        record = state_record(state)
        nodes = self._nodes(len(tasks))
        messages = [
            Message(
                request(record, self._settings(round=task.round_index, device=task.device)),
                target,
                kind,
            )
            for task, target in zip(tasks, nodes, strict=True)
        ]
        return map(read_contribution, self._replies(messages))

    def _settings(self, **more: int) -> dict[str, Any]:
        return {"experiment": self._experiment, "plan": self._plan.choices, **more}

    def _nodes(self, count: int) -> list[int]:
        """As many nodes; at the start some may still be on their way."""
        while len(found := list(self._grid.get_node_ids())) < count:
            if self._over.wait(0.05):
                raise NodeFailed("Flower's simulation has ended")
        return sorted(found)[:count]

    def _replies(self, messages: Sequence[Message]) -> list[Message]:
        replies = ask(self._grid, messages, poll_s=0.02, is_over=self._over.is_set)
        good = [reply for reply in replies if isinstance(reply, Message) and not reply.has_error()]
        if len(good) < len(messages):
            bad = next(reply for reply in replies if reply not in good)
            told = bad.error.reason if isinstance(bad, Message) else bad
            raise NodeFailed(
                f"a node of the simulation failed: {told}; nothing is lost, --resume continues "
                "the run"
            )
        return good


# --- on the node ---------------------------------------------------------------------------------

node = ClientApp()


@node.train()
def train(message: Message, _context: Context) -> Message:
    """Plan and train the device that the request names."""
    state, settings = read_request(message)
    workshop, task = _assignment(settings)
    return Message(contribution_reply(workshop.train(task, state)), reply_to=message)


@node.train("statistics")
def statistics(message: Message, _context: Context) -> Message:
    """Measure norm statistics on the data of the device that the request names."""
    state, settings = read_request(message)
    workshop, task = _assignment(settings)
    return Message(contribution_reply(workshop.statistics(task, state)), reply_to=message)


@node.query()
def resolve_plan(message: Message, _context: Context) -> Message:
    """Choose kernels under the conditions that devices train in."""
    state, settings = read_request(message)
    _, workshop = _job(settings["experiment"], json.dumps(settings["plan"]))
    workshop.resolve_plan(state)
    about = ConfigRecord({"json": json.dumps(workshop.plan.choices)})
    return Message(RecordDict({ABOUT: about}), reply_to=message)


def _assignment(settings: dict[str, Any]) -> tuple[Workshop, Task]:
    """What the round loop would have given to a worker, worked out here."""
    job, workshop = _job(settings["experiment"], json.dumps(settings["plan"]))
    device, round_index = settings["device"], settings["round"]
    plan = job.strategy.plan(job.federation.situation(device, round_index))
    assert plan is not None, "the server asks only devices that have a plan"
    indices = job.federation.partition[device]
    lr = job.schedule.at(round_index)
    return workshop, Task(job.seed, round_index, device, indices, plan.work, lr)


@lru_cache(maxsize=1)
def _job(experiment: str, plan: str) -> tuple[Job, Workshop]:
    """Kept while requests are of one experiment: a process serves many devices."""
    torch.set_num_threads(1)
    keep_freed_memory()
    job = Setup(Experiment.parse(tomllib.loads(experiment))).job()
    return job, Workshop(job.materials, KernelPlan(json.loads(plan)))
