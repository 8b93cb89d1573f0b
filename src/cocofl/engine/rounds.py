"""The round, and the loop over rounds with what is kept so that it can be resumed.

A round reads top to bottom in :func:`play_round`. Whatever trains devices (processes, a GPU,
Flower's simulation, devices on a network) supplies :meth:`Executor.collect`, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from cocofl.accounting import Accountant
from cocofl.engine.executor import QUARANTINED, Answer, Executor, RoundPlan
from cocofl.engine.inspection import Inspection
from cocofl.engine.pace import Turn, pace_of
from cocofl.errors import NoFeasibleSpan, RejectedUpdate
from cocofl.fl.averaging import averaged, with_average, with_mean
from cocofl.fl.batches import Ints, chunks
from cocofl.fl.federation import Faults, Federation
from cocofl.fl.merge import Mean
from cocofl.fl.metrics import STATISTICS, Evaluation, Populations, scores
from cocofl.fl.rules import Rules
from cocofl.fl.state import Contribution, ServerState, Tensors, is_scale
from cocofl.fl.strategies import Plan, Strategy
from cocofl.fl.trainer import Task, Trainer, norms_of
from cocofl.fl.training import Training
from cocofl.fl.widths import StatisticsWork
from cocofl.freeze import KernelPlan, check_state
from cocofl.one_line import one_line
from cocofl.rng import stream
from cocofl.runlog import PLAN, DeviceRecord, Record, RoundRecord, RunFolder

# How many devices are asked before a run in which nobody can train is called off: in the first
# round so many, and in later ones the fewer.
_ASKED_AT_MOST = 1000


class Verdict(NamedTuple):
    """What a server makes of an answer."""

    contribution: Contribution
    work: str | None = None
    """What was trained, where the answer says so rather than the plan."""


Judge = Callable[[Answer, ServerState], Verdict]
"""Accepts an answer, or raises :class:`~cocofl.errors.RejectedUpdate`."""


def only_finite(answer: Answer, _state: ServerState) -> Verdict:
    """What our own devices send is as it should be, unless their training broke down."""
    assert isinstance(answer.sent, Contribution)
    if not answer.sent.is_finite:
        raise RejectedUpdate("values", "")
    return Verdict(answer.sent)


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a run needs, put together."""

    strategy: Strategy
    federation: Federation | None
    """The devices that are simulated; None where devices plan by themselves."""
    trainer: Trainer
    initial: ServerState
    rounds: int
    seed: int
    training: Training
    faults: Faults
    evaluation: Evaluation
    populations: Populations | None
    """Whose classes weigh how much in groups and devices."""
    deadline_s: float
    checkpoint_every: int = 10
    judge: Judge = only_finite
    accountant: Accountant | None = None
    """Counts ε, where the strategy's merge hides single devices."""
    sees_devices: bool = True
    """Whether single updates are looked at: not where only their sum is known, or is to be."""
    rules: Rules | None = None
    """By which devices agree; the strategy's merge has them already."""


class Watcher(Protocol):
    """Is told of every round: progress bars, trackers. It cannot change what happens."""

    def on_round(self, record: RoundRecord) -> None:
        """A round has been written down."""

    def on_end(self) -> None:
        """The run is complete."""


# --- one round -----------------------------------------------------------------------------------


def play_round(runs: Sequence[RunInProgress], executor: Executor) -> None:
    """One round of each run: plan, collect, judge, merge, evaluate, record.

    Several runs that share a network can be collected at once.
    """
    begin = time.perf_counter()
    turns = [run.pace.turn(run.next_round) for run in runs]
    plans = [_plan(run, turn) for run, turn in zip(runs, turns, strict=True)]
    collected = executor.collect_runs([(p, run.state) for p, run in zip(plans, runs, strict=True)])
    for run, turn, plan, answers in zip(runs, turns, plans, collected, strict=True):
        job, ledger = run.job, _Ledger(run.job, turn, run.state)
        accumulator = job.strategy.merge.begin(run.state, plan.round_index)
        for answer in run.pace.arriving(turn, plan.round_index, answers, run.state):
            contribution = ledger.judge(answer)
            if contribution is not None:
                accumulator.add(contribution)
        merged = accumulator.finish()
        trained = time.perf_counter()
        merged, tested = _evaluate(job, executor, merged, plan, ledger.merged)
        record = ledger.record(plan, tested)
        end = time.perf_counter()
        timing = {
            "round": record.round,
            "train_s": round(trained - begin, 4),
            "evaluate_s": round(end - trained, 4),
        }
        run.settle(merged, record, timing)
        begin = end


