"""Servers that do not wait: who begins and ends when, and what stale updates count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cocofl import Budget
from cocofl.config import Experiment
from cocofl.data import Partition
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.engine.pace import AsTheyCome
from cocofl.errors import InvalidExperiment, InvalidSetting, InvalidState
from cocofl.experiment import Run, Setup, simulate
from cocofl.fl.devices import Devices, Group
from cocofl.fl.federation import Faults, Federation, Situation
from cocofl.fl.merge import Mean
from cocofl.fl.state import Contribution, KeyLayout, ServerState
from cocofl.fl.strategies import STRATEGIES, Plan, Strategy, StrategyFacts, declares
from cocofl.fl.strategies.fedasync import LateModels
from cocofl.fl.strategies.fedbuff import LateChanges
from cocofl.fl.trainer import Task
from cocofl.fl.training import Training
from cocofl.fl.widths import WidthWork
from cocofl.runlog import RoundRecord, RunFolder

TINY: dict[str, Any] = {
    "rounds": 6,
    "model": {"name": "resnet10-digits", "options": {"tiny": True}},
    "devices": {
        "count": 24,
        "per_round": 4,
        "groups": [{"name": "fast", "time": 1.0}, {"name": "slow", "time": 0.25}],
    },
    # A small rate: what float32 rounds otherwise does not grow from round to round.
    "training": {"batch": 32, "lr": 0.01},
    "evaluation": {"every": 3},
    "tables": {"spans": "analytic", "widths": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}


def tiny(strategy: str, **options: Any) -> Experiment:
    return Experiment.parse(TINY).with_strategy(strategy, **options)


@pytest.fixture
def executor() -> InProcess:
    return InProcess()


# --- the order of events --------------------------------------------------------------------------


def federation(times: list[float], per_round: int) -> Federation:
    """One device each, which has so much of the time."""
    groups = tuple(Group(str(i), time=time) for i, time in enumerate(times))
    devices = Devices(groups, np.arange(len(times)), seed=0)
    whole = np.arange(16 * len(times))
    partition = Partition(whole, np.arange(0, len(whole) + 1, 16), whole[:0])
    return Federation(devices, partition, Training(batch=16), per_round, seed=0)


def pace(times: list[float], per_round: int, buffer: int, **faults: float) -> AsTheyCome:
    def plan(situation: Situation) -> Plan | None:
        time = situation.budget.time
        return Plan(WidthWork(1.0), 1 / time) if time > 0 else None

    strategy = Strategy(plan, Mean(), arrival=LateChanges(buffer))
    return AsTheyCome(strategy, federation(times, per_round), Faults(**faults), seed=0)


def by_brute_force(asked: AsTheyCome, per_round: int, buffer: int, merges: int) -> list[Any]:
    """The same by looking at every moment of a clock with small steps."""
    own, strategy = asked._federation, asked._strategy
    under_way: dict[int, tuple[float, int, int]] = {}
    found, clock, draw, arrived, version = [], 0.0, 0, list[Any](), 0
    tick = 1 / 64  # durations are multiples of it

    def fill() -> None:
        nonlocal draw
        while len(under_way) < per_round:
            here = {device for device, *_ in arrived} | under_way.keys()
            free = [d for d in own.in_random_order(draw, moment=int(clock)) if d not in here]
            if not free:
                return
            plan = strategy.plan(own.situation(free[0], int(clock)))
            assert plan is not None
            under_way[free[0]] = clock + plan.time, draw, version
            draw += 1

    fill()
    while len(found) < merges:
        done = sorted((draw, d) for d, (ends, draw, _) in under_way.items() if ends <= clock)
        if not done:
            clock += tick
            continue
        device = done[0][1]
        arrived.append((device, version - under_way.pop(device)[2]))
        if len(arrived) == buffer:
            found.append((arrived, clock))
            arrived, version = [], version + 1
        fill()
    return found


@pytest.mark.parametrize(("per_round", "buffer"), [(1, 1), (3, 1), (3, 2), (4, 4), (2, 5)])
def test_events_happen_as_on_a_clock(per_round: int, buffer: int) -> None:
    times = [1.0, 1.0, 0.5, 2.0, 0.25, 0.25, 1.0, 0.5]
    asked, clock = pace(times, per_round, buffer), 0.0
    expected = by_brute_force(pace(times, per_round, buffer), per_round, buffer, 12)
    for index, (devices, at) in enumerate(expected):
        turn = asked.turn(index)
        clock += turn.waits
        assert [(one.device, index - one.begun) for one in turn.end] == devices
        assert clock == pytest.approx(at)


def test_lost_updates_fill_no_buffer_and_nothing_is_late() -> None:
    asked = pace([0.5] * 8, per_round=3, buffer=2, dropout=0.4, jitter=0.5)
    fates = [[one.fate for one in asked.turn(index).end] for index in range(20)]
    assert {fate for own in fates for fate in own} == {"merged", "lost"}
    assert all(own.count("merged") == 2 for own in fates)


def test_a_buffer_larger_than_the_fleet_is_merged_as_it_is() -> None:
    asked = pace([1.0, 0.5], per_round=2, buffer=5)
    turn = asked.turn(0)
    assert sorted(one.device for one in turn.end) == [0, 1]
    assert turn.waits == pytest.approx(2.0)
    nobody = pace([0.0, 0.0], per_round=2, buffer=1)
    turn = nobody.turn(0)
    assert ([one.fate for one in turn.end], turn.waits) == (["infeasible"] * 2, 1.0)


# --- what stale updates count ---------------------------------------------------------------------


def state(**values: float) -> ServerState:
    tensors = {key.replace("_", "."): torch.tensor([v]) for key, v in values.items()}
    return ServerState(tensors, KeyLayout(learned=frozenset("w")))


def test_fedbuff_adds_changes_and_fedasync_mixes_models() -> None:
    start, now = state(w=1.0, v=4.0), state(w=5.0, v=2.0)
    sent = Contribution({"w": torch.tensor([3.0]), "v": torch.tensor([8.0])}, 7, 0.5, device=2)
    buffered, mixed = LateChanges(2, exponent=1.0), LateModels(1, mixing=0.5, exponent=1.0)
    for arrival, w, v in ((buffered, 5 + 2 / 4, 2 + 6 / 4), (mixed, 5 - 2 / 8, 2 + 6 / 8)):
        found = arrival.arrived(arrival.departed(sent, start), now, staleness=3)
        assert (float(found.tensors["w"]), float(found.tensors["v"])) == (w, v)
        assert (found.samples, found.loss, found.device, found.nbytes) == (7, 0.5, 2, sent.nbytes)


def test_what_cannot_be_kept_on_its_way_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="whole tensors only"):
        LateChanges(2).departed(Contribution({}, 1, width=0.5), state(w=1.0))


@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync"])
def test_rounds_are_as_by_hand(strategy: str, tmp_path: Path, executor: InProcess) -> None:
    """Every device is trained alone from the model that it was sent, and merged one by one."""
    options = {"buffer": 2} if strategy == "fedbuff" else {"rho": 0.0}
    experiment = tiny(strategy, **options)
    run = simulate(experiment, out=tmp_path / "run", executor=executor)
    job = Setup(experiment).job()
    assert job.federation is not None
    learned = dict(job.trainer.model().named_parameters())
    asked = AsTheyCome(job.strategy, job.federation, job.faults, job.seed)
    models, sent, stale = [job.initial.tensors], dict[tuple[int, int], Contribution](), [0]
    for index, record in enumerate(run.rounds):
        turn, now = asked.turn(index), models[-1]
        for one in turn.begin:
            assert one.plan is not None
            start = job.trainer.server_state(models[one.begun])
            indices, work = job.federation.partition[one.device], one.plan.work
            task = Task(job.seed, one.draw, one.device, indices, work, job.training.lr_at(index))
            sent[one.device, one.begun] = job.trainer.train(task, start)
        total = sum(sent[one.device, one.begun].samples for one in turn.end)
        after = {key: tensor.clone() for key, tensor in now.items()}
        for one in turn.end:
            update = sent[one.device, one.begun]
            stale.append(index - one.begun)
            weight = (1 + index - one.begun) ** -0.5 * (0.6 if strategy == "fedasync" else 1.0)
            for key, tensor in update.tensors.items():
                is_change = strategy == "fedbuff" and key in learned
                base = models[one.begun][key] if is_change else now[key]
                after[key] += weight * update.samples / total * (tensor - base)
        models.append(after)
        assert [one.device for one in record.devices] == [one.device for one in turn.end]
        assert record.simulated_s == pytest.approx(turn.waits * job.deadline_s, abs=1e-6)
        assert record.bytes_up == sum(sent[o.device, o.begun].nbytes for o in turn.end)
    for key, tensor in run.state.items():
        torch.testing.assert_close(tensor, models[-1][key], rtol=1e-4, atol=1e-5, msg=key)
    assert max(stale) > 0


# --- runs -----------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class StopsAfter:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, record: RoundRecord) -> None:
        if record.round == self.rounds:
            raise Interrupted

    def on_end(self) -> None:
        pass


@pytest.mark.parametrize(("strategy", "options"), [("fedbuff", {"buffer": 2}), ("fedasync", {})])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(
    strategy: str, options: dict[str, Any], tmp_path: Path, executor: InProcess
) -> None:
    """Updates on their way are kept, and arrive when they would have."""
    faults = {"faults.jitter": 0.3, "faults.dropout": 0.2, "engine.checkpoint_every": 2}
    experiment = tiny(strategy, **options).changed(faults)
    whole = simulate(experiment, out=tmp_path / "whole", executor=executor)
    for at in (3, 4):  # in the middle between checkpoints, and at one
        path = tmp_path / f"{at}"
        with pytest.raises(Interrupted):
            simulate(experiment, out=path, executor=executor, watchers=[StopsAfter(at)])
        kept = RunFolder.open(path).rewind()
        assert kept is not None
        assert any(key.startswith("on_the_way.") for key in kept[1])
        assert Run.open(path).state.keys() == kept[1].keys()
        again = simulate(experiment, out=path, executor=executor, resume=True)
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (again.path / name).read_bytes() == (whole.path / name).read_bytes(), name


def test_a_checkpoint_without_what_is_on_its_way_is_refused(
    tmp_path: Path, executor: InProcess
) -> None:
    path, experiment = tmp_path / "run", tiny("fedbuff", buffer=2)
    with pytest.raises(Interrupted):
        simulate(experiment, out=path, executor=executor, watchers=[StopsAfter(3)])
    folder = RunFolder.open(path)
    rounds, kept = folder.rewind() or (0, {})
    facts = next(key for key in kept if key.startswith("on_the_way.") and "/" not in key)
    weight = next(key for key in kept if key.startswith(f"{facts}/") and key.endswith("weight"))
    for change in ({facts: kept[facts][:1]}, {weight: kept[weight][:1]}):
        folder.save_checkpoint(rounds, kept | change)
        with pytest.raises(InvalidState, match="does not hold the update of device"):
            simulate(experiment, out=path, executor=executor, resume=True)


def test_a_cohort_merges_what_the_serial_engine_does(tmp_path: Path, executor: InProcess) -> None:
    experiment = tiny("fedbuff", buffer=3).changed({"rounds": 2})
    runs = [
        simulate(experiment, out=tmp_path / "serial", executor=executor),
        simulate(
            experiment,
            out=tmp_path / "cohort",
            executor=CohortExecutor("cpu", precision="fp32", devices=3),
        ),
    ]
    assert [r.devices for r in runs[0].rounds] == [r.devices for r in runs[1].rounds]
    assert [r.bytes_up for r in runs[0].rounds] == [r.bytes_up for r in runs[1].rounds]
    assert [r.simulated_s for r in runs[0].rounds] == [r.simulated_s for r in runs[1].rounds]
    for key, tensor in runs[0].state.items():
        torch.testing.assert_close(runs[1].state[key], tensor, rtol=1e-2, atol=1e-3, msg=key)


def test_memory_has_to_fit_and_time_is_what_it_is() -> None:
    tables = Setup(tiny("fedbuff")).tables
    for name in ("fedbuff", "fedasync"):
        plan = STRATEGIES[name](tables).plan
        for budget, time in (
            (Budget(time=0.25), 4.0),
            (Budget(time=0.25, memory=0.9), None),
            (Budget(upload=0.9), None),
            (Budget(time=0.0), None),
            (Budget(), 1.0),
        ):
            found = plan(Situation(0, 0, budget, np.random.default_rng(0)))
            assert (found and found.time) == time


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("fedbuff", {"buffer": 0}, "strategy.buffer is 0"),
        ("fedbuff", {"server_lr": 0.0}, "strategy.server_lr is 0"),
        ("fedbuff", {"mixing": 0.5}, "unknown key strategy.mixing"),
        ("fedasync", {"mixing": 1.5}, "strategy.mixing is 1.5"),
        ("fedasync", {"staleness": "linear"}, "strategy.staleness"),
        ("fedasync", {"patience": -1}, "strategy.patience is -1"),
    ],
)
def test_options_that_cannot_be_are_refused(
    strategy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        Setup(tiny(strategy, **options))


def test_privacy_and_deployments_are_refused() -> None:
    settings = pytest.importorskip("cocofl.flower.settings")
    with pytest.raises(InvalidExperiment, match="cannot be deployed: its server does not wait"):
        settings.check_experiment(tiny("fedasync"))
    with pytest.raises(InvalidExperiment, match="does not wait for the devices of a round, and w"):
        Setup(tiny("fedbuff").changed({"privacy.clip": 1.0})).job()


def hasty(tables: Any) -> Strategy:
    return STRATEGIES["fedbuff"](tables)


@declares(StrategyFacts(waits=False))
def forgetful(tables: Any) -> Strategy:
    return replace(STRATEGIES["fedbuff"](tables), tracks_statistics=False)


def test_a_strategy_of_ones_own_has_to_say_that_it_does_not_wait() -> None:
    with pytest.raises(InvalidExperiment, match=r"declare StrategyFacts\(waits=False\)"):
        Setup(tiny(f"{__name__}:hasty"))
    with pytest.raises(InvalidExperiment, match="cannot ask those of a round for norm statistics"):
        Setup(tiny(f"{__name__}:forgetful"))
