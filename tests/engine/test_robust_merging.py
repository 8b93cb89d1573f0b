"""Rules of merging in experiments: the same on both engines, and attackers that achieve nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.hostile_attacks import DEPLOYED, PLAIN, accuracy
from torch import nn

from cocofl import Experiment, Run, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidExperiment
from cocofl.models import MODELS
from cocofl.strategies import STRATEGIES, Accumulator, Mean, Merge, ServerState, Strategy, Tables
from tests.engine.test_own_strategies import TINY, ToFloat64, distance
from tests.extensions import write_extensions


def exact(
    num_classes: int, *, width: float = 1.0, norm: type[nn.Module] = nn.BatchNorm2d
) -> tuple[nn.Module, torch.Tensor]:
    """In float64 with norm statistics, so that engines may be compared."""
    wide = round(12 * width)
    layers = [ToFloat64(), nn.Conv2d(1, wide, 3, bias=False), norm(wide), nn.ReLU()]
    layers += [nn.Conv2d(wide, wide, 3, bias=False), norm(wide), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes)]
    network = nn.Sequential(*layers).double()
    return network, torch.rand(4, 1, 8, 8)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("extensions")
    write_extensions(folder)
    monkeypatch.setitem(MODELS, "exact_with_norms", exact)
    monkeypatch.setitem(MODELS, "exact_without_norms", partial(exact, norm=nn.Identity))
    monkeypatch.syspath_prepend(str(folder))


def experiment(strategy: dict[str, Any], **merge: Any) -> Experiment:
    sizes = {
        "model": {"name": "exact_with_norms"},
        "rounds": 3,
        "devices": {"count": 8, "per_round": 5},
        "data": {"split": "dirichlet", "equal": False},
    }
    return Experiment.parse(TINY | sizes | {"strategy": strategy, "merge": merge})


def both(own: Experiment, folder: Path) -> tuple[Run, Run]:
    serial = simulate(own, out=folder / "serial", executor=InProcess())
    # Two at a time: what the first two sent must outlive the others' training.
    return serial, simulate(own, out=folder / "cohort", executor=CohortExecutor("cpu", devices=2))


COCOFL = {"name": "cocofl", "variant": "f"}


@pytest.mark.parametrize(
    ("strategy", "rules", "more"),
    [
        (COCOFL, ["norm-clip", "trimmed-mean"], {"share": 0.0, "agreement": 0.9}),
        pytest.param(COCOFL, ["median"], {}, marks=pytest.mark.slow),
        pytest.param(COCOFL, ["krum"], {"trim": 0.2}, marks=pytest.mark.slow),
        pytest.param(COCOFL, [], {"share": 0.3}, marks=pytest.mark.slow),
        pytest.param(
            *({"name": "fedavg-full"}, ["krum", "norm-clip", "median"], {"clip": 0.5}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"name": "heterofl", "masked": True}, ["norm-clip", "trimmed-mean"], {}),
            marks=pytest.mark.slow,
        ),
        ({"name": "fjord"}, ["krum", "median"], {"bound": 2.0}),
        ({"name": "fedavgm:fedavgm", "beta": 0.9}, ["trimmed-mean"], {}),
        pytest.param(
            *({"name": "scaffold:scaffold", "devices": 8}, ["norm-clip"], {"clip": 0.9}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_both_engines_give_the_same(
    strategy: dict[str, Any], rules: list[str], more: dict[str, float], tmp_path: Path
) -> None:
    serial, cohort = both(experiment(strategy, rules=rules, **more), tmp_path)
    assert distance(serial, cohort) < 1e-9
    plain = simulate(experiment(strategy), out=tmp_path / "plain", executor=InProcess())
    assert distance(serial, plain) > 1e-6, "it makes a difference"


def test_a_network_of_many_widths_needs_no_norm_statistics(tmp_path: Path) -> None:
    own = experiment({"name": "fjord"}, rules=["norm-clip"])
    serial, cohort = both(own.changed({"model.name": "exact_without_norms"}), tmp_path)
    assert distance(serial, cohort) < 1e-9


def test_scales_are_merged_alike(tmp_path: Path) -> None:
    network = {"model.name": "resnet10-digits", "model.options": {"tiny": True}}
    own = experiment({"name": "cocofl"}, rules=["median"]).changed(network)
    serial, cohort = both(own, tmp_path)
    scales = {key for key in serial.state if key.startswith("scales.")}
    assert scales
    assert scales == {key for key in cohort.state if key.startswith("scales.")}


class Mine(Merge):
    """Knows of no rules."""

    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        return Mean().begin(state, round_index)


def mine(tables: Tables) -> Strategy:
    return replace(STRATEGIES["fedavg-full"](tables), merge=Mine())


def test_a_strategy_that_cannot_use_rules_says_so(tmp_path: Path) -> None:
    own = experiment({"name": f"{__name__}:mine"}, rules=["median"])
    with pytest.raises(InvalidExperiment, match=r"merge\.rules cannot be used: Mine"):
        simulate(own, out=tmp_path, executor=InProcess())


def test_one_device_of_four_cannot_ruin_the_model() -> None:
    """The short part of ``bench/hostile.py attacks``; after five rounds no model is at its best."""
    plain, default = (
        accuracy("digits", 1, 4, "scaled ×50", merging, "", rounds=5)
        for merging in (PLAIN, DEPLOYED)
    )
    assert plain < 0.3
    assert default > 0.5
