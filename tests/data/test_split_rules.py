"""Splits by name, on a real data set."""

from __future__ import annotations

import pytest

from cocofl import data
from cocofl.errors import InvalidPartition

GROUPS = [0, 1, 2] * 4


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COCOFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return data.load("digits").train


@pytest.mark.parametrize("name", ["iid", "dirichlet", "rc"])
def test_the_papers_splits_give_equal_shares(digits, name):
    split = data.divide(digits, 12, 0, data.Rule(name), GROUPS)
    assert split.sizes.tolist() == [1438 // 12] * 12
    assert len(split.remainder) == 1438 % 12
    drawn = data.divide(digits, 12, 0, data.Rule(name, equal=False), GROUPS)
    assert drawn.sizes.sum() == 1438


@pytest.mark.parametrize("name", ["by_play", "natural"])
def test_natural_splits_need_owners(digits, name):
    with pytest.raises(InvalidPartition, match="who owns each sample"):
        data.divide(digits, 12, 0, data.Rule(name), GROUPS)


def test_an_unknown_split(digits):
    with pytest.raises(InvalidPartition, match="did you mean dirichlet"):
        data.divide(digits, 12, 0, data.Rule("dirchlet"), GROUPS)
