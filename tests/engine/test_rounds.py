"""What the round loop makes of unusual numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cocofl.config import Experiment
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.experiment import Setup, simulate

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
