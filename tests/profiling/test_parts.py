"""Parts of a network, counted, beside networks that are no more than that."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cocofl import Experiment
from cocofl.experiment import Setup
from cocofl.models import MODELS
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.parts import first_blocks_table, narrow_end_tables
from cocofl.profiling.subject import Settings
from cocofl.span import Span

CHANNELS, BLOCKS = 16, 4


def convolutions(sizes: list[int]) -> nn.Sequential:
    """A block per size; the first does not read what it gets from images only."""
    pairs = zip([CHANNELS, *sizes], sizes, strict=False)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairs
        )
    )


def images() -> Tensor:
    return torch.rand(8, CHANNELS, 16, 16)


def whole(num_classes: int = 0, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    model = convolutions([round(CHANNELS * width)] * BLOCKS)
    if width < 1.0:  # nobody narrows what comes in
        model[0][0] = nn.Conv2d(CHANNELS, round(CHANNELS * width), 3, padding=1)
    return model, images()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setitem(MODELS, "whole", whole)
    return Settings("whole", 8, variant="f")


def counted(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> Any:
    """What a network of these blocks costs."""
    monkeypatch.setitem(MODELS, "alone", lambda num_classes: (convolutions(sizes), images()))
    return analytic_table(Settings("alone", 8, variant="f"))


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_first_blocks_cost_what_a_network_of_these_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    table = first_blocks_table(settings, "x64")
    alone = counted(monkeypatch, [CHANNELS] * depth)
    assert table.costs[depth - 1] == alone.costs[alone.configurations.index(alone.everything)]
    assert table.row(Span(0, BLOCKS)) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_narrow_end_costs_what_such_a_network_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    width, span = 0.625, Span(first, BLOCKS)
    table = narrow_end_tables(settings, "x64")[width]
    sizes = [CHANNELS if i <= first else round(CHANNELS * width) for i in range(BLOCKS)]
    mixed = counted(monkeypatch, sizes)
    found = table.costs[table.configurations.index(span)]
    expected = mixed.costs[mixed.configurations.index(span)]
    for amount, real in zip(found, expected, strict=True):
        if real is not None:  # a block behind the border is taken to have norms of all inputs
            assert real <= amount * (1 + 1e-9)
            assert amount <= 1.02 * real


def test_ends_grow_with_their_width_up_to_the_whole_network(settings: Settings) -> None:
    tables, plain = narrow_end_tables(settings, "x64"), analytic_table(settings)
    span = Span(1, BLOCKS)
    rows = [table.row(span) for _, table in sorted(tables.items())]
    for before, after in pairwise(rows):
        assert all(a <= b + 1e-12 for a, b in zip(before, after, strict=True))
    assert rows[-1] == pytest.approx(plain.row(span))


def test_beside_a_measured_table_the_count_says_how_much_less_it_is(tmp_path: Path) -> None:
    """A table that says twice the memory of what is counted, as resident memory may well be."""
    experiment = Experiment().changed({"tables.spans": "analytic"}).with_strategy("depthfl")
    counted = Setup(experiment).tables
    plain = counted.spans("f")
    saved = Settings("resnet10-digits", 32, variant="f").table(
        {
            span: cost._replace(tensor_bytes=2 * cost.tensor_bytes if len(span) == 1 else cost[2])
            for span, cost in zip(plain.spans, plain.costs, strict=True)
        },
        plain.n_blocks,
        source="measured",
    )
    saved.save(tmp_path / "own.json")
    tables = Setup(experiment.changed({"tables.spans": str(tmp_path / "own.json")})).tables
    whole, one = Span(0, plain.n_blocks), Span(0, 1)
    assert tables.first_blocks("f").row(whole) == (1.0, 1.0, 1.0)
    expected = np.array(counted.first_blocks("f").row(one)) * (1, 2, 1)
    np.testing.assert_allclose(tables.first_blocks("f").row(one), expected)
    assert "own.json" in tables.served["f first blocks alone"]
    narrow, last = tables.narrow_ends("f")[0.4], Span(plain.n_blocks - 1, plain.n_blocks)
    np.testing.assert_allclose(narrow.row(last), np.array(plain.row(last)) * (1, 2, 1))
    assert all(a < b for a, b in zip(narrow.row(whole), (1.0, 1.0, 1.0), strict=True))
