"""Every strategy that trains blocks or parameters: the same on both engines, and when resumed.

In float64, where the order of sums changes next to nothing.
"""

from __future__ import annotations

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

TINY: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "four blocks in float64"},
    "devices": {"count": 18, "per_round": 4},
    "training": {"batch": 16, "weight_decay": 0.01},
    "evaluation": {"every": 2},
    "tables": {"spans": "analytic", "widths": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}
SLOW = [{"name": "fast", "time": 1.0}, {"name": "slow", "time": 0.5}]
STACKED: dict[str, dict[str, Any]] = {
    "fedprox": {"strategy.mu": 0.5, "devices.groups": SLOW},
    "embracing": {},
    "small": {},
    "fedpart": {"strategy.warmup": 1, "strategy.each": 1, "devices.groups": SLOW},
    "pvt": {},
    # Much is stable, so that there is something to see.
    "apf": {"strategy.threshold": 0.9, "strategy.ema": 0.5, "rounds": 4, "devices.groups": SLOW},
}
MOVED: dict[str, Any] = {**STACKED["apf"], "server.optimizer": "fedavgm"}
ALONE: dict[str, dict[str, Any]] = {
    "layerout": {"devices.groups": [{"name": "any", "time": 0.8}]},
    "slt": {"strategy.each": 1, "rounds": 2},
    "depthfl": {"strategy.stages": 3, "rounds": 2},
    "inclusivefl": {"strategy.stages": 4, "rounds": 2},
}

LIKE_FEDAVG: dict[str, dict[str, Any]] = {
    "cocofl": {},
    "fedavg": {},
    "fedprox": {"strategy.mu": 0.0},
    "embracing": {},
    "pvt": {},
    "layerout": {},
    "slt": {},
    "apf": {"strategy.threshold": 0.0},
    "depthfl": {"strategy.stages": 1},
    "inclusivefl": {"strategy.stages": 1},
    "small": {},
    "heterofl": {},
    "fedrolex": {},
    "distreal": {},
    "helios": {},
}
"""What differs from FedAvg only where a device is short of something."""


class ToFloat64(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def exact(num_classes: int, width: float = 1.0) -> tuple[nn.Module, torch.Tensor]:
    """Four blocks, two of them with a norm."""
    hidden = max(2, round(24 * width))

    def block(inputs: int, *, norm: bool) -> nn.Module:
        layers = [nn.Linear(inputs, hidden), *[nn.BatchNorm1d(hidden)] * norm, nn.ReLU()]
        return nn.Sequential(*layers)

    body = [block(64, norm=False), block(hidden, norm=True), block(hidden, norm=True)]
    network = nn.Sequential(nn.Flatten(), *body, nn.Linear(hidden, num_classes)).double()
    return nn.Sequential(ToFloat64(), network), torch.rand(4, 1, 8, 8)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "four blocks in float64", exact)


def experiment(name: str, settings: dict[str, Any]) -> Experiment:
    return Experiment.parse(TINY).changed({"strategy.name": name} | settings)


def distance(one: Run, other: Run) -> float:
    assert one.state.keys() == other.state.keys()
    return max(float((t - other.state[key]).abs().max()) for key, t in one.state.items())


@pytest.mark.parametrize("name", STACKED)
def test_both_engines_give_the_same(name: str, tmp_path: Path) -> None:
    """Nothing is trained alone: a warning would be an error."""
    own = experiment(name, STACKED[name])
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(
        own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", precision="fp32", devices=3)
    )
    assert serial.fates["merged"] >= 3
    assert distance(serial, cohort) < 1e-6  # statistics are kept in float32
    assert [r.bytes_up for r in serial.rounds] == [r.bytes_up for r in cohort.rounds]
    assert [r.devices for r in serial.rounds] == [r.devices for r in cohort.rounds]


@pytest.mark.parametrize("name", LIKE_FEDAVG)
def test_among_strong_devices_it_is_fedavg(name: str, tmp_path: Path) -> None:
    strong = {"devices.groups": [{"name": "strong", "time": 1.0, "memory": 1.0, "upload": 1.0}]}
    plain = simulate(
        experiment("fedavg-full", strong), out=tmp_path / "plain", executor=InProcess()
    )
    own = experiment(name, strong | LIKE_FEDAVG[name])
    run = simulate(own, out=tmp_path / "own", executor=InProcess())
    assert run.fates == plain.fates
    for key, tensor in plain.state.items():
        if "running" not in key and "batches" not in key:
            torch.testing.assert_close(run.state[key], tensor, atol=1e-12, rtol=0)


ONLY_ABLE = ["fedavg", "fedprox", "embracing", "fedpart", "pvt", "layerout", "apf", "slt"]


@pytest.mark.parametrize("name", [*ONLY_ABLE, "depthfl", "inclusivefl", "distreal"])
def test_in_place_of_a_device_that_cannot_take_part_another_one_is_asked(
    name: str, tmp_path: Path
) -> None:
    """Else a method that needs much of its devices would merge fewer updates than FedAvg."""
    few = [{"name": "strong", "share": 0.3}, {"name": "weak", "share": 0.7, "memory": 0.01}]
    run = simulate(experiment(name, {"devices.groups": few}), out=tmp_path, executor=InProcess())
    assert run.fates == {"merged": 2 * 4}


@pytest.mark.parametrize("name", ALONE)
def test_what_has_no_stacked_form_is_trained_alone(name: str, tmp_path: Path) -> None:
    own = experiment(name, {"rounds": 1} | ALONE[name])
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    with pytest.warns(TrainedAlone, match="has no method `stacked`"):
        cohort = simulate(own, out=tmp_path / "cohort", executor=CohortExecutor("cpu"))
    assert serial.fates["merged"] >= 2
    assert distance(serial, cohort) < 1e-6
    assert [r.bytes_up for r in serial.rounds] == [r.bytes_up for r in cohort.rounds]


class Stop:
    def on_round(self, record: RoundRecord) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    def on_end(self) -> None: ...


def cut_and_resumed(own: Experiment, make: Any, path: Path) -> Run:
    """Of a run that was interrupted the rest, which is as if it had not been."""
    whole = simulate(own, out=path / "whole", executor=make())
    with pytest.raises(KeyboardInterrupt):
        simulate(own, out=path / "cut", executor=make(), watchers=[Stop()])
    again = simulate(own, out=path / "cut", executor=make(), resume=True)
    assert distance(whole, again) == 0
    assert whole.rounds == again.rounds
    return whole


@pytest.mark.parametrize("options", [STACKED["apf"], MOVED])
@pytest.mark.parametrize("make", [InProcess, lambda: CohortExecutor("cpu")])
def test_what_is_frozen_stays_so_after_an_interruption(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = cut_and_resumed(experiment("apf", options), make, tmp_path)
    uploads = [record.bytes_up / record.count("merged") for record in whole.rounds]
    assert uploads[-1] < 0.95 * uploads[0], "what is frozen is not sent"


def test_devices_remember_their_neurons_after_an_interruption(tmp_path: Path) -> None:
    """With few devices, so that each is asked again."""
    few = {"rounds": 4, "devices.count": 6, "devices.groups": [{"name": "slow", "time": 0.5}]}
    whole = cut_and_resumed(experiment("helios", few), InProcess, tmp_path)
    assert whole.fates["merged"] == 16
