"""What devices of width strategies plan with the budget they have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cocofl import Budget, ProfileTable
from cocofl.fl.federation import Situation
from cocofl.fl.strategies import STRATEGIES
from cocofl.profiling import Cost

WIDTHS = (0.1, 0.15, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class WidthTables:
    """A width takes its share of time, memory and upload."""

    n_blocks: int = 3
    is_text: bool = False

    def spans(self, variant: str | None = None) -> ProfileTable:
        raise AssertionError(variant)

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


def test_a_transformer_has_no_other_widths_than_its_own() -> None:
    situation = Situation(0, 0, Budget(time=0.11), np.random.default_rng(0))
    for name in ("heterofl", "fjord"):
        assert STRATEGIES[name](WidthTables(is_text=True)).plan(situation) is None


def test_a_device_that_nothing_fits_sits_out() -> None:
    situation = Situation(0, 0, Budget(time=0.05), np.random.default_rng(0))
    for name in ("heterofl", "fjord"):
        assert STRATEGIES[name](WidthTables()).plan(situation) is None
