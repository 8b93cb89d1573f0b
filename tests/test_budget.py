"""Budgets: fractions, seconds and bytes, and what they refuse."""

from __future__ import annotations

import math

import pytest

from cocofl import Budget, InvalidBudget


def test_what_is_not_given_is_unlimited() -> None:
    budget = Budget(time=0.5)
    assert (budget.time, budget.memory, budget.upload_bytes) == (0.5, math.inf, math.inf)
    assert str(Budget()) == "no limit"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("1.5 min", 90), ("250ms", 0.25), ("1h", 3600)]
)
def test_times_with_units(text: str, seconds: float) -> None:
    assert Budget.parse(time=text, samples=10).time_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "count"), [("200MB", 200e6), ("1 GiB", 2**30), ("64kB", 64e3), ("10b", 10)]
)
def test_bytes_with_units(text: str, count: float) -> None:
    assert Budget.parse(memory=text).memory_bytes == pytest.approx(count)


def test_numbers_are_fractions() -> None:
    assert Budget.parse(time="0.33", memory="50%", upload=0.7) == Budget(0.33, 0.5, 0.7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time": -0.1}, "time is -0.1"),
        ({"memory": math.nan}, "memory is nan"),
        ({"time": 0.5, "time_s": 3, "samples": 3}, "give one of them"),
        ({"time_s": 30}, "samples"),
        ({"time_s": 30, "samples": 0}, "at least 1 sample"),
        ({"upload": "much"}, "upload is 'much'"),
    ],
)
def test_refused(arguments, message: str) -> None:
    with pytest.raises(InvalidBudget, match=message):
        Budget(**arguments)


@pytest.mark.parametrize("text", ["fast", "30 apples", "3s4", "--1", "1e", True, [1]])
def test_unreadable_amounts_name_what_is_expected(text) -> None:
    with pytest.raises(InvalidBudget, match="time"):
        Budget.parse(time=text, samples=1)


def test_seconds_are_not_a_unit_of_memory() -> None:
    with pytest.raises(InvalidBudget, match="200MB"):
        Budget.parse(memory="30s")
