"""Full measurement: fresh processes, anchors, interruption and continuation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cocofl import ProfileTable, Span, all_spans
from cocofl.errors import InvalidSetting, ProfilingFailed
from cocofl.profiling import Cost
from cocofl.profiling.measure import Measurement, measure, prepare_apart
from cocofl.profiling.subject import STEPS, WIDTHS, Settings
from cocofl.profiling.sweep import Entry, Progress, drift, sweep

OWN = """
import torch
from torch import nn

def net():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 512), nn.ReLU()), nn.Linear(512, 4))
    return model, torch.randn(8, 64)

def tiny():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), torch.randn(8, 16)
"""
COCOFL = Path(sys.executable).with_name("cocofl")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # a measurement finds modules where its parent does
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return "own:net"


def no_processes(folder: Path, configuration: object) -> Measurement:
    """A measurement that is quick and always the same."""
    blocks = len(configuration) if isinstance(configuration, Span) else 1
    return Measurement(Cost(0.01 * blocks, 1000 * blocks, 100 * blocks, 10 * blocks), 5000 + blocks)


def test_the_papers_fifty_widths_and_the_levels_of_its_baselines() -> None:
    assert len(STEPS) == 50
    assert {0.1, 1.0, 0.125, 0.2, 0.4, 0.6, 0.8, 0.8125} <= set(WIDTHS)


def test_drift_is_what_the_anchors_around_say() -> None:
    def entry(anchor: bool, step_s: float) -> Entry:
        return Entry(Span(0, 1), anchor, Cost(step_s, 1, 1, 1), None)

    entries = [entry(True, 1.0), entry(False, 5), entry(True, 2.0), entry(False, 5), entry(True, 2)]
    assert drift(entries) == pytest.approx([0.5, 0.75, 1.0, 1.0, 1.0])
    assert drift([entry(False, 5)]) == [1.0]


@pytest.mark.slow
def test_a_tiny_network_takes_its_tensors_though_no_page_is_new(own: str, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    prepare_apart(folder, Settings(own.replace("net", "tiny"), backend="reference", batch=8))
    for span in (Span(0, 2), Span(0, 3)):
        cost, _ = measure(folder, span)
        assert cost.rss_bytes is not None
        assert cost.rss_bytes >= cost.tensor_bytes > 1000


@pytest.mark.slow
def test_one_configuration_in_a_fresh_process(own: str, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    prepare_apart(folder, Settings(own, backend="reference", batch=8))
    cost, process_bytes = measure(folder, Span(1, 2))
    assert cost.step_s > 0
    assert cost.upload_bytes >= 4 * (512 * 4 + 4)
    assert cost.tensor_bytes > 4 * 2 * (512 * 4 + 4)
    # The same bytes in another process: nothing in them is chance.
    again = measure(folder, Span(1, 2))
    assert again.cost.tensor_bytes == cost.tensor_bytes
    # Resident memory is what training adds, not what importing PyTorch does.
    assert process_bytes is not None
    assert cost.rss_bytes is not None
    assert again.cost.rss_bytes is not None
    assert process_bytes > 100e6
    assert cost.rss_bytes < 3e6
    assert abs(again.cost.rss_bytes - cost.rss_bytes) < 1e6


@pytest.mark.slow
def test_a_configuration_that_cannot_be_measured_says_why(own: str, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    with pytest.raises(ProfilingFailed, match="unknown model 'nonesuch'"):
        prepare_apart(folder, Settings("nonesuch"))
    prepare_apart(folder, Settings(own, backend="reference", batch=8))
    with pytest.raises(ProfilingFailed, match="reaches past the last block"):
        measure(folder, Span(0, 9))


def test_a_sweep_continues_where_it_stopped(own: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "table.json", Settings(own, backend="reference", batch=8)
    measured: list[object] = []

    def noting(folder: Path, configuration: object) -> Measurement:
        measured.append(configuration)
        return no_processes(folder, configuration)

    first = sweep(settings, out, n_blocks=4, measure_one=noting)
    shown = [next(first) for _ in range(4)]
    first.close()  # as Ctrl-C would
    assert shown[-1].done == 3
    assert not out.exists()
    journal = tmp_path / "table.json.partial" / "journal.jsonl"
    with journal.open("a") as file:
        file.write('["0:1", false, 0.0')  # killed in the middle of a line
    rest = list(sweep(settings, out, n_blocks=4, measure_one=noting))
    assert rest[0] == pytest.approx(Progress(3, 10, float("nan")), nan_ok=True)
    assert rest[-1].done == 10
    spans = [item for item in measured if item != Span(0, 4)]
    assert sorted(spans) == [span for span in all_spans(4) if span != Span(0, 4)]
    assert not journal.exists()
    table = ProfileTable.load(out)
    assert table.memory_kind == "rss"
    assert 5001 <= table.process_bytes <= 5004
    assert table.row(Span(1, 3)) == pytest.approx((0.5, 0.5, 0.5))


def test_memory_of_full_training_is_the_median_of_its_anchors(own: str, tmp_path: Path) -> None:
    full = iter([900, 1000, 1400])

    def measured(_folder: Path, configuration: object) -> Measurement:
        return Measurement(Cost(0.1, next(full) if configuration == Span(0, 2) else 500, 1, 1), 7)

    out = tmp_path / "table.json"
    settings = Settings(own, variant="f", backend="reference", batch=8)
    list(sweep(settings, out, n_blocks=2, measure_one=measured))
    assert ProfileTable.load(out).row(Span(0, 1))[1] == 0.5


def test_a_sweep_refuses_to_mix_settings(own: str, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    settings = Settings(own, backend="reference", batch=8)
    started = sweep(settings, out, n_blocks=2, measure_one=no_processes)
    next(started)
    next(started)
    started.close()
    other = Settings(own, backend="reference", batch=16)
    with pytest.raises(InvalidSetting, match="batch 8, not 16"):
        next(sweep(other, out, n_blocks=2, measure_one=no_processes))


@pytest.mark.slow  # and it needs a machine that is not so busy that the signal comes too late
def test_ctrl_c_keeps_what_was_measured_and_the_command_continues(own: str, tmp_path: Path) -> None:
    command = [str(COCOFL), "profile", own, "--variant", "f", "--batch", "8", "--threads", "1",
               "--out", "table.json"]  # fmt: skip
    journal = tmp_path / "table.json.partial" / "journal.jsonl"

    def lines() -> list[str]:
        return journal.read_text().splitlines() if journal.exists() else []

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as child:
        while child.poll() is None and len(lines()) < 3:  # settings, an anchor, a span
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate()
    assert child.returncode == 130, said
    assert "1 of 3 kept" in said or "2 of 3 kept" in said
    kept = [json.loads(line) for line in lines()[1:] if not json.loads(line)[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = ProfileTable.load(tmp_path / "table.json", n_blocks=2)
    peaks = {str(span): cost.rss_bytes for span, cost in zip(table.spans, table.costs, strict=True)}
    assert kept
    for key, _anchor, (_step_s, rss_bytes, *_), _process_bytes in kept:
        # Of full training it is the median of all its measurements.
        assert key == "0:2" or peaks[key] == rss_bytes
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "table.json exists" in again.stderr
