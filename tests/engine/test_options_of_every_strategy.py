"""What `[server]`, `[evaluation]` and `[training]` add to every strategy, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Experiment, Run, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Setup, evaluate_run
from cocofl.fl.averaging import AVERAGE
from cocofl.fl.spans import SpanWork
from cocofl.models import MODELS
from cocofl.runlog import RoundRecord, RunFolder

TINY: dict[str, Any] = {
    "rounds": 4,
    "model": {"name": "exact-norms"},
    "devices": {"count": 6, "per_round": 3},
    "training": {"batch": 64, "clip": 1.0, "weight_decay": 0.01},
    "evaluation": {"every": 2},
    "tables": {"spans": "analytic", "widths": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "cocofl": {"variant": "f", "selector": "coverage", "lr_power": 0.5},
    "heterofl": {"masked": True},
    "fjord": {"distillation": 0.5},
    "fedavg-full": {},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavgm": {"server.optimizer": "fedavgm"},
    "fedadam": {"server.optimizer": "fedadam"},
    "fedyogi": {"server.optimizer": "fedyogi"},
    "average": {"evaluation.average": 2},
    "calibration": {"training.calibration": 1.0},
}
ALL = {**OPTIONS["fedadam"], **OPTIONS["average"], **OPTIONS["calibration"]}


class ToFloat64(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def exact(num_classes: int, width: float = 1.0) -> tuple[nn.Module, torch.Tensor]:
    """In float64, so that engines may be compared, with norm statistics."""
    hidden = max(1, round(12 * width))
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
    second = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())
    network = nn.Sequential(ToFloat64(), first, second, nn.Linear(hidden, num_classes)).double()
    return network, torch.rand(4, 1, 8, 8)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "exact-norms", exact)


def experiment(name: str = "fedavg-full", **changes: Any) -> Experiment:
    strategy = {"name": name, **STRATEGIES[name]}
    return Experiment.parse(TINY | {"strategy": strategy}).changed(changes)


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((t - other[key]).abs().max()) for key, t in one.items())


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [*((name, ALL) for name in STRATEGIES), *(("cocofl", own) for own in OPTIONS.values())],
)
def test_both_engines_give_the_same(strategy: str, changes: dict[str, Any], tmp_path: Path) -> None:
    own = experiment(strategy, **changes)
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", devices=2))
    assert apart(serial.state, cohort.state) < 1e-9
    if "evaluation.average" in changes:
        assert apart(serial.averaged_state, cohort.averaged_state) < 1e-9
        assert serial.averaged == cohort.averaged != {}
    if "server.optimizer" in changes or "training.calibration" in changes:
        plain = simulate(experiment(strategy), out=tmp_path / "plain", executor=InProcess())
        assert apart(serial.state, plain.state) > 1e-3, "it makes a difference"


class Stop:
    def on_round(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    def on_end(self) -> None: ...


@pytest.mark.parametrize("make", [InProcess, lambda: CohortExecutor("cpu")])
@pytest.mark.parametrize("strategy", ["cocofl", "heterofl"])
def test_an_interruption_changes_no_bit(strategy: str, make: Any, tmp_path: Path) -> None:
    own = experiment(strategy, **ALL)
    whole = simulate(own, out=tmp_path / "whole", executor=make())
    with pytest.raises(KeyboardInterrupt):
        simulate(own, out=tmp_path / "cut", executor=make(), watchers=[Stop()])
    again = simulate(own, out=tmp_path / "cut", executor=make(), resume=True)
    assert whole.rounds == again.rounds
    assert apart(whole.state, again.state) == 0
    assert apart(whole.averaged_state, again.averaged_state) == 0


def test_a_device_with_few_blocks_has_a_learning_rate_of_its_own() -> None:
    setup = Setup(experiment("cocofl"))
    plans = [setup.strategy.plan(setup.federation.situation(device, 0)) for device in range(6)]
    works = [plan.work for plan in plans if plan is not None]
    factors = {len(work.blocks): work.lr_factor for work in works if isinstance(work, SpanWork)}
    assert len(factors) > 1, "devices are unequal"
    assert factors == {blocks: (len(setup.chain) / blocks) ** 0.5 for blocks in factors}


# --- the mean over rounds ------------------------------------------------------------------------


def test_the_mean_is_that_of_the_models_of_the_rounds(tmp_path: Path) -> None:
    changes = {"evaluation.average": 2, "training.calibration": 0.0}
    runs = [
        simulate(experiment(rounds=n, **changes), out=tmp_path / str(n), executor=InProcess())
        for n in (1, 2, 3, 4)
    ]
    states = [run.state for run in runs]
    wanted = states[0]
    for state, weight in zip(states[1:], (1 / 2, 1 / 2, 1 / 2), strict=True):
        wanted = {key: (1 - weight) * wanted[key] + weight * t for key, t in state.items()}
    floats = {key: t for key, t in wanted.items() if t.is_floating_point()}
    found = {key: runs[-1].averaged_state[key] for key in floats}
    assert apart(floats, found) < 1e-12
    assert apart(runs[-1].averaged_state, runs[-1].state) > 1e-3
    plain = simulate(experiment(), out=tmp_path / "plain", executor=InProcess())
    assert apart(plain.state, runs[-1].state) == 0, "training goes on from the last round"
    assert [r.scores for r in plain.rounds] == [r.scores for r in runs[-1].rounds]


def test_both_models_are_tested_and_kept(tmp_path: Path) -> None:
    own = experiment("fedavg-full", **OPTIONS["average"])
    run = simulate(own, out=tmp_path, executor=InProcess())
    assert [bool(r.averaged_scores) for r in run.rounds] == [False, True, False, True]
    assert set(run.final.averaged_scores) == {"running", "batch"}
    assert Run.open(tmp_path).rounds == run.rounds
    assert evaluate_run(tmp_path, executor=InProcess())["accuracy"] == run.final.scores["accuracy"]
    mean = evaluate_run(tmp_path, average=True, executor=InProcess())
    assert mean["accuracy"] == run.averaged["accuracy"]
    assert "averaged_running_statistics" in (tmp_path / "metrics.jsonl").read_text()


def test_a_mean_that_nobody_kept_is_missed(tmp_path: Path) -> None:
    simulate(experiment(rounds=1), out=tmp_path, executor=InProcess())
    with pytest.raises(Exception, match=r"no mean over rounds: it is kept where evaluation\.av"):
        evaluate_run(tmp_path, average=True)


def test_a_checkpoint_holds_one_copy(tmp_path: Path) -> None:
    own = experiment("fedavg-full", **OPTIONS["average"])
    with pytest.raises(KeyboardInterrupt):
        simulate(own, out=tmp_path, executor=InProcess(), watchers=[Stop()])
    _, kept = RunFolder.open(tmp_path).rewind() or (0, {})
    floats = [
        key for key, t in Setup(own).trainer.model().state_dict().items() if t.is_floating_point()
    ]
    assert {key for key in kept if AVERAGE in key} == {f"memory.{AVERAGE}/{key}" for key in floats}


# --- calibration ---------------------------------------------------------------------------------


def calibrated_by_hand(outputs: torch.Tensor, labels: torch.Tensor, tau: float) -> torch.Tensor:
    """FedLC's loss over the classes that are there, sample by sample."""
    present = sorted(set(labels.tolist()))
    margin = {c: tau * labels.tolist().count(c) ** -0.25 for c in present}
    total = torch.zeros((), dtype=outputs.dtype)
    for scores, label in zip(outputs, labels.tolist(), strict=True):
        others = sum(torch.exp(scores[c] - margin[c]) for c in present)
        total = total - torch.log(torch.exp(scores[label] - margin[label]) / others)
    return total / len(labels)


