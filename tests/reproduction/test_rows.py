"""Every row of the paper can be planned: who can train what, by the tables that serve there."""

from __future__ import annotations

import pytest
from bench.who_trains import made_up, shares

from cocofl.reproduction.collection import paper

# Where even the cheapest width is too slow for weak devices (docs/guides/reproduction.md).
SIT_OUT = ("transformer-imdb-iid",)
# One of each pair, for shares are equal in all its splits; whole plays make them unequal.
ROWS = [row for row in paper().rows if row.endswith(("-iid", "-by_play"))]


def by_group(row: str, strategy: str) -> dict[str, tuple[int, int, float | None]]:
    experiment = paper().experiment(row).with_strategy(strategy)
    found, _ = shares(experiment, made_up(experiment.data.name))
    return {one.group: (one.able, one.asked, one.size) for one in found}


def test_a_weaker_group_trains_less() -> None:
    found = by_group("mobilenet-cifar10-rc", "cocofl")
    assert all(able == asked > 0 for able, asked, _ in found.values())
    strong, medium, weak = (size or 0 for _, _, size in found.values())
    assert 20 == strong > medium > weak >= 1


def test_fedavg_asks_the_strong_only() -> None:
    found = by_group("mobilenet-cifar10-iid", "fedavg")
    assert [asked for _, asked, _ in found.values()] == [170, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cocofl", "heterofl", "fjord"])
@pytest.mark.parametrize("row", ROWS)
def test_everybody_has_something_to_train_but_where_it_is_known(row: str, strategy: str) -> None:
    found = by_group(row, strategy)
    for group, (able, asked, _) in found.items():
        sits_out = group == "weak" and strategy != "cocofl" and row in SIT_OUT
        assert able == (0 if sits_out else asked), group
