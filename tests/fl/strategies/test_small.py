"""One small network for all: FedAvg of the network that the weakest device can train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cocofl import Budget, Experiment, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import CocoflError, InvalidExperiment, InvalidModel, InvalidSetting
from cocofl.experiment import Setup, evaluate_run
from cocofl.experiment.groups import batch_groups
from cocofl.fl.devices import Group, Uniform, make_devices
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import STRATEGIES
from cocofl.flower.settings import check_experiment
from cocofl.models import MODELS
from cocofl.span import Span
from tests.fl.strategies.tables import PlainTables, situation
from tests.states import same_state

TINY: dict[str, Any] = {
    "rounds": 1,
    "model": {"name": "resnet10-digits", "options": {"tiny": True}},
    "devices": {"count": 6, "per_round": 3},
    "training": {"batch": 16},
    "evaluation": {"every": 1},
    "tables": {"spans": "analytic", "widths": "analytic"},
    "engine": {"kernels": "reference"},
}


def test_the_width_is_what_the_weakest_device_can_train() -> None:
    least = (Budget(time=0.8), Budget(memory=0.6), Budget(time=0.3), Budget(time=0.01))
    strategy = STRATEGIES["small"](PlainTables(least=least))
    assert strategy.width == 0.25
    plan = strategy.plan(situation(time=0.5))
    assert plan is not None
    assert (plan.work, plan.time) == (SpanWork(Span(0, 3), "f"), 0.5)
    assert strategy.plan(situation(time=0.2)) is None, "it is enforced"


def test_a_transformer_has_the_widths_that_suit_its_heads() -> None:
    strategy = STRATEGIES["small"](PlainTables(is_text=True, least=(Budget(time=0.9),)))
    assert strategy.width == 0.125


def test_devices_have_at_least_the_lower_end_of_a_draw_or_what_a_trace_says() -> None:
    def trace(_device: int, round_index: int) -> Budget | None:
        return [Budget(time=0.5), None, Budget(time=0.2), Budget(time=0.5)][round_index]

    groups = [Group("a", time=0.4, upload=Uniform(0.3, 0.9)), Group("b", trace=trace)]
    devices = make_devices(2, groups, seed=0)
    a, b = (devices.group_of.tolist().index(group) for group in (0, 1))
    assert devices.least(a, 4) == [Budget(time=0.4, upload=0.3)]
    assert devices.least(b, 4) == [Budget(time=0.5), Budget(time=0.2)]


@pytest.mark.parametrize("make", [InProcess, lambda: CohortExecutor("cpu", precision="fp32")])
def test_it_is_fedavg_of_the_narrow_network_to_the_bit(make: Any, tmp_path: Path) -> None:
    """Brute force: the same network, said to be all there is, and no budgets."""
    groups = [{"name": "all", "time": 0.4}]
    base = Experiment.parse(TINY).changed({"devices.groups": groups})
    ours = simulate(base.with_strategy("small"), out=tmp_path / "ours", executor=make())
    width = ours.folder.about["width"]
    assert 0.1 < width < 0.9
    assert ours.fates["merged"] == 3
    narrow = base.changed({"model.options": {"tiny": True, "width": width}})
    theirs = simulate(narrow.with_strategy("fedavg-full"), out=tmp_path / "b", executor=make())
    assert same_state(ours.state, theirs.state)
    assert ours.final.scores == theirs.final.scores
    again = evaluate_run(ours.path, executor=make())
    assert again["accuracy"] == ours.final.scores["accuracy"]


def test_what_it_cannot_do_is_said_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidSetting, match=r"width is 0.3, of which .* expected one of 0.125"):
        STRATEGIES["small"](PlainTables(), width=0.3)
    with pytest.raises(InvalidExperiment, match="cannot be deployed: it chooses a network by"):
        check_experiment(Experiment().with_strategy("small"))
    full = MODELS["resnet10-digits"]
    monkeypatch.setitem(MODELS, "stiff", lambda num_classes: full(num_classes, tiny=True))
    with pytest.raises(InvalidModel, match="stiff takes no width="):
        Setup(Experiment.parse(TINY | {"model": {"name": "stiff"}}).with_strategy("small"))
    with pytest.raises(CocoflError, match="unknown key strategy"):
        Setup(Experiment.parse(TINY).with_strategy("small", depth=2))


def test_its_runs_are_played_one_by_one() -> None:
    base = Experiment.parse(TINY)
    seeds = {Path(str(seed)): base.changed({"seed": seed}) for seed in range(2)}
    assert len(batch_groups(seeds)) == 1
    assert len(batch_groups({p: one.with_strategy("small") for p, one in seeds.items()})) == 2
