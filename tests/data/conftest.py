"""Tests of data see nothing of this machine's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path, monkeypatch):
    """Every test has its own cache and no data folder."""
    monkeypatch.setenv("COCOFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COCOFL_DATA", raising=False)


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder
