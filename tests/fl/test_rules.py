"""Each rule by itself, on ballots small enough to count by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.fl.rules import (
    Ballot,
    Merging,
    capped,
    krum,
    median,
    norm_clip,
    norm_fade,
    trimmed_mean,
)


def ballot(*devices: list[float], weights: list[float] | None = None) -> Ballot:
    changes = torch.tensor(devices, dtype=torch.float64)
    counts = torch.tensor(weights or [1.0] * len(devices), dtype=torch.float64)
    return Ballot(changes, counts[:, None].expand_as(changes), usual=1.0)


def test_a_long_change_is_clipped_and_a_short_one_left() -> None:
    clipped = norm_clip(ballot([1.0, -1.0], [30.0, 40.0], [0.1, 0.1]), clip=2.0).changes
    assert clipped[1].tolist() == pytest.approx([30 / 35.3553 * 2, 40 / 35.3553 * 2], rel=1e-5)
    assert clipped[[0, 2]].tolist() == [[1.0, -1.0], [0.1, 0.1]]


def test_only_elements_that_a_device_has_make_its_norm() -> None:
    one = ballot([4.0, 0.0])._replace(weights=torch.tensor([[1.0, 0.0]]).double())
    assert norm_clip(one, clip=1.0).changes.tolist() == [[1.0, 0.0]]


def test_a_change_fades_beyond_the_clip() -> None:
    sent = ballot([2.0], [4.0], [100.0], [0.5])
    assert norm_fade(sent, clip=2.0).changes.flatten().tolist() == [2.0, 1.0, 0.04, 0.5]


def test_trimming_is_by_weight_and_element_by_element() -> None:
    sent = ballot([1.0, 9.0], [2.0, 0.0], [3.0, 1.0], [99.0, 2.0])
    assert trimmed_mean(sent, 0.25).mean.tolist() == [2.5, 1.5]
    # The first has most of the weight: a quarter of all is cut off it, and half is left.
    heavy = ballot([1.0], [2.0], [9.0], weights=[6.0, 1.0, 1.0])
    assert trimmed_mean(heavy, 0.25).mean.tolist() == [1.0]
    assert trimmed_mean(ballot([1.0], [3.0]), 0.25).mean.tolist() == [2.0]


def test_the_median_is_the_middle_or_the_mean_of_two() -> None:
    assert median(ballot([1.0], [50.0], [2.0])).mean.tolist() == [2.0]
    assert median(ballot([1.0], [50.0], [2.0], [4.0])).mean.tolist() == [3.0]
    assert median(ballot([1.0], [2.0], [9.0], weights=[1.0, 1.0, 5.0])).mean.tolist() == [9.0]
    without = ballot([1.0], [7.0], [5.0], weights=[0.0, 1.0, 1.0])
    assert median(without).mean.tolist() == [6.0], "who has no such element does not count"


def test_krum_leaves_out_who_is_far_from_the_others() -> None:
    near = [[1.0, 1.0], [1.1, 1.0], [1.0, 1.1], [0.9, 1.0], [1.0, 0.9], [1.1, 1.1], [0.9, 0.9]]
    chosen = krum(ballot(*near, [-1.0, -1.0], [5.0, -5.0], [-7.0, 0.0]), trim=0.3).weights[:, 0]
    assert chosen.tolist() == [1.0] * 7 + [0.0] * 3
    assert krum(ballot([1.0], [9.0]), trim=0.3).weights.tolist() == [[1.0], [1.0]]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9), st.floats(0, 1))
@example([2], 1.0)
def test_no_weight_is_above_its_share(weights: list[int], share: float) -> None:
    found = capped(weights, share)
    fair = max(share, 1 / len(weights))
    assert max(found) <= fair * sum(found) * (1 + 1e-9)
    assert all(0 < after <= max(1.0, before) for before, after in zip(weights, found, strict=True))
    if max(weights) <= share * sum(weights):
        assert found == weights


@given(st.lists(st.floats(-1, 1), min_size=5, max_size=5), st.floats(-1e12, 1e12))
def test_whatever_one_of_five_sends_the_result_is_between_the_others(
    honest: list[float], hostile: float
) -> None:
    sent = ballot(*([value] for value in honest[:4]), [hostile])
    for rule in (median, lambda one: trimmed_mean(one, 0.2)):
        assert min(honest[:4]) - 1e-9 <= rule(sent).mean.item() <= max(honest[:4]) + 1e-9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rules": ("medain",)}, "unknown rule of merging 'medain' (did you mean median?)"),
        ({"trim": 0.5}, "merge.trim is 0.5; expected a number at least 0 and below 0.5"),
        ({"clip": 0.0}, "merge.clip is 0.0"),
        ({"share": 1.5}, "merge.share is 1.5; expected a number at least 0 and at most 1"),
        ({"bound": 1.0}, "merge.bound is 1.0; expected a number above 1"),
        ({"rules": ("auto", "median")}, "expected ['auto'] alone, or rules by name"),
        ({"rules": ("nowhere:rule",)}, "cannot import nowhere:rule"),
    ],
)
def test_what_cannot_be_is_named(settings: dict, message: str) -> None:
    with pytest.raises(InvalidExperiment) as problem:
        Merging(**settings).made()
    assert message in str(problem.value)


def test_what_is_meant_where_nothing_is_said() -> None:
    assert Merging().made() is None, "the plain mean"
    assert Merging(rules=()).deployed.made() is None, "said so"
    assert Merging().deployed.made() is not None
    assert Merging(rules=(), share=0.5).made() is not None


def halved(sent: Ballot) -> Ballot:
    return sent._replace(changes=sent.changes / 2)


def forgetful(sent: Ballot) -> torch.Tensor:
    return sent.changes


def test_rules_follow_each_other_ones_own_too() -> None:
    rules = Merging(rules=("norm-clip", f"{__name__}:halved", "median")).made()
    assert rules is not None
    assert rules(ballot([0.5], [8.0], [0.25])).tolist() == [0.25]
    wrong = Merging(rules=(f"{__name__}:forgetful",)).made()
    assert wrong is not None
    with pytest.raises(InvalidSetting, match=r"gives Tensor; expected a .*Ballot .* \(1, 1\)"):
        wrong(ballot([0.5]))
