from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocofl import Blocks, InvalidSpan, Role, Span, all_spans


@given(st.integers(1, 30))
def test_all_spans_are_every_contiguous_range_once(n: int) -> None:
    spans = list(all_spans(n))
    assert len(spans) == len(set(spans)) == n * (n + 1) // 2
    assert all(0 <= span.start < span.stop <= n for span in spans)


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 45))
def test_roles_follow_the_chain(start: int, length: int, block: int) -> None:
    span = Span(start, start + length)
    expected = Role.FROZEN if block < start else Role.TRAINED if block in span else Role.PASSING
    assert span.role(block) is expected


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (3, 1), (-1, 2)])
def test_empty_reversed_and_negative_spans_are_refused(start: int, stop: int) -> None:
    with pytest.raises(InvalidSpan, match="trains no block"):
        Span(start, stop)


def test_span_past_the_chain_names_the_largest_span() -> None:
    with pytest.raises(InvalidSpan, match="the largest span is 0:3"):
        Span(1, 4).check_fits(3)


@pytest.mark.parametrize("text", ["", "3", "a:b", "1:2:3", "-1:2", "4:2"])
def test_unreadable_spans_are_refused(text: str) -> None:
    with pytest.raises(InvalidSpan):
        Span.parse(text)


def test_span_text_reads_back() -> None:
    assert Span.parse(str(Span(3, 7))) == Span(3, 7)


SETS = st.sets(st.integers(0, 12), min_size=1)


def blocks_of(members: set[int]) -> Blocks:
    return Blocks.parse("+".join(f"{block}:{block + 1}" for block in members))


@given(SETS, st.integers(13, 20))
def test_regions_are_the_roles_in_runs(members: set[int], n_blocks: int) -> None:
    blocks = blocks_of(members)
    assert list(blocks) == sorted(members)
    flat = [(block, region.role) for region in blocks.regions(n_blocks) for block in region.blocks]
    assert flat == list(enumerate(blocks.roles(n_blocks)))
    for block, role in flat:
        passes = block > min(members)
        frozen = Role.PASSING if passes else Role.FROZEN
        assert role is (Role.TRAINED if block in members else frozen)


@given(SETS, SETS)
def test_blocks_behave_as_the_sets_that_they_are(one: set[int], other: set[int]) -> None:
    assert blocks_of(one) | blocks_of(other) == blocks_of(one | other)
    assert (blocks_of(one) == blocks_of(other)) is (one == other)
    assert blocks_of(one).parse(str(blocks_of(one))) == blocks_of(one)


def test_blocks_without_a_gap_are_a_span() -> None:
    assert isinstance(Span(0, 2) | Span(2, 4), Span)
    assert not isinstance(Span(0, 2) | Span(3, 4), Span)


def test_a_huge_span_costs_nothing() -> None:
    assert len(Blocks.parse("0:999999999999999999")) == 999999999999999999
