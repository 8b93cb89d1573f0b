"""Flower's simulation gives the serial engine's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COCOFL = Path(sys.executable).with_name("cocofl")
SETTINGS = [
    "rounds=3",
    "model.options={tiny=true}",
    "devices.count=12",
    "devices.per_round=4",
    "training.batch=16",
    "evaluation.every=2",
    "engine.checkpoint_every=1",
    "engine.workers=2",
]


def play(folder: Path, engine: str, *settings: str) -> tuple[Path, dict[str, Any]]:
    out = folder / engine
    sets = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    done = subprocess.run(
        [COCOFL, "run", "--engine", engine, "--json", "--out", out, *sets],
        cwd=folder,
        env={**os.environ, "COCOFL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # Ray that cannot start waits forever
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout[done.stdout.index("{") :])


def assert_same_bits(folder: Path, *settings: str) -> None:
    theirs, _ = play(folder, "flower", *settings)
    ours, summary = play(folder, "serial", *settings)
    assert summary["merged"] > 0
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (theirs / name).read_bytes() == (ours / name).read_bytes(), name


def test_flower_and_serial_end_with_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, "engine.kernels=reference")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("strategy.name=cocofl", "engine.kernels=auto"),
        ("strategy.name=heterofl", "strategy.masked=true"),
        ("strategy.name=fjord",),
        ("strategy.name=centralized", "rounds=10"),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_so_do_other_strategies_and_fast_kernels(tmp_path: Path, settings: tuple[str, ...]) -> None:
    assert_same_bits(tmp_path, *settings)
