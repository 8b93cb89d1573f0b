"""The cohort executor gives what the serial one gives: devices, spans, batches, model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.config import Experiment
from cocofl.engine.cohort import CohortExecutor, TrainedAlone
from cocofl.engine.executor import InProcess
from cocofl.experiment import Run, simulate

TINY: dict[str, Any] = {
    # Digits have a constant background: a channel whose variance is all rounding amplifies it, and
    # in float32 the engines drift apart over rounds. tests/vector compares rounds in float64.
    "rounds": 1,
    "model": {"name": "resnet10-digits", "options": {"tiny": True}},
    "devices": {"count": 12, "per_round": 4},
    "training": {"batch": 16},
    "evaluation": {"every": 1},
    "tables": {"spans": "analytic", "widths": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}
STRATEGIES = [
    ("cocofl", {"variant": "f"}, 1e-5),
    ("cocofl", {"variant": "ff"}, 1e-5),
    ("cocofl", {"variant": "qff"}, 2e-2),
    ("fedavg-full", {}, 1e-5),
    ("heterofl", {}, 1e-5),
    ("heterofl", {"scaler": True}, 1e-5),
    ("heterofl", {"masked": True}, 1e-6),  # trained by the serial code
    ("fjord", {}, 1e-5),
    ("fjord", {"distillation": 0.5}, 0.0),  # all of it by the serial code
]


def play(strategy: str, options: dict[str, Any], path: Path, executor: Any) -> Run:
    changes = {f"strategy.{key}": value for key, value in options.items()}
    experiment = Experiment.parse(TINY).changed({"strategy.name": strategy} | changes)
    try:
        return simulate(experiment, out=path, executor=executor)
    finally:
        executor.close()


@pytest.mark.parametrize(("strategy", "options", "tolerance"), STRATEGIES)
def test_a_run_of_either_engine_gives_the_same_model(
    strategy: str, options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    serial = play(strategy, options, tmp_path / "serial", InProcess())
    cohort = play(
        strategy, options, tmp_path / "cohort", CohortExecutor("cpu", precision="fp32", devices=3)
    )  # 4 devices in chunks of 3
    assert [r["devices"] for r in serial.rounds] == [r["devices"] for r in cohort.rounds]
    assert [r["bytes_up"] for r in serial.rounds] == [r["bytes_up"] for r in cohort.rounds]
    assert serial.state.keys() == cohort.state.keys()
    for key, tensor in serial.state.items():
        difference = (tensor.double() - cohort.state[key].double()).abs().max()
        assert float(difference) <= tolerance, key


def random_depth(num_classes: int) -> tuple[nn.Module, Tensor]:
    """A network with randomness of its own."""
    torch.manual_seed(0)

    class RandomDepth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.last = nn.Linear(4 * 64, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.one(x))
            keep = F.dropout(torch.ones_like(x[:, :1, :1, :1]), 0.5, self.training)
            return self.last((x + keep * F.relu(self.two(x))).flatten(1))

    return RandomDepth(), torch.randn(4, 1, 8, 8)


def test_a_network_without_a_stacked_form_trains_device_by_device(tmp_path: Path) -> None:
    model = {"name": f"{__name__}:random_depth"}
    experiment = Experiment.parse(TINY | {"model": model})
    with pytest.warns(TrainedAlone, match="it draws random numbers of its own"):
        cohort = simulate(experiment, out=tmp_path / "c", executor=CohortExecutor("cpu"))
    serial = simulate(experiment, out=tmp_path / "s", executor=InProcess())
    assert serial.state.keys() == cohort.state.keys()
    assert all(torch.equal(tensor, cohort.state[key]) for key, tensor in serial.state.items())
