"""Groups of runs on several GPUs at once; here the places are the CPU, several times."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cocofl import Experiment
from cocofl.engine.channels import WorkerFailed
from cocofl.engine.rounds import Watcher
from cocofl.errors import RunFolderProblem
from cocofl.experiment import Run, places_of, simulate_batch
from cocofl.experiment.groups import batch_groups
from cocofl.experiment.player import Player
from cocofl.experiment.spreading import memory_share
from cocofl.runlog import RoundRecord, RunFolder

TINY = Experiment().changed(
    {
        "rounds": 2,
        "model.options": {"tiny": True},
        "devices.count": 6,
        "devices.per_round": 2,
        "evaluation.samples": 50,
        "tables.spans": "analytic",
        "engine": {"kind": "cohort", "device": "cpu", "checkpoint_every": 1},
    }
)
TWO = ["cpu", "cpu"]
OTHERS = ("timing.jsonl", "about.json")


def several(folder: Path) -> dict[Path, Experiment]:
    """Runs that do not share a computation, so that each is a group, however many places."""
    return {folder / f"batch{n}": TINY.changed({"training.batch": n}) for n in (8, 16, 32)}


def contents(runs: Sequence[Run]) -> list[tuple[dict[str, bytes], dict[str, Any]]]:
    """All but times, and the commit, which may be another when the processes begin."""
    files = [
        {file.name: file.read_bytes() for file in run.path.iterdir() if file.name not in OTHERS}
        for run in runs
    ]
    abouts = [{k: v for k, v in run.folder.about.items() if k != "commit"} for run in runs]
    return list(zip(files, abouts, strict=True))


class Told(Watcher):
    """Writes down what it is told; stops everything in a round."""

    def __init__(self, stop_in: int = 0) -> None:
        self.rounds: list[int] = []
        self.has_ended = False
        self._stop_in = stop_in

    def on_round(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)
        if record.round == self._stop_in:
            raise KeyboardInterrupt

    def on_end(self) -> None:
        self.has_ended = True


def test_two_places_make_the_folders_of_one_also_after_ctrl_c(tmp_path: Path) -> None:
    expected = simulate_batch(several(tmp_path / "one"))
    spread, told, announced = several(tmp_path / "two"), dict[Path, Told](), list[str]()
    with pytest.raises(KeyboardInterrupt):
        simulate_batch(spread, places=TWO, watchers=[Told(stop_in=1)])
    complete = {path for path in spread if RunFolder(path).is_complete}
    assert len(complete) < 3
    found = simulate_batch(
        spread,
        resume=True,
        places=TWO,
        watch=lambda path, _: [told.setdefault(path, Told())],
        announce=lambda paths, _: announced.extend(path.name for path in paths),
    )
    assert contents(found) == contents(expected)
    assert told.keys() == spread.keys() - complete
    assert all(one.rounds[-1] == 2 and one.has_ended for one in told.values())
    assert set(announced) == {path.name for path in spread}


def fails(scores: Tensor, _labels: Tensor) -> Tensor:
    raise OSError(f"no loss of {len(scores)} samples")


def killed(_scores: Tensor, _labels: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("loss", "said"),
    [("fails", "OSError: no loss of"), ("killed", r"ended with exit code -9")],
)
def test_the_others_are_played_where_one_breaks_down(loss: str, said: str, tmp_path: Path) -> None:
    experiments = several(tmp_path)
    first, *others = experiments
    experiments[first] = experiments[first].changed({"training.loss": f"{__name__}:{loss}"})
    with pytest.raises(WorkerFailed, match=rf"batch8, on cpu: .*{said}"):
        simulate_batch(experiments, places=TWO)
    assert [RunFolder(path).is_complete for path in others] == [True, True]


def test_a_mistake_in_one_run_is_said_of_that_run_when_the_others_are_done(tmp_path: Path) -> None:
    experiments = several(tmp_path)
    *others, last = experiments
    last.mkdir()
    (last / "mine.txt").write_text("here already")
    with pytest.raises(RunFolderProblem, match=r"batch32, on cpu: .* exists already"):
        simulate_batch(experiments, places=TWO)
    assert [RunFolder(path).is_complete for path in others] == [True, True]


@pytest.mark.parametrize(
    ("seeds", "places", "sizes"),
    [(3, 1, [3]), (3, 2, [1, 1, 1]), (6, 2, [3, 3]), (60, 2, [20, 20, 20]), (2, 4, [1, 1])],
)
def test_few_runs_are_dealt_out_so_that_no_place_is_idle(
    seeds: int, places: int, sizes: list[int]
) -> None:
    experiments = {Path(str(seed)): TINY.changed({"seed": seed}) for seed in range(seeds)}
    assert [len(group) for group in batch_groups(experiments, places=places)] == sizes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "cohort"}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"kind": "cohort", "device": "cuda"}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"kind": "cohort", "device": "cuda:1"}, ["cuda:1"]),
        ({"kind": "cohort", "device": "cpu"}, ["cpu"]),
        ({"kind": "serial"}, ["cpu"]),
    ],
)
def test_all_gpus_are_places_unless_one_is_named(
    settings: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert places_of(Experiment().changed({"engine": settings})) == expected


def test_a_limit_on_memory_holds_in_the_processes_of_other_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = dict[str, float]()
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _place: 0.25)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, place: limits.update({place: share}),
    )
    for place in ("cpu", "cuda:1"):
        share = memory_share(place)
        Player(print).begin(place, share, torch.get_num_threads(), sys.path, sys.argv)
    assert limits == {"cuda:1": 0.25}
