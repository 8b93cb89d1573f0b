"""What strategies say of themselves, and what devices plan with the budget they have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from cocofl import Budget, ProfileTable
from cocofl.errors import InvalidSetting
from cocofl.fl.federation import Situation
from cocofl.fl.strategies import (
    NEEDS_NOTHING,
    STRATEGIES,
    StrategyFacts,
    declares,
    facts_of,
    recorded_facts,
)
from cocofl.fl.widths import OrderedWork
from cocofl.freeze import FLOAT32
from cocofl.profiling import Cost

WIDTHS = (0.1, 0.15, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class WidthTables:
    """A width takes its share of time, memory and upload."""

    n_blocks: int = 3
    is_text: bool = False
    labels: str = "classes"

    def spans(self, variant: str | None = None, precision: str = FLOAT32) -> ProfileTable:
        raise AssertionError(variant)

    def check_rolls(self) -> None:
        pass

    def widths(self) -> ProfileTable:
        costs = {width: Cost(width, None, round(1000 * width), 100) for width in WIDTHS}
        return ProfileTable.from_costs(
            costs, n_blocks=3, model="toy", method="width", variant="none", source="measured"
        )


@pytest.mark.parametrize(
    ("time", "heterofl", "fjord"),
    [
        (1.0, "1", ("1", (0.2, 0.4, 0.6, 0.8, 1.0))),
        (0.5, "0.4", ("0.4", (0.2, 0.4))),
        # Even FjORD's lowest level is too much: its data would be lost.
        (0.17, "0.15", ("0.15", (0.15,))),
    ],
)
def test_a_device_trains_the_widths_that_fit(
    time: float, heterofl: str, fjord: tuple[str, tuple[float, ...]]
) -> None:
    situation = Situation(0, 0, Budget(time=time), np.random.default_rng(0))
    plans = [STRATEGIES[name](WidthTables()).plan(situation) for name in ("heterofl", "fjord")]
    assert plans[0] is not None
    assert plans[1] is not None
    assert str(plans[0].work) == heterofl
    assert (str(plans[1].work), plans[1].work.widths) == fjord  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("limit", "widths", "time"),
    [
        (math.inf, (0.2, 0.4, 0.6, 0.8, 1.0), 1.4),
        (1.0, (0.2, 0.4, 0.6), 0.8),
        (0.5, (0.2, 0.4), 1.0),
        (0.45, (0.2,), 0.2 / 0.45),
    ],
)
def test_a_teacher_takes_time_in_every_mini_batch(
    limit: float, widths: tuple[float, ...], time: float
) -> None:
    """Of 0.2 and 0.4 the mini-batches take 0.2 + 0.4 and 0.4."""
    situation = Situation(0, 0, Budget(time=limit), np.random.default_rng(0))
    plan = STRATEGIES["fjord"](WidthTables(), distillation=0.5).plan(situation)
    assert plan is not None
    assert plan.work == OrderedWork(widths, 0.5)
    assert plan.time == pytest.approx(time)


def test_a_transformer_has_no_other_widths_than_its_own() -> None:
    situation = Situation(0, 0, Budget(time=0.11), np.random.default_rng(0))
    for name in ("heterofl", "fjord"):
        assert STRATEGIES[name](WidthTables(is_text=True)).plan(situation) is None


def test_a_device_that_nothing_fits_sits_out() -> None:
    situation = Situation(0, 0, Budget(time=0.05), np.random.default_rng(0))
    for name in ("heterofl", "fjord"):
        assert STRATEGIES[name](WidthTables()).plan(situation) is None


def test_every_strategy_says_what_others_need_to_know() -> None:
    facts = [facts_of(name) for name in STRATEGIES]
    assert all(one.label and one.colour for one in facts)
    for what in ("label", "colour", "order"):
        assert len({getattr(one, what) for one in facts}) == len(facts), what
    proposed = [name for name in STRATEGIES if facts_of(name).role == "proposed"]
    assert proposed == ["cocofl", "cocofl+"]
    assert facts_of(NEEDS_NOTHING).tables == ""


@declares(StrategyFacts(role="upper bound", colour="#123456"))
def declared(_tables: object) -> None:
    """A user's strategy."""


def test_a_strategy_of_ones_own_declares_facts_or_has_defaults() -> None:
    assert facts_of(f"{__name__}:declared").is_bound
    assert facts_of(f"{__name__}:WidthTables") == StrategyFacts()


def test_what_a_file_says_of_a_strategy_is_checked_and_never_imported() -> None:
    name = "nowhere.at_all:strategy"
    assert recorded_facts(name, {"colour": "#123456"}).colour == "#123456"
    for wrong in ({"colour": "red;x:y"}, {"role": ["x"]}, {"unheard_of": 1}, "text", None):
        assert recorded_facts(name, wrong) == StrategyFacts()
    with pytest.raises(InvalidSetting, match="role is 'best'; expected 'proposed', 'baseline'"):
        StrategyFacts(role="best")
