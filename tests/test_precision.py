"""``strategy.precision``: what training in bfloat16 costs is measured, and charged for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cocofl import Experiment, ProfileTable, Span, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidSetting, InvalidTable, TableMismatch
from cocofl.experiment.setup import Setup
from cocofl.freeze import BFLOAT16, FLOAT32
from cocofl.profiling import Cost, measure
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.subject import Settings, prepare
from cocofl.span import all_spans

FULL = Cost(1.0, None, 1000, 300)


def table(path: Path, **changes: Any) -> str:
    """A table of the network of the default experiment, where everything costs the same share."""
    n_blocks = len(Setup(Experiment()).chain)
    costs = {span: Cost(0.5, None, 400, 100) for span in all_spans(n_blocks)}
    settings = Settings("cnn", **{"precision": BFLOAT16, **changes})
    full = {1.0: FULL} if settings.is_compared else {Span(0, n_blocks): FULL}
    settings.table({**costs, **full}, n_blocks, source="measured").save(path)
    return str(path)


def test_a_table_says_so_and_refers_to_training_in_float32(tmp_path: Path) -> None:
    path = table(tmp_path / "table.json")
    found = ProfileTable.load(path)
    assert found.precision == BFLOAT16
    assert found.row(Span(0, found.n_blocks)) == (0.5, 0.4, pytest.approx(1 / 3))
    assert "trained in bfloat16" in found.describe()
    content = json.loads(Path(path).read_text()) | {"precision": "half"}
    del content["checksum"]
    Path(path).write_text(json.dumps(content))
    with pytest.raises(InvalidTable, match="precision is 'half'"):
        ProfileTable.load(path)


def test_a_measured_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STEPS", 1)
    settings = Settings("cnn", 4, variant="f", threads=1, precision=BFLOAT16)
    prepare(tmp_path, settings)
    threads = torch.get_num_threads()
    try:
        rounded, plain = (measure.measure_here(tmp_path, key).cost for key in (Span(0, 3), 1.0))
    finally:
        torch.set_num_threads(threads)
    assert rounded.tensor_bytes < plain.tensor_bytes


def test_what_has_no_such_table() -> None:
    for more in ({"rank": 2}, {"method": "width"}):
        with pytest.raises(InvalidSetting, match="bfloat16 is for spans"):
            Settings("cnn", precision=BFLOAT16, **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="without --analytic"):
        analytic_table(Settings("cnn", precision=BFLOAT16))


@pytest.mark.parametrize(("of_table", "asked"), [(FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)])
def test_a_table_of_another_precision_is_refused(of_table: str, asked: str, tmp_path: Path) -> None:
    path = table(tmp_path / "table.json", precision=of_table)
    experiment = Experiment().changed({"strategy.precision": asked, "tables.spans": path})
    with pytest.raises(TableMismatch, match=f"training in {of_table} costs"):
        Setup(experiment)


def test_with_adapters_no_table_helps() -> None:
    with pytest.raises(TableMismatch, match="adapters are trained in float32; leave it out"):
        Setup(Experiment().changed({"strategy": {"train": "lora", "precision": BFLOAT16}}))


def test_devices_train_in_it_and_are_charged_for_it(tmp_path: Path) -> None:
    path, models = table(tmp_path / "table.json"), []
    small = {"rounds": 1, "devices.count": 6, "devices.per_round": 3, "engine.kernels": "reference"}
    for changes in ({}, {"strategy.precision": BFLOAT16, "tables.spans": path}):
        group = {"name": "all", "share": 1.0, "time": 0.6, "memory": 4.0, "upload": 1.0}
        experiment = Experiment().changed(
            {**small, "engine.kind": "serial", "devices.groups": [group], **changes}
        )
        run = simulate(experiment, out=tmp_path / str(len(models)), executor=InProcess())
        models.append(run.state)
    exact, rounded = models
    assert all(x.dtype is torch.float32 for x in rounded.values())
    assert not all(torch.equal(exact[key], rounded[key]) for key in exact.keys() & rounded.keys())
    assert BFLOAT16 in json.loads((tmp_path / "1" / "about.json").read_text())["tables"]["qff"]


def test_a_cohort_has_a_precision_of_its_own(tmp_path: Path) -> None:
    path = table(tmp_path / "table.json")
    changes = {"rounds": 1, "strategy.precision": BFLOAT16, "tables.spans": path}
    with pytest.raises(InvalidSetting, match=r"engine\.precision"):
        simulate(
            Experiment().changed(changes), out=tmp_path / "run", executor=CohortExecutor("cpu")
        )
