"""The round loop: ask devices, train them, merge, evaluate, write down; and resume."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cocofl.engine.executor import Executor, JointExecutor
from cocofl.errors import NoFeasibleSpan
from cocofl.fl.batches import Ints, chunks
from cocofl.fl.evaluation import metrics
from cocofl.fl.faults import Faults
from cocofl.fl.federation import Federation
from cocofl.fl.local import STATISTICS, Materials, Task, Workshop
from cocofl.fl.merge import Contribution, State, merge_nested
from cocofl.fl.strategies import Plan, Strategy
from cocofl.freeze import KernelPlan
from cocofl.rng import stream
from cocofl.runlog import PLAN, Record, RunFolder

STATUSES = ("merged", "late", "lost", "rejected", "infeasible")
# How many devices are asked before a run in which nobody can train is called off.
_ASKED_AT_MOST = 1000


@dataclass(frozen=True)
class Schedule:
    """The learning rate over rounds: multiplied by a factor at some of them."""

    lr: float = 0.1
    decay_rounds: tuple[int, ...] = ()
    decay_factor: float = 0.1

    def at(self, round_index: int) -> float:
        """The learning rate of a round.

        >>> [Schedule(1.0, (2,), 0.5).at(r) for r in range(4)]
        [1.0, 1.0, 0.5, 0.5]
        """
        passed = sum(round_index >= decay for decay in self.decay_rounds)
        return self.lr * self.decay_factor**passed


@dataclass(frozen=True, eq=False)
class Evaluation:
    """When and how the server tests its model, and whose classes weigh how much."""

    every: int
    batch: int
    statistics: str
    group_names: tuple[str, ...]
    group_densities: NDArray[Any]
    device_densities: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a run needs, put together."""

    strategy: Strategy
    federation: Federation
    materials: Materials
    initial: State
    rounds: int
    seed: int
    schedule: Schedule
    faults: Faults
    evaluation: Evaluation
    deadline_s: float
    checkpoint_every: int = 10


class Watcher(Protocol):
    """Is told of every round: progress bars, trackers. It cannot change what happens."""

    def on_round(self, record: Record) -> None:
        """A round has been written down."""

    def on_end(self) -> None:
        """The run is complete."""


class _Asked(NamedTuple):
    device: int
    plan: Plan | None
    fate: str
    time: float


def run(
    job: Job,
    executor: Executor,
    folder: RunFolder,
    plan: KernelPlan,
    watchers: Sequence[Watcher] = (),
) -> State:
    """Play all rounds that the folder does not have yet; the state after the last one."""
    if folder.is_complete:
        return folder.model()
    game = _Game(job, folder)
    game.prepare(executor, plan)
    while not game.is_over:
        planned = _plan(job, game.next_round)
        sent = executor.train(planned.tasks, game.state)
        game.settle(_finish(job, executor, game.workshop, game.state, planned, sent), watchers)
    return game.end(watchers)


def run_together(
    jobs: Sequence[tuple[Job, RunFolder]],
    executor: JointExecutor,
    plan: KernelPlan,
    watchers: Sequence[Watcher] = (),
) -> None:
    """Play several runs with one network and recipe at once; watchers are told of the first."""
    games = [_Game(job, folder) for job, folder in jobs if not folder.is_complete]
    if not games:
        return
    games[0].prepare(executor, plan)
    for game in games[1:]:
        game.obey(games[0])
    watching = {id(game): watchers if i == 0 else () for i, game in enumerate(games)}
    while under_way := [game for game in games if not game.is_over]:
        planned = [_plan(game.job, game.next_round) for game in under_way]
        asked = [(p.tasks, game.state) for p, game in zip(planned, under_way, strict=True)]
        answers = executor.train_together(asked)
        for game, p, sent in zip(under_way, planned, answers, strict=True):
            outcome = _finish(game.job, executor, game.workshop, game.state, p, sent)
            game.settle(outcome, watching[id(game)])
            if game.is_over:  # at once: a run that has fewer rounds left need not wait for others
                game.end(watching[id(game)])


