"""Comparisons are fair: as many updates and as many trials for all, by a seed nobody reports."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cocofl import Experiment, Run, simulate
from cocofl.comparison import TUNING_SEED, compare
from cocofl.engine.executor import InProcess
from cocofl.errors import CocoflError, InvalidExperiment, NoFeasibleSpan

TINY = Experiment().changed(
    {
        "rounds": 4,
        "model.options": {"tiny": True},
        "training.decay_rounds": [2],
        "devices.count": 12,
        "devices.per_round": 3,
        "evaluation.every": 2,
        "evaluation.samples": 50,
        "tables.spans": "analytic",
        "engine.kernels": "reference",
    }
)
ALIKE = [{"name": "strong"}]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own would take longer to start than all that is trained here."""
    monkeypatch.setattr("cocofl.comparison.executor_for", lambda _one: nullcontext(InProcess()))


def test_all_have_as_many_updates_and_as_many_trials(tmp_path: Path) -> None:
    names = ["fedavg", "fedasync", "fedbuff", "centralized"]
    runs = compare(
        TINY.changed({"devices.groups": ALIKE}),
        strategies=names,
        seeds=[0],
        out=tmp_path,
        splits=["iid"],
        lr_grid=[0.05, 0.1],
        resume=False,
    )
    by_name = {run.experiment.strategy.name: run for run in runs}
    rounds = {name: len(run.rounds) for name, run in by_name.items()}
    # FedBuff has buffers of ten: a merge for 3.33 rounds of three updates.
    assert rounds == {"fedavg": 4, "fedasync": 12, "fedbuff": 1, "centralized": 1}
    assert [by_name[name].fates["merged"] for name in names] == [12, 12, 10, 1]
    rates = [[record.lr for record in by_name[name].rounds] for name in names[:2]]
    assert rates[1] == [rate for rate in rates[0] for _ in range(3)]
    tested = [[record.round for record in by_name[name].evaluated] for name in names[:2]]
    assert tested == [[2, 4], [6, 12]]
    for name in names:
        trials = sorted((tmp_path / "iid/tuning" / name).iterdir())
        assert [one.name for one in trials] == ["lr0.05", "lr0.1"]
        assert {Run.open(one).experiment.seed for one in trials} == {TUNING_SEED}
        found = {Run.open(one).experiment.training.lr: Run.open(one).final for one in trials}
        best = max(found, key=lambda rate: found[rate].scores["accuracy"])
        assert by_name[name].experiment.training.lr == best


def test_what_nobody_can_train_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    weak = TINY.changed({"devices.groups": [{"name": "weak", "memory": 0.5}]})
    left_out: list[tuple[str, str]] = []

    def played(*names: str, tell: bool) -> list[Run]:
        return compare(
            weak.changed({"rounds": 1}),
            strategies=names,
            seeds=[0],
            out=tmp_path / "runs",
            splits=["iid"],
            lr_grid=[],
            resume=False,
            leave_out=(lambda *said: left_out.append(said)) if tell else None,
        )

    with pytest.raises(NoFeasibleSpan, match="fedavg: no device can train anything"):
        played("fedavg", "cocofl", tell=False)
    assert not (tmp_path / "runs").exists()
    (run,) = played("fedavg", "cocofl", tell=True)
    assert run.experiment.strategy.name == "cocofl"
    assert [name for name, _ in left_out] == ["fedavg"]


def test_what_begins_later_is_no_reason_to_call_a_run_off(tmp_path: Path) -> None:
    """Nobody has the memory for FedPart's full rounds; single blocks have their turn after them."""
    weak = TINY.changed({"devices.groups": [{"name": "weak", "memory": 0.9}], "rounds": 3})
    asked = weak.with_strategy("fedpart", warmup=1, each=1)
    (run,) = compare(
        asked,
        strategies=["fedpart"],
        seeds=[0],
        out=tmp_path,
        splits=["iid"],
        lr_grid=[],
        resume=False,
    )
    assert [len(one.devices) for one in run.rounds] == [0, 0, 3], "the first block costs most"
    with pytest.raises(NoFeasibleSpan, match="no device can train anything"):
        simulate(asked.changed({"rounds": 1}), out=tmp_path / "short")


def test_a_strategy_is_played_under_the_budgets_that_suit_it(tmp_path: Path) -> None:
    """No phone sends a whole network in every round."""
    left_out: list[str] = []
    runs = compare(
        TINY.changed({"rounds": 1}),
        strategies=["fedavg", "cocofl"],
        seeds=[0],
        out=tmp_path,
        splits=["iid", "rc"],
        lr_grid=[],
        resume=False,
        budgets=["paper", "phones-2024"],
        leave_out=lambda name, _why: left_out.append(name),
    )
    found = {str(run.path.relative_to(tmp_path)) for run in runs}
    everywhere = {f"{b}/{s}/cocofl/seed0" for b in ("paper", "phones-2024") for s in ("iid", "rc")}
    assert found == everywhere | {"paper/iid/fedavg/seed0", "paper/rc/fedavg/seed0"}
    assert left_out == ["fedavg in phones-2024/iid, phones-2024/rc"]


@pytest.mark.parametrize(
    ("changes", "strategies", "why"),
    [
        ({"strategy.mu": -1.0}, ["cocofl", "fedprox"], "unknown key strategy.mu; cocofl takes"),
        ({"strategy.variant": "f"}, ["heterofl"], "strategy.variant is for 'cocofl'.*not compared"),
        (
            {"strategy.name": "fedprox", "strategy.mu": -1.0},
            ["cocofl", "fedprox"],
            "strategy.mu is -1.0; expected a number at least 0",
        ),
        ({"model.name": "nosuch"}, ["cocofl", "heterofl"], "unknown model 'nosuch'"),
    ],
)
def test_what_is_wrong_with_the_experiment_is_no_reason_to_leave_strategies_out(
    changes: dict[str, Any], strategies: list[str], why: str, tmp_path: Path
) -> None:
    said: list[str] = []
    with pytest.raises(CocoflError, match=why):
        compare(
            TINY.changed(changes),
            strategies=strategies,
            seeds=[0],
            out=tmp_path,
            splits=["iid"],
            lr_grid=[],
            resume=False,
            leave_out=lambda name, _why: said.append(name),
        )
    assert not said


@pytest.mark.parametrize(
    ("budget", "why"),
    [("phones", "devices.groups is 'phones'"), ("phones-2024", "3 devices cannot form 4 groups")],
)
def test_budgets_that_are_wrong_leave_no_strategies_out(
    budget: str, why: str, tmp_path: Path
) -> None:
    """Not even where others are right."""
    said: list[str] = []
    with pytest.raises(CocoflError, match=why):
        compare(
            TINY.changed({"devices.count": 3, "devices.per_round": 3}),
            strategies=["cocofl", "heterofl"],
            seeds=[0],
            out=tmp_path / "runs",
            splits=["iid"],
            lr_grid=[],
            resume=False,
            budgets=["paper", budget],
            leave_out=lambda name, _why: said.append(name),
        )
    assert not said
    assert not (tmp_path / "runs").exists()


def test_the_seed_of_trials_is_never_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="is not to be reported; take another seed"):
        compare(
            TINY,
            strategies=["cocofl"],
            seeds=[TUNING_SEED],
            out=tmp_path,
            splits=["iid"],
            lr_grid=[0.1],
            resume=False,
        )