def _plan(run: RunInProgress, turn: Turn) -> RoundPlan:
    lr = run.job.training.lr_at(run.next_round)
    tasks = [
        task_of(run.job, run.state, one.device, one.draw, one.moment, lr, one.plan)
        for one in turn.begin
        if one.fate == "merged"
    ]
    return RoundPlan(run.next_round, lr, tasks)


def task_of(
    job: Job,
    state: ServerState,
    device: int,
    draw: int,
    moment: int,
    lr: float,
    plan: Plan | None = None,
) -> Task:
    """A device's part of a round, planned if it is not yet.

    ``draw`` stands for the round in its random numbers, ``moment`` is the round of its budget.
    """
    assert job.federation is not None
    plan = plan or job.strategy.plan(job.federation.situation(device, moment))
    assert plan is not None, "only devices that have a plan are asked"
    indices, memory = job.federation.partition[device], state.devices.get(device, {})
    return Task(job.seed, draw, device, indices, plan.work, lr, memory, moment)


class _Ledger:
    """What became of each device that was asked, and what its answer was worth."""

    def __init__(self, job: Job, turn: Turn, state: ServerState) -> None:
        self._job, self._turn, self._state = job, turn, state
        federation = job.federation
        # Our own devices are known to be honest, and looking costs time.
        is_looked_at = federation is None and job.sees_devices
        self._inspection = Inspection(state) if is_looked_at else None
        self._devices = {
            one.device: DeviceRecord(
                one.device,
                federation.group_name(one.device) if federation is not None else "",
                str(one.plan.work) if one.plan else None,
                one.fate,
            )
            for one in turn.end
        }
        self._losses: list[float] = []
        self._reasons: list[tuple[int, str]] = []
        self._quarantined: list[int] = []
        self._bytes_up = 0
        self._bytes_broadcast: int | None = None

    def judge(self, answer: Answer) -> Contribution | None:
        """What an answer contributes; None where it is missing or refused."""
        if answer.fate == QUARANTINED:
            self._quarantined.append(answer.device)
            return None
        known = self._devices.get(answer.device, DeviceRecord(answer.device, "", None, "merged"))
        if answer.broadcast_bytes is not None:
            self._bytes_broadcast = (self._bytes_broadcast or 0) + answer.broadcast_bytes
        verdict, fate, reason = None, answer.fate, answer.reason
        if answer.sent is not None:
            try:
                verdict = self._job.judge(answer, self._state)
            except RejectedUpdate as error:
                fate = "rejected"
                reason = f"{error.reason}: {error}" if str(error) else ""
        if verdict is not None:
            self._losses.append(verdict.contribution.loss)
            self._bytes_up += verdict.contribution.nbytes
            known = known._replace(work=verdict.work or known.work)
            if self._inspection is not None:
                self._inspection.add(verdict.contribution)
        elif answer.sent is not None:
            sent = answer.sent
            self._bytes_up += len(sent) if isinstance(sent, bytes) else sent.nbytes
        if reason:
            self._reasons.append((answer.device, one_line(reason)))
        self._devices[answer.device] = known._replace(fate=fate)
        return None if verdict is None else verdict.contribution

    @property
    def merged(self) -> set[int]:
        """The devices whose contributions count."""
        return {one.device for one in self._devices.values() if one.fate == "merged"}

    def record(self, plan: RoundPlan, tested: _Tested) -> RoundRecord:
        """The round, as it is written down."""
        rounds, accountant = plan.round_index + 1, self._job.accountant
        # No noise hides what devices lost: where there is privacy, that is their own affair.
        is_known = bool(self._losses) and accountant is None
        loss = round(float(np.mean(self._losses)), 6) if is_known else None
        return RoundRecord(
            round=rounds,
            lr=plan.lr,
            simulated_s=round(self._turn.waits * self._job.deadline_s, 6),
            bytes_up=self._bytes_up,
            loss=loss,
            devices=list(self._devices.values()),
            scores=tested.model.pop(self._job.evaluation.statistics, {}),
            other_scores=tested.model,
            averaged_scores=tested.average,
            bytes_broadcast=self._bytes_broadcast,
            reasons=None if self._job.federation is not None else self._reasons,
            figures=None if self._inspection is None else self._inspection.figures(),
            quarantined=self._quarantined or None,
            epsilon=None if accountant is None else accountant.epsilon(rounds),
            energy_j=self._energy_j(),
        )

    def _energy_j(self) -> float | None:
        """What training took of all who were asked; None where no device's power is known."""
        federation = self._job.federation
        if federation is None or not any(one.power for one in federation.devices.groups):
            return None
        spent = (federation.power(one.device) * one.active for one in self._turn.end)
        return round(sum(spent) * self._job.deadline_s, 6)