def test_one_step_of_a_calibrated_loss(tmp_path: Path) -> None:
    recipe = {"batch": 10_000, "calibration": 0.7, "weight_decay": 0.0, "lr": 0.1}
    own = experiment("fedavg-full", rounds=1, **{"devices.per_round": 1}).changed(
        {f"training.{key}": value for key, value in recipe.items()} | {"data.split": "rc"}
    )
    run = simulate(own, out=tmp_path, executor=InProcess())
    setup = Setup(own)
    device = run.rounds[0].devices[0].device
    train, indices = setup.data.train, setup.partition[device]
    assert len(np.unique(train.labels[indices])) < 10, "classes are missing"
    model, _ = setup.subject.build(seed=own.seed)
    model.train()
    inputs = torch.from_numpy((train.inputs[indices] / 255.0).astype(np.float32)).permute(
        0, 3, 1, 2
    )
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (train.facts.mean, train.facts.std))
    labels = torch.from_numpy(train.labels[indices])
    calibrated_by_hand(model((inputs - mean) / std), labels, 0.7).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        norm = 1.0  # no clipping below
        wanted = parameter - 0.1 * parameter.grad / norm
        assert torch.allclose(run.state[key], wanted, atol=1e-6), key


def test_calibration_needs_scores_of_classes() -> None:
    own = experiment("fedavg-full", **OPTIONS["calibration"]).changed(
        {"training.loss": f"{__name__}:calibrated_by_hand"}
    )
    with pytest.raises(InvalidExperiment, match=r"training\.calibration is 1, which lowers scores"):
        Setup(own).job()
