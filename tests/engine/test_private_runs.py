"""Runs with differential privacy: the same on both engines, after an interruption, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Experiment, simulate
from cocofl.accounting import Accountant, Sampling
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Run, Setup
from cocofl.fl.merge import Mean
from cocofl.fl.privacy import PrivateMean
from cocofl.models import MODELS
from cocofl.runlog import RoundRecord
from tests.states import same_state

TINY: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "exact_private"},
    "devices": {"count": 8, "per_round": 4},
    "training": {"batch": 16},
    "evaluation": {"every": 3},
    "strategy": {"name": "cocofl", "variant": "f"},
    "tables": {"spans": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
    "privacy": {"clip": 0.5, "noise": 0.5},
}


class ToFloat64(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def exact(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """In float64, so that engines may be compared; with norm statistics."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    network = nn.Sequential(ToFloat64(), body, nn.Linear(16, num_classes)).double()
    return network, torch.rand(4, 1, 8, 8)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "exact_private", exact)


def tiny(**changes: Any) -> Experiment:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return Experiment.parse(TINY).changed(dotted)


def play(path: Path, experiment: Experiment, **how: Any) -> Run:
    return simulate(experiment, out=path, executor=InProcess(), **how)


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["fedavg-full", "cocofl"])
def test_both_engines_give_the_same(strategy: str, tmp_path: Path) -> None:
    own = tiny() if strategy == "cocofl" else tiny().with_strategy(strategy)
    serial = play(tmp_path / "serial", own)
    on_rows = CohortExecutor("cpu", precision="fp32", devices=2)
    cohort = simulate(own, out=tmp_path / "cohort", executor=on_rows)
    assert serial.state.keys() == cohort.state.keys()
    assert not [key for key in serial.state if key.startswith("scales.")]
    apart = max(float((t - cohort.state[key]).abs().max()) for key, t in serial.state.items())
    assert apart < 1e-9
    assert [r.devices for r in serial.rounds] == [r.devices for r in cohort.rounds]


def test_noise_is_the_same_to_the_bit_as_tensors_and_as_rows(tmp_path: Path) -> None:
    setup = Setup(tiny())
    job, executor = setup.job(), CohortExecutor("cpu", precision="fp32")
    executor.prepare(setup.trainer, setup.trainer.kernels)
    by_key, as_rows = (
        job.strategy.merge(state, [], 5).tensors
        for state in (job.initial, executor.placed(job.initial))
    )
    assert same_state(by_key, as_rows)
    moved = [key for key, t in by_key.items() if not torch.equal(t, job.initial.tensors[key])]
    assert sorted(moved) == sorted(by_key)  # also norm statistics


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class AfterTwo:
        def on_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise Stop

        def on_end(self) -> None:
            """Never."""

    whole = play(tmp_path / "whole", tiny())
    with pytest.raises(Stop):
        play(tmp_path / "half", tiny(), watchers=[AfterTwo()])
    resumed = play(tmp_path / "half", tiny(), resume=True)
    assert same_state(whole.state, resumed.state)
    assert lines(whole) == lines(resumed)


def test_epsilon_is_counted_and_losses_stay_with_the_devices(tmp_path: Path) -> None:
    found = lines(play(tmp_path / "private", tiny()))
    accountant = Accountant(0.5, 1e-5, Sampling("poisson", 8, 4))
    assert [line["epsilon"] for line in found] == [accountant.epsilon(n) for n in (1, 2, 3)]
    assert [line["loss"] for line in found] == [None] * 3
    plain = lines(play(tmp_path / "plain", tiny(privacy__clip=0.0)))
    assert all("epsilon" not in line and line["loss"] > 0 for line in plain)
    about = json.loads((tmp_path / "private" / "about.json").read_text())
    assert about["privacy"]["noise"] == 0.5


def test_coins_decide_who_takes_part() -> None:
    federation = Setup(tiny()).federation
    coins = [federation.coins(index) for index in range(400)]
    # Binomial of 8 at 1/2: mean 4, standard deviation √2.
    assert np.mean(coins) == pytest.approx(4, abs=0.25)
    assert np.std(coins) == pytest.approx(1.414, abs=0.2)
    assert Setup(tiny(privacy__sampling="fixed")).federation.coins(0) is None
    assert Setup(tiny(privacy__clip=0.0)).federation.coins(0) is None


def test_what_sampling_hides_is_claimed_only_where_it_is_known() -> None:
    def sampling(experiment: Experiment) -> Sampling:
        accountant = Setup(experiment).job().accountant
        assert accountant is not None
        return accountant.sampling

    assert sampling(tiny()) == Sampling("poisson", 8, 4)
    fixed = tiny(privacy__sampling="fixed")
    assert sampling(fixed) == Sampling("fixed", 8, 4)
    # Of those who are able as many as wanted are asked: nobody knows out of how many.
    assert sampling(fixed.with_strategy("fedavg")).is_everyone


def test_without_privacy_the_merge_is_the_strategys_own() -> None:
    plain, private = (Setup(tiny(privacy__clip=clip)).job() for clip in (0.0, 1.0))
    assert type(plain.strategy.merge) is Mean
    assert plain.accountant is None
    assert type(private.strategy.merge) is PrivateMean
    assert private.strategy.merge.devices == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": {"name": "centralized"}}, "one device with all data"),
        ({"strategy": {"name": "heterofl"}}, "no noise covers what devices of .* measure of norms"),
        ({"strategy": {"name": "fjord"}}, "no noise covers what devices of .* measure of norms"),
        ({"merge.rules": ["trimmed-mean"]}, "no bound that noise could hide"),
        ({"merge.share": 0.0}, "no bound that noise could hide"),
        ({"privacy.max_epsilon": 1.0}, "3 rounds come to ε = .* after 0 rounds"),
    ],
)
def test_what_cannot_be_private_is_refused(changes: dict[str, Any], reason: str) -> None:
    digits = {"model.name": "resnet10-digits", "model.options": {"tiny": True}}
    own = tiny().changed({**digits, "tables.spans": "auto", **changes})
    with pytest.raises(InvalidExperiment, match=reason):
        Setup(own).job()