# --- evaluation ----------------------------------------------------------------------------------


class _Tested(NamedTuple):
    """What was found, by the kind of norm statistics."""

    model: dict[str, dict[str, Any]]
    average: dict[str, dict[str, Any]]
    """The same of the mean over rounds, where one is kept."""


def _evaluate(
    job: Job, executor: Executor, state: ServerState, plan: RoundPlan, merged: set[int]
) -> tuple[ServerState, _Tested]:
    """Test the model, and its mean over rounds, where it is time to."""
    is_last, settings = plan.round_index + 1 == job.rounds, job.evaluation
    kinds = [settings.statistics] if (plan.round_index + 1) % settings.every == 0 or is_last else []
    measures = bool(kinds) and (is_last or settings.statistics == "running")

    def ready(state: ServerState) -> ServerState:
        return _with_statistics(job, executor, state, plan, merged) if measures else state

    state = with_average(ready(state), settings.average, plan.round_index)
    has_choice = any(norm.track_running_stats for norm in norms_of(job.trainer.model()))
    if is_last and has_choice and job.federation is not None:
        # Which statistics a published number was made with is rarely said: the end has both.
        kinds += [kind for kind in STATISTICS if kind != settings.statistics]
    tested = _Tested({kind: evaluate(job, executor, state, kind) for kind in kinds}, {})
    if settings.average and kinds:
        mean = ready(averaged(state))
        tested.average.update({kind: evaluate(job, executor, mean, kind) for kind in kinds})
        state = with_mean(state, mean)
    return state, tested


def _with_statistics(
    job: Job, executor: Executor, state: ServerState, plan: RoundPlan, merged: set[int]
) -> ServerState:
    """The state with norm statistics where the strategy's devices do not send them."""
    tasks = [replace(t, work=StatisticsWork()) for t in plan.tasks if t.device in merged]
    if job.strategy.tracks_statistics or not tasks:
        return state
    measuring = replace(plan, tasks=tasks, purpose="statistics")
    sent = (answer.sent for answer in executor.collect(measuring, state))
    return Mean("senders", job.rules)(state, (one for one in sent if isinstance(one, Contribution)))


def evaluate(
    job: Job, executor: Executor, state: ServerState, statistics: str = ""
) -> dict[str, Any]:
    """Test the server's model, with other norm statistics than the job's where they are named."""
    settings = job.evaluation
    # Shuffled once and for all: where statistics are those of the batch, a batch must be mixed.
    order = stream(0, "evaluation").permutation(len(job.trainer.spec.test))
    order = order[: settings.samples or None]
    parts: list[Ints] = [order[part] for part in chunks(len(order), settings.batch)]
    sums = executor.test(state, parts, statistics or settings.statistics)
    return scores(job.trainer.tally, sums, job.populations)


# --- all rounds ----------------------------------------------------------------------------------


