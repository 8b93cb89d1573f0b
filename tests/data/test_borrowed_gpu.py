"""What goes to a machine that can fetch nothing, and what comes back from it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from data_files import write_cifar10
from tools import borrowed_gpu

from cocofl.data import load


def test_data_is_found_where_its_files_are_not(root: Path, tmp_path: Path, monkeypatch) -> None:
    write_cifar10(root)
    monkeypatch.setenv("COCOFL_DATA", str(root))
    here = load("cifar10")
    experiment, scratch, sent, home = (
        tmp_path / name for name in ("experiment.toml", "scratch", "sent", "home")
    )
    experiment.write_text('data = {name = "cifar10"}\nmodel = {name = "mobilenet"}\n')
    scratch.mkdir()
    # Several parts, of which none is enough by itself.
    borrowed_gpu.pack(sent, borrowed_gpu.data_archives(scratch, [experiment]), 2**16)
    parts = sorted(sent.iterdir(), key=lambda path: int(path.name))
    assert len(parts) > 1
    for part in parts:
        assert sum(path.stat().st_size for path in part.iterdir()) <= 2**16
        assert not (home / "cache").exists()
        borrowed_gpu.unpack(part, home)
    monkeypatch.setenv("COCOFL_DATA", str(home / "data"))
    monkeypatch.setenv("COCOFL_CACHE", str(home / "cache"))
    there = load("cifar10")
    assert there.train.path.is_relative_to(home)
    assert there.train.facts == here.train.facts
    for ours, theirs in ((here.train, there.train), (here.test, there.test)):
        assert np.array_equal(ours.inputs, theirs.inputs)
        assert np.array_equal(ours.labels, theirs.labels)


def test_what_is_needed_to_go_on_is_saved_before_models(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(borrowed_gpu, "SAVED_BYTES", 3000)
    monkeypatch.setattr(borrowed_gpu, "SAVED_FILES", 2)
    noise, runs = np.random.default_rng(0).bytes(2500), tmp_path / "runs"
    for run, file in (("cut", "checkpoint"), ("ended", "model")):
        (runs / run).mkdir(parents=True)
        (runs / run / "metrics.jsonl").write_text(f"{run}\n")
        (runs / run / f"{file}.safetensors").write_bytes(noise)
    (runs / "ended/model.safetensors").write_bytes(2 * noise)
    borrowed_gpu.save(runs, tmp_path / "out")
    assert capsys.readouterr().out == "left out: ended/model.safetensors\n"
    assert all(path.stat().st_size <= 3000 for path in (tmp_path / "out").iterdir())
    borrowed_gpu.joined(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/cut/checkpoint.safetensors").read_bytes() == noise
    assert (tmp_path / "back/ended/metrics.jsonl").read_text() == "ended\n"


def test_what_is_too_large_to_be_saved_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(borrowed_gpu, "SAVED_BYTES", 1000)
    monkeypatch.setattr(borrowed_gpu, "SAVED_FILES", 1)
    runs = tmp_path / "runs"
    for age, (run, n_bytes) in enumerate({"small": 400, "large": 4000, "later": 400}.items()):
        (runs / run).mkdir(parents=True)
        (runs / run / "model.safetensors").write_bytes(bytes(n_bytes))
        os.utime(runs / run / "model.safetensors", (age, age))  # the newest is saved first
    borrowed_gpu.save(runs, tmp_path / "out")
    assert capsys.readouterr().out == "left out: large/model.safetensors\n"
    borrowed_gpu.joined(tmp_path / "out", tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["later", "small"]
