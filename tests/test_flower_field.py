"""Strategies that train blocks or parameters, deployed: devices plan, and the server checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cocofl.config import Experiment
from cocofl.errors import InvalidExperiment
from cocofl.flower.settings import check_experiment
from tests import flower_grid
from tests.flower_grid import device

TINY: dict[str, Any] = {
    "rounds": 1,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "flower.round_s": 0.05,
    "flower.wait_s": 0.01,
}
# By strategy: its options, what a weaker device has, and what that one trains.
DEPLOYED: dict[str, tuple[dict[str, Any], dict[str, float], str]] = {
    "fedprox": ({"mu": 0.5}, {"time": 0.5}, "0:6"),
    "embracing": ({}, {"upload": 0.95}, "2:6"),
    "fedpart": ({"warmup": 0}, {"upload": 0.1}, "0:1"),
    "pvt": ({}, {"upload": 0.5}, ""),
    "layerout": ({}, {"time": 0.8}, "0:6"),
}


@pytest.mark.parametrize("name", DEPLOYED)
def test_devices_plan_by_their_own_budget(name: str, tmp_path: Path) -> None:
    options, weak, trains = DEPLOYED[name]
    chosen = {f"strategy.{key}": value for key, value in options.items()}
    nodes = {1: device(0, of=20), 2: device(1, of=20, **weak)}
    config = TINY | {"strategy.name": name} | chosen
    _, (record,), _ = flower_grid.play(tmp_path / "run", nodes, config)
    assert record.count("merged") == 2
    strong, weaker = (one.work for one in record.devices)
    assert strong == ("0:1" if name == "fedpart" else "0:6")
    assert weaker == trains or (not trains and weaker != "0:6")


@pytest.mark.parametrize("name", ["small", "apf", "depthfl", "inclusivefl", "helios", "distreal"])
def test_what_cannot_be_deployed_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(InvalidExperiment, match=f"strategy '{name}' cannot be deployed"):
        check_experiment(Experiment().with_strategy(name))
