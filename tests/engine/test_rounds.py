"""What the round loop makes of unusual numbers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cocofl.config import Experiment
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import RunFolderProblem
from cocofl.experiment import Setup, simulate
from cocofl.runlog import RunFolder, read_state

TINY = {
    "rounds": 1,
    "model": {"name": f"{__name__}:vectors"},
    "devices": {"count": 6, "per_round": 2},
    "strategy": {"name": "fedavg-full"},
    "tables": {"spans": "analytic", "widths": "analytic"},
}


def vectors(num_classes: int) -> tuple[nn.Module, Tensor]:
    layers = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes)
    return nn.Sequential(*layers), torch.rand(4, 1, 8, 8)


@pytest.mark.parametrize("executor", [InProcess, lambda: CohortExecutor("cpu")])
def test_no_test_sample_is_alone_in_its_batch(executor, tmp_path: Path) -> None:
    """A norm has no variance of one value."""
    experiment = Experiment.parse(TINY)
    size = len(Setup(experiment).spec.test)
    experiment = experiment.changed({"evaluation.batch": (size - 1) // 2})
    assert size % experiment.evaluation.batch == 1
    run = simulate(experiment, out=tmp_path, executor=executor())
    assert 0 < run.rounds[-1].other_scores["batch"]["accuracy"] < 1


KILLED = """
import os, signal, sys, threading
from cocofl.config import Experiment
from cocofl.engine.executor import InProcess
from cocofl.experiment import simulate
from cocofl.runlog import RunFolder

write = RunFolder.save_checkpoint

def slowly(folder, rounds_done, state):
    if rounds_done > 2:
        threading.Event().wait()
    write(folder, rounds_done, state)

class Watcher:
    def on_round(self, record):
        if record.round == 5:
            os.kill(os.getpid(), signal.SIGKILL)

RunFolder.save_checkpoint = slowly
experiment = Experiment.load(sys.argv[1])
simulate(experiment, out=sys.argv[2], executor=InProcess(), watchers=[Watcher()])
"""
LONGER = Experiment.parse(TINY).changed({"rounds": 6, "engine.checkpoint_every": 2})


def test_a_run_killed_while_a_checkpoint_is_written_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """The rounds that followed do not wait for it, and are played again."""
    file, cut = tmp_path / "experiment.toml", tmp_path / "cut"
    file.write_text(LONGER.to_toml())
    done = subprocess.run([sys.executable, "-c", KILLED, str(file), str(cut)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(RunFolder(cut).rounds()) == 5
    assert read_state(cut / "checkpoint.safetensors")[0] == 2
    simulate(LONGER, out=cut, executor=InProcess(), resume=True)
    simulate(LONGER, out=tmp_path / "whole", executor=InProcess())
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunFolderProblem("the disk is full")

    monkeypatch.setattr(RunFolder, "save_checkpoint", fail)
    with pytest.raises(RunFolderProblem, match="the disk is full"):
        simulate(LONGER, out=tmp_path / "run", executor=InProcess())
    assert len(RunFolder(tmp_path / "run").rounds()) in (3, 4)
