"""What the guides "Add …" show works, each example in its one file, on both engines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.public_api import MODULES

from cocofl import Experiment, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from tests.extensions import extensions, write_extensions

TINY: dict[str, Any] = {
    "rounds": 2,
    "model.name": "resnet10-digits",
    "model.options": {"tiny": True},
    "devices.count": 6,
    "devices.per_round": 3,
    "training.batch": 16,
    "evaluation.every": 2,
    "tables.spans": "analytic",
    "tables.widths": "analytic",
    "engine.kernels": "reference",
}
NAMED: dict[str, dict[str, Any]] = {
    "selector": {"strategy.selector": "nearest_input:nearest_input"},
    "trace": {
        "devices.groups": [{"name": "phones", "trace": "night_shift:phones"}],
        "data.split": "iid",
        "strategy.variant": "ff",
    },
    "model and data": {
        "model.name": "two_layers:two_layers",
        "model.options": {},
        "data.name": "bright_spots:bright_spots",
        "strategy.name": "heterofl",
    },
    "rule of merging": {
        "merge.rules": ["norm-clip", "no_peaks:no_peaks"],
        "strategy.name": "fedavg-full",
    },
    "optimizer": {
        "training.optimizer": "sign_descent:SignDescent",
        "training.lr": 0.001,
        "strategy.name": "fedavg-full",
    },
}


@pytest.mark.parametrize("what", NAMED)
def test_an_extension_is_named_and_runs(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_extensions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = Experiment().changed(TINY | NAMED[what])
    serial = simulate(experiment, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(
        experiment, out=tmp_path / "cohort", executor=CohortExecutor("cpu", precision="fp32")
    )
    asked = [record.devices for record in serial.rounds]
    assert asked == [record.devices for record in cohort.rounds]
    assert serial.final.count("merged") > 0
    for key, tensor in serial.state.items():
        torch.testing.assert_close(tensor, cohort.state[key], atol=0.05, rtol=0.05)
    if what == "trace":
        assert all((one[0] + r.round - 1) % 2 == 0 for r in serial.rounds for one in r.devices)


def test_every_example_can_be_imported(tmp_path: Path) -> None:
    write_extensions(tmp_path)
    modules = [name.removesuffix(".py") for name in extensions()]
    assert len(modules) == 13
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(modules)}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_examples_import_what_is_public() -> None:
    for name, text in extensions().items():
        used = set(re.findall(r"^(?:from|import) (cocofl[\w.]*)", text, re.M))
        assert used <= set(MODULES), f"{name} uses what may change without notice"
