"""Selection against its definition: what fits, what is maximal, who picks what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocofl import Budget, ProfileTable, Span, all_spans, feasible, maximal
from cocofl.errors import CocoflError, InvalidSetting, NoFeasibleSpan
from cocofl.fl.select import (
    OVER,
    SELECTORS,
    even_shares,
    feasible_widths,
    nothing_fits,
    select,
)
from cocofl.profiling import Cost
from cocofl.span import Blocks

limits = st.floats(0, 1.2)


def table_of(values: list[tuple[float, int, int]], n_blocks: int) -> ProfileTable:
    costs = {
        span: Cost(time, None, memory, upload)
        for span, (time, memory, upload) in zip(all_spans(n_blocks), values, strict=False)
    }
    return ProfileTable.from_costs(
        costs, n_blocks=n_blocks, model="toy", method="span", variant="qff", source="measured"
    )


@st.composite
def tables(draw) -> ProfileTable:
    n_blocks = draw(st.integers(1, 7))
    n_spans = n_blocks * (n_blocks + 1) // 2
    row = st.tuples(st.floats(0.01, 1), st.integers(1, 1000), st.integers(1, 1000))
    return table_of(draw(st.lists(row, min_size=n_spans, max_size=n_spans)), n_blocks)


def even_table(n_blocks: int = 5) -> ProfileTable:
    values = [(0.1 * len(span), 10 * len(span), len(span)) for span in all_spans(n_blocks)]
    return table_of(values, n_blocks)


@given(tables(), limits, limits, limits)
def test_feasible_is_every_span_within_all_three_limits(table, time, memory, upload) -> None:
    budget = Budget(time=time, memory=memory, upload=upload)
    slack = 1 + 1e-9
    expected = [
        span
        for span in table.spans
        if all(
            need <= limit * slack
            for need, limit in zip(table.row(span), (time, memory, upload), strict=True)
        )
    ]
    assert feasible(table, budget) == expected


@given(tables(), limits, limits, limits)
def test_maximal_spans_of_any_budget_are_those_of_the_definition(
    table, time, memory, upload
) -> None:
    spans = feasible(table, Budget(time=time, memory=memory, upload=upload))
    blocks = {span: set(range(span.start, span.stop)) for span in spans}
    assert maximal(spans) == [
        span for span in spans if not any(blocks[span] < blocks[other] for other in spans)
    ]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=30))
def test_maximal_of_any_list(pairs) -> None:
    ends = [Span(start, start + length) for start, length in pairs]
    spans = ends + [one | other for one, other in zip(ends, ends[::-1], strict=True)]
    kept = maximal(spans)
    assert kept == sorted(set(kept))
    for span in spans:
        assert any(set(span) <= set(other) for other in kept)
    for span in kept:
        assert not any(span != other and set(span) <= set(other) for other in spans)


@given(tables())
def test_a_strong_device_always_may_train_everything(table) -> None:
    assert maximal(feasible(table, Budget(time=1, memory=1, upload=1)))[0] == Span(
        0, table.n_blocks
    )


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("over", OVER)
def test_every_selector_picks_something_feasible(selector: str, over: str) -> None:
    table, budget = even_table(), Budget(time=0.5)
    for round_index in range(8):
        rng = np.random.default_rng(round_index)
        span = select(table, budget, rng, selector=selector, over=over, round_index=round_index)
        assert span in feasible(table, budget)
        assert over == "all" or len(span) == 2


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("over", OVER)
def test_what_can_train_everything_does(selector: str, over: str) -> None:
    rng = np.random.default_rng(0)
    for round_index in range(8):
        span = select(
            even_table(), Budget(), rng, selector=selector, over=over, round_index=round_index
        )
        assert span == Span(0, 5)


def picks(selector: str, over: str) -> list[str]:
    rng = np.random.default_rng(3)
    chosen = (
        select(even_table(), Budget(time=0.5), rng, selector=selector, over=over, round_index=i)
        for i in range(4 if ":" in selector else 6)
    )
    return [str(span) for span in chosen]


def test_what_each_selector_picks() -> None:
    assert picks("max", "all") == picks("max", "maximal") == ["0:2"] * 6
    assert picks("min", "all") == ["0:1"] * 6
    assert picks("min", "maximal") == ["0:2"] * 6
    assert picks("round-robin", "maximal") == ["0:2", "1:3", "2:4", "3:5", "0:2", "1:3"]
    assert picks("round-robin", "all")[:3] == ["0:1", "0:2", "1:2"]


def test_random_reaches_every_maximal_span_about_equally_often() -> None:
    rng = np.random.default_rng(0)
    table, budget = even_table(), Budget(time=0.5)
    drawn = [select(table, budget, rng) for _ in range(4000)]
    counts = [drawn.count(span) for span in maximal(feasible(table, budget))]
    assert len(counts) == 4
    assert min(counts) > 900


def test_nothing_fits_says_what_is_nearest_and_what_it_needs() -> None:
    with pytest.raises(NoFeasibleSpan, match=r"span 0:1, needs of full training time 0\.200"):
        select(even_table(), Budget(time=0.1, upload=0.5), np.random.default_rng(0))
    assert feasible(even_table(), Budget(time=0.1)) == []


def test_a_zero_budget_has_an_error_of_its_own_too() -> None:
    error = nothing_fits(even_table(), Budget(time=0, memory=0, upload=0))
    assert "time 0.200 (there is 0.000)" in str(error)


@pytest.mark.parametrize(
    ("selector", "over", "message"),
    [
        ("rando", "maximal", "did you mean random.*or your own as package"),
        ("random", "some", "over is .some.; expected one of maximal, all"),
        ("nowhere:select", "maximal", "cannot import nowhere:select"),
    ],
)
def test_unknown_selectors_are_refused(selector: str, over: str, message: str) -> None:
    with pytest.raises(CocoflError, match=message):
        select(even_table(), Budget(), np.random.default_rng(0), selector=selector, over=over)


def nearest_to_the_output(
    offered: Sequence[Blocks], _rng: np.random.Generator, round_index: int
) -> Blocks:
    return offered[-1 - round_index]


def something_else(_offered: object, _rng: object, _round: object) -> Blocks:
    return Span(0, 5)


def test_a_selector_of_ones_own_is_a_function() -> None:
    assert picks(f"{__name__}:nearest_to_the_output", "maximal")[:2] == ["3:5", "2:4"]
    with pytest.raises(InvalidSetting, match=r"chose Span\(0, 5\); expected one of the 4"):
        picks(f"{__name__}:something_else", "maximal")


def test_widths_that_fit() -> None:
    costs = {w: Cost(w, None, int(100 * w), int(100 * w * w)) for w in (0.25, 0.5, 0.75, 1.0)}
    table = ProfileTable.from_costs(
        costs, n_blocks=5, model="toy", method="width", variant="", source="measured"
    )
    assert feasible_widths(table, Budget(time=0.8, upload=0.3)) == [0.25, 0.5]
    assert feasible_widths(table, Budget(time=0.1)) == []


# --- blocks in turn ------------------------------------------------------------------------------

UNEVEN = (Span(0, 1), Span(1, 4), Span(2, 6), Span(3, 6))


def coverage_of(shares: Sequence[float]) -> list[float]:
    return [
        sum(share for share, one in zip(shares, UNEVEN, strict=True) if block in one)
        for block in range(6)
    ]


@pytest.mark.parametrize("evenness", [1.0, 4.0])
def test_no_other_shares_train_blocks_more_evenly(evenness: float) -> None:
    def badness(shares: Sequence[float]) -> float:
        found = np.array(coverage_of(shares))
        return float(-np.log(found).sum() if evenness == 1 else (found ** (1 - evenness)).sum())

    best = badness(even_shares(UNEVEN, evenness))
    steps = np.linspace(0.02, 0.98, 25)
    for one in steps:
        for two in steps:
            for three in steps:
                rest = 1 - one - two - three
                if rest >= 0:
                    assert badness([one, two, three, rest]) >= best - 1e-6


def test_the_selector_draws_by_the_shares() -> None:
    rng = np.random.default_rng(0)
    drawn = [SELECTORS["coverage"](UNEVEN, rng, 0) for _ in range(4000)]
    for one, share in zip(UNEVEN, even_shares(UNEVEN, 4.0), strict=True):
        assert drawn.count(one) / 4000 == pytest.approx(share, abs=0.03)
    even, proportional = (min(coverage_of(even_shares(UNEVEN, e))) for e in (4.0, 1.0))
    assert even > 0.3, "the least trained block gets more turns"
    assert proportional < 0.25