class RunInProgress:
    """A run under way: the server's state, and the folder that keeps it."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        watchers: Sequence[Watcher] = (),
        writer: ThreadPoolExecutor | None = None,
    ) -> None:
        """``writer`` writes checkpoints of simulations while the next rounds are played."""
        refuse_if_nobody_can_train(job)
        self.job, self.folder, self._watchers = job, folder, watchers
        found = folder.rewind()
        self.next_round = found[0] if found else 0
        self.state = job.trainer.server_state(found[1]) if found else job.initial
        self.pace = pace_of(job.strategy, job.federation, job.faults, job.seed)
        self.pace.go_on(self.next_round, found[1] if found else {}, self.state)
        chain, tensors = job.trainer.chain(), self.state.tensors.items()
        own = chain.state_dict()  # without statistics of narrower networks
        check_state(chain, {key: t for key, t in tensors if key in own or is_scale(key)}, None)
        # Devices on a network would not do a round again: there the next one waits.
        self._writer = writer if job.federation is not None else None
        self._writing: Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all rounds are played."""
        return self.next_round >= self.job.rounds

    def settle(self, state: ServerState, record: RoundRecord, timing: Record) -> None:
        """Write a round down."""
        self.state = state
        self.folder.append(record, timing)
        self.next_round += 1
        if self.next_round % self.job.checkpoint_every == 0 and not self.is_over:
            self._keep(self.state.flat() | self.pace.flat())
        for watcher in self._watchers:
            watcher.on_round(record)
        if self.is_over:  # at once: one that has fewer rounds left need not wait for others
            self.wait_for_checkpoint()
            whole = self.job.trainer.merged
            if self.job.evaluation.average:
                self.folder.save_average(whole(averaged(self.state).tensors), self.job.rounds)
            self.folder.save_model(whole(self.state.tensors), self.job.rounds)
            for watcher in self._watchers:
                watcher.on_end()

    def _keep(self, state: Tensors) -> None:
        """Write a checkpoint.

        A run that is killed meanwhile goes on from the checkpoint before, to the same bits.
        """
        self.wait_for_checkpoint()
        if self._writer is None:
            self.folder.save_checkpoint(self.next_round, state)
        else:
            self._writing = self._writer.submit(self.folder.save_checkpoint, self.next_round, state)

    def wait_for_checkpoint(self) -> None:
        """Until the last checkpoint is written; complain if it could not be."""
        if self._writing is not None:
            self._writing.result()


def run(
    jobs: Sequence[tuple[Job, RunFolder, Sequence[Watcher]]],
    executor: Executor,
    plan: KernelPlan,
) -> None:
    """Play all rounds that the folders do not have yet, each run under its watchers' eyes.

    No folder is complete. Several jobs share a network and a recipe, and are played at once.
    """
    with ThreadPoolExecutor(1) as writer:  # at the end it has let the folders go
        runs = [RunInProgress(job, folder, watchers, writer) for job, folder, watchers in jobs]
        _prepare(runs, executor, plan)
        for one in runs:
            one.state = executor.placed(one.state)
        while under_way := [one for one in runs if not one.is_over]:
            play_round(under_way, executor)


def _prepare(runs: Sequence[RunInProgress], executor: Executor, plan: KernelPlan) -> None:
    """Get the executor ready, with the kernels that the first run began with or begins with now."""
    paths = [run.folder.path / PLAN for run in runs]
    is_new, trainer, strategy = not paths[0].exists(), runs[0].job.trainer, runs[0].job.strategy
    plan = plan if is_new else KernelPlan.load(paths[0], regions=False)
    executor.prepare(trainer, plan)
    if is_new and strategy.integers and trainer.spec.backend == "auto":
        plan = executor.choose_kernels(runs[0].state)
    for path in paths:
        if not path.exists():
            plan.save(path)


def refuse_if_nobody_can_train(job: Job) -> None:
    """Complain about budgets that leave nothing to do."""
    federation = job.federation
    if federation is None:
        return
    for index in range(job.rounds):  # what is trained may go by the round
        for device in islice(
            federation.in_random_order(index), max(1, _ASKED_AT_MOST // (index + 1))
        ):
            if job.strategy.plan(federation.situation(device, index)) is not None:
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
