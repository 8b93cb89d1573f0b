"""Resident memory: what comes on top of a process, and what was there before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cocofl.profiling import resident
from cocofl.profiling.resident import resident_peak, settled_bytes

pytestmark = pytest.mark.skipif(settled_bytes() is None, reason="the peak cannot be set back here")


# Measured in a process of its own, as profiles are: here it would fill the holes that other tests
# left in the heap, and count them.
ADDS_8_MIB_AND_KEEPS_16 = """
import torch
from cocofl.profiling.resident import resident_peak

kept = []

def run():
    if not kept:  # as kernels, threads and imports do: it stays
        kept.append(torch.ones(16 * 2**20, dtype=torch.uint8))
    for _ in range(3):
        torch.ones(8 * 2**20, dtype=torch.uint8)

print(*resident_peak(run))
"""


def test_only_what_a_run_holds_at_once_is_counted() -> None:
    process = [sys.executable, "-c", ADDS_8_MIB_AND_KEEPS_16]
    before, added = subprocess.run(
        process, check=True, capture_output=True, text=True
    ).stdout.split()
    assert int(added) == pytest.approx(8 * 2**20, abs=2**20)
    assert int(before) > 100e6


def test_where_the_peak_cannot_be_set_back_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resident, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    assert settled_bytes() is None
    assert resident_peak(lambda: None) is None