class _Game:
    """A run under way: the server's state, and the folder that keeps it."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        _refuse_if_nobody_can_train(job)
        self.job, self.folder = job, folder
        self.next_round, self.state = folder.rewind() or (0, job.initial)
        self.workshop = Workshop(job.materials)  # knows where narrower networks lie in the full one

    @property
    def is_over(self) -> bool:
        """Whether all rounds are played."""
        return self.next_round >= self.job.rounds

    def prepare(self, executor: Executor, plan: KernelPlan) -> None:
        """Get the executor ready, with the kernels that this run began with or begins with now."""
        path = self.folder.path / PLAN
        if path.exists():
            plan = KernelPlan.load(path)
        executor.prepare(self.job.materials, plan)
        if not path.exists():
            if self.job.strategy.integers and self.job.materials.backend == "auto":
                plan = executor.resolve_plan(self.state)
            plan.save(path)

    def obey(self, other: _Game) -> None:
        """Use the kernels that another run uses, which is played together with this one."""
        if not (self.folder.path / PLAN).exists():
            KernelPlan.load(other.folder.path / PLAN).save(self.folder.path / PLAN)

    def settle(self, outcome: Outcome, watchers: Sequence[Watcher]) -> None:
        """Write a round down."""
        self.state, record, timing = outcome
        self.folder.append(record, timing)
        self.next_round += 1
        if self.next_round % self.job.checkpoint_every == 0 and not self.is_over:
            self.folder.save_checkpoint(self.next_round, self.state)
        for watcher in watchers:
            watcher.on_round(record)

    def end(self, watchers: Sequence[Watcher]) -> State:
        """Keep the model."""
        self.folder.save_model(self.state, self.job.rounds)
        for watcher in watchers:
            watcher.on_end()
        return self.state


Outcome = tuple[State, Record, Record]
"""The new state, what is to be known of the round, and how long its parts took."""


class _Planned(NamedTuple):
    """A round before anything is trained."""

    round_index: int
    begin: float
    asked: list[_Asked]
    tasks: list[Task]


def play_round(
    job: Job, executor: Executor, workshop: Workshop, state: State, round_index: int
) -> Outcome:
    """One round."""
    planned = _plan(job, round_index)
    sent = executor.train(planned.tasks, state)
    return _finish(job, executor, workshop, state, planned, sent)


def _plan(job: Job, round_index: int) -> _Planned:
    begin = time.perf_counter()
    asked = _ask(job, round_index)
    training = [one for one in asked if one.fate == "merged"]
    tasks = [_task(job, one.device, one.plan, round_index) for one in training]
    return _Planned(round_index, begin, asked, tasks)


def _finish(
    job: Job,
    executor: Executor,
    workshop: Workshop,
    state: State,
    planned: _Planned,
    answers: Iterable[Contribution],
) -> Outcome:
    """Merge what was sent, and evaluate."""
    round_index, begin, asked, tasks = planned
    fates = {one.device: one.fate for one in asked}
    losses: list[float] = []
    bytes_up = 0

    def accepted() -> Iterator[Contribution]:
        nonlocal bytes_up
        for task, sent in zip(tasks, answers, strict=True):
            bytes_up += sent.nbytes
            if not sent.is_finite:
                fates[task.device] = "rejected"
                continue
            losses.append(sent.loss)
            yield sent

    merge = executor.merger(job.strategy.merge)
    merged = merge(state, accepted(), workshop.places)
    trained = time.perf_counter()
    record: Record = {
        "round": round_index + 1,
        "lr": job.schedule.at(round_index),
        "simulated_s": round(_duration(asked) * job.deadline_s, 6),
        "bytes_up": bytes_up,
        "loss": round(float(np.mean(losses)), 6) if losses else None,
        **{status: sum(fate == status for fate in fates.values()) for status in STATUSES},
        "devices": [
            [
                one.device,
                job.federation.group_name(one.device),
                str(one.plan.work) if one.plan else None,
                fates[one.device],
            ]
            for one in asked
        ],
    }
    is_last = round_index + 1 == job.rounds
    if (round_index + 1) % job.evaluation.every == 0 or is_last:
        used = [task for task in tasks if fates[task.device] == "merged"]
        if is_last or job.evaluation.statistics == "running":
            merged = _with_statistics(job, executor, workshop, merged, used)
        record |= evaluate(job, executor, merged)
    if is_last and workshop.has_norm_statistics:
        # Which statistics a published number was made with is rarely said: the end has both.
        other = next(kind for kind in STATISTICS if kind != job.evaluation.statistics)
        record[f"{other}_statistics"] = evaluate(job, executor, merged, other)
    end = time.perf_counter()
    timing = {
        "round": round_index + 1,
        "train_s": round(trained - begin, 4),
        "evaluate_s": round(end - trained, 4),
    }
    return merged, record, timing


def evaluate(job: Job, executor: Executor, state: State, statistics: str = "") -> Record:
    """Test the server's model, with other norm statistics than the job's where they are named."""
    settings = job.evaluation
    # Shuffled once and for all: where statistics are those of the batch, a batch must be mixed.
    order = stream(0, "evaluation").permutation(len(job.materials.test))
    parts: list[Ints] = [order[part] for part in chunks(len(order), settings.batch)]
    confusion = executor.confusion(state, parts, statistics or settings.statistics)
    return metrics(
        confusion,
        list(settings.group_names),
        settings.group_densities,
        settings.device_densities,
    )


def _with_statistics(
    job: Job, executor: Executor, workshop: Workshop, state: State, tasks: Sequence[Task]
) -> State:
    """The state with norm statistics where the strategy's devices do not send them."""
    if job.strategy.tracks_statistics or not tasks:
        return state
    return merge_nested(state, executor.statistics(tasks, state), workshop.places)


def _ask(job: Job, round_index: int) -> list[_Asked]:
    """Who is asked this round, and what comes of it before anything is trained, by device.

    An update that comes late or gets lost is never looked at, so it is not computed either.
    """
    federation, strategy = job.federation, job.strategy
    plans = (
        (device, strategy.plan(federation.situation(device, round_index)))
        for device in federation.in_random_order(round_index)
    )
    if strategy.only_able:
        plans = ((device, plan) for device, plan in plans if plan is not None)
    asked = []
    for device, plan in sorted(islice(plans, federation.per_round), key=lambda pair: pair[0]):
        if plan is None:
            asked.append(_Asked(device, None, "infeasible", 0.0))
            continue
        fate, duration = job.faults.fate(job.seed, round_index, device, plan.time)
        asked.append(_Asked(device, plan, fate, duration))
    return asked


def _task(job: Job, device: int, plan: Plan | None, round_index: int) -> Task:
    assert plan is not None
    indices = job.federation.partition[device]
    lr = job.schedule.at(round_index)
    return Task(job.seed, round_index, device, indices, plan.work, lr)


def _duration(asked: Sequence[_Asked]) -> float:
    """How long the server waits, in parts of the deadline: until the last update it expects."""
    if any(one.fate in ("late", "lost") for one in asked):
        return 1.0
    return max((one.time for one in asked), default=0.0)


def _refuse_if_nobody_can_train(job: Job) -> None:
    federation = job.federation
    for device in islice(federation.in_random_order(0), _ASKED_AT_MOST):
        if job.strategy.plan(federation.situation(device, 0)) is not None:
            return
    first = next(federation.in_random_order(0), None)
    if first is None:  # nobody can be asked yet: what they have is not known
        return
    budget = federation.situation(first, 0).budget
    raise NoFeasibleSpan(
        f"no device can train anything: of {min(len(federation.devices), _ASKED_AT_MOST)} asked, "
        f"none has a configuration that fits, and one of them has {budget}. Raise the budgets of "
        "the groups, or use another profile table"
    )
