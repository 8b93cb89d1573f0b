"""Strategies as users write them: the same on both engines, and after an interruption."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cocofl import Experiment, Run, simulate
from cocofl.engine.cohort import CohortExecutor, TrainedAlone
from cocofl.engine.executor import InProcess
from cocofl.models import MODELS
from cocofl.runlog import RoundRecord
from cocofl.strategies import STRATEGIES, Plan, Situation, Span, SpanWork, Strategy, Tables
from tests.extensions import write_extensions

TINY: dict[str, Any] = {
    "rounds": 4,
    "model": {"name": "exact_and_small"},
    "devices": {"count": 6, "per_round": 3},
    "training": {"batch": 16, "clip": 1.0, "weight_decay": 0.01},
    "evaluation": {"every": 4},
    "tables": {"spans": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}
OWN: dict[str, dict[str, Any]] = {
    "capped_pull:capped_pull": {"mu": 3.0},
    "fedavgm:fedavgm": {"beta": 0.9},
    "scaffold:scaffold": {"devices": 6},
}


class ToFloat64(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def exact(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """In float64, so that engines may be compared."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
    network = nn.Sequential(ToFloat64(), body, nn.Linear(16, num_classes)).double()
    return network, torch.rand(4, 1, 8, 8)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("extensions")
    write_extensions(folder)
    monkeypatch.setitem(MODELS, "exact_and_small", exact)
    monkeypatch.syspath_prepend(str(folder))


def experiment(name: str, **options: Any) -> Experiment:
    return Experiment.parse(TINY | {"strategy": {"name": name, **options}})


def distance(one: Run, other: Run) -> float:
    assert one.state.keys() == other.state.keys()
    return max(float((t - other.state[key]).abs().max()) for key, t in one.state.items())


@pytest.mark.parametrize("name", OWN)
def test_both_engines_give_the_same(name: str, tmp_path: Path) -> None:
    own = experiment(name, **OWN[name])
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", devices=2))
    assert distance(serial, cohort) < 1e-9
    assert [r.bytes_up for r in serial.rounds] == [r.bytes_up for r in cohort.rounds]
    plain = simulate(experiment("fedavg-full"), out=tmp_path / "plain", executor=InProcess())
    assert distance(serial, plain) > 1e-3, "it makes a difference"


class Stop:
    def on_round(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    def on_end(self) -> None: ...


@pytest.mark.parametrize("make", [InProcess, lambda: CohortExecutor("cpu")])
@pytest.mark.parametrize("name", OWN)
def test_what_is_remembered_survives_an_interruption(name: str, make: Any, tmp_path: Path) -> None:
    own = experiment(name, **OWN[name])
    whole = simulate(own, out=tmp_path / "whole", executor=make())
    with pytest.raises(KeyboardInterrupt):
        simulate(own, out=tmp_path / "cut", executor=make(), watchers=[Stop()])
    again = simulate(own, out=tmp_path / "cut", executor=make(), resume=True)
    assert distance(whole, again) == 0
    assert whole.rounds == again.rounds


def test_devices_upload_their_control_variates(tmp_path: Path) -> None:
    run = simulate(experiment("scaffold:scaffold", devices=6), out=tmp_path, executor=InProcess())
    plain = simulate(experiment("fedavg-full"), out=tmp_path / "plain", executor=InProcess())
    assert run.rounds[0].bytes_up == 2 * plain.rounds[0].bytes_up


@dataclass(frozen=True)
class Doubled(SpanWork):
    """A subclass that trains otherwise, and says nothing about cohorts."""

    def train(self, trainer, task, state):
        return super().train(trainer, replace(task, lr=2 * task.lr), state)


def doubled(tables: Tables) -> Strategy:
    work = Doubled(Span(0, tables.n_blocks), "f")

    def plan(_situation: Situation) -> Plan:
        return Plan(work, 1.0)

    return replace(STRATEGIES["fedavg-full"](tables), plan=plan)


def test_a_subclass_is_never_trained_as_what_it_is_made_of(tmp_path: Path) -> None:
    own = experiment(f"{__name__}:doubled")
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    with pytest.warns(TrainedAlone, match="Doubled has no method `stacked` of its own"):
        cohort = simulate(own, out=tmp_path / "cohort", executor=CohortExecutor("cpu"))
    assert distance(serial, cohort) < 1e-9
