"""Flower's simulation gives the serial engine's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cocofl.cli.running import read_experiment
from cocofl.engine.executor import InProcess
from cocofl.experiment import simulate

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


def on_flower(folder: Path, settings: list[str]) -> Path:
    """The command line, since Ray is best left to a process of its own."""
    out = folder / "flower"
    sets = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [COCOFL, "run", "--engine", "flower", "--no-report", "--json", "--out", out, *sets],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # Ray that cannot start waits forever
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["merged"] > 0
    return out


def assert_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
    monkeypatch.setenv("COCOFL_CACHE", str(folder / "cache"))
    theirs = on_flower(folder, [*SETTINGS, *settings])
    executor = InProcess()
    try:
        experiment = read_experiment(None, [*SETTINGS, *settings])
        ours = simulate(experiment, out=folder / "serial", executor=executor).path
    finally:
        executor.close()
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (theirs / name).read_bytes() == (ours / name).read_bytes(), name


@pytest.mark.slow  # starting Ray alone takes longer than the rest of a small test
def test_flower_and_serial_end_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_bits(tmp_path, monkeypatch, "engine.kernels=reference")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("strategy.name=cocofl", "engine.kernels=auto"),
        ("strategy.name=heterofl", "strategy.masked=true"),
        ("strategy.name=fjord",),
        ("strategy.name=small",),
        ("strategy.name=apf", "strategy.threshold=0.5", "strategy.ema=0.5"),
        ("strategy.name=depthfl", "strategy.stages=3"),
        ("strategy.name=fedrolex",),
        # More devices begin in its first round than the simulation has nodes.
        ("strategy.name=fedbuff", "strategy.buffer=6", "devices.groups=[{name='all'}]"),
        ("strategy.name=centralized", "rounds=10"),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_so_do_other_strategies_and_fast_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    assert_same_bits(tmp_path, monkeypatch, *settings)
