"""What is published under ``results/`` can be read and names its origin, but no folder of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocofl.reproduction import results

FILES = sorted((Path(__file__).parents[2] / "results").glob("*.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_says_where_it_comes_from(path: Path) -> None:
    found = results.read(path)
    assert found
    for one in found:
        assert one.hardware
        assert one.torch
        assert one.commit
        assert not one.commit.endswith("+"), "made with a source tree that was changed"
        assert not one.table.startswith("/")
        assert 0 <= one.scores["accuracy"] <= 1
