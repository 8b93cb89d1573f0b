"""CoCoFL+: the classifier beside every span, within the same budgets."""

from __future__ import annotations

import pytest

from cocofl.errors import InvalidExperiment
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import STRATEGIES
from tests.fl.strategies.tables import PlainTables, situation


@pytest.mark.parametrize("budget", [{"time": 1.0}, {"time": 0.85}, {"memory": 0.7}])
def test_every_device_trains_the_classifier(budget: dict[str, float]) -> None:
    make = STRATEGIES["cocofl+"]
    works = [make(PlainTables()).plan(situation(seed=seed, **budget)) for seed in range(8)]
    for plan in works:
        assert plan is not None
        assert isinstance(plan.work, SpanWork)
        assert 2 in plan.work.blocks


def test_what_the_classifier_costs_is_charged() -> None:
    """One block of three would fit this memory, two would not."""
    plan = STRATEGIES["cocofl+"](PlainTables()).plan(situation(memory=0.4))
    assert plan is not None
    assert str(plan.work) == "2:3"
    spans = {
        str(STRATEGIES["cocofl"](PlainTables()).plan(situation(seed=s, memory=0.4)).work)  # type: ignore[union-attr]
        for s in range(20)
    }
    assert spans == {"0:1", "1:2", "2:3"}


def test_it_has_its_own_options_only() -> None:
    with pytest.raises(TypeError, match="head"):
        STRATEGIES["cocofl+"](PlainTables(), head=False)
    with pytest.raises(InvalidExperiment, match="lr_power"):
        STRATEGIES["cocofl+"](PlainTables(), lr_power=9.0)
