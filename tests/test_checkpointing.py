"""``strategy.checkpoint``: more spans fit where memory is the limit, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cocofl import Budget, Experiment, ProfileTable, Span, feasible, simulate
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidSetting, TableMismatch
from cocofl.experiment.setup import Setup
from cocofl.fl.federation import Situation
from cocofl.profiling import Cost, measure
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.subject import Settings, prepare
from cocofl.span import all_spans

SMALL: dict[str, Any] = {
    "rounds": 1,
    "devices.count": 6,
    "devices.per_round": 3,
    "engine.kind": "serial",
    "engine.kernels": "reference",
}


def table(**changes: Any) -> ProfileTable:
    return analytic_table(Settings("mobilenet", 4, options=(("tiny", True),), **changes))


def test_a_table_with_checkpointing_is_of_plain_training(tmp_path: Path) -> None:
    plain, again = table(), table(checkpoint=True)
    whole = Span(0, plain.n_blocks)
    assert plain.row(whole)[:2] == (1.0, 1.0)
    time, memory, upload = again.row(whole)
    assert 1 < time < 1.35
    assert memory < 0.9
    assert upload == plain.row(whole)[2]
    again.save(tmp_path / "table.json")
    found = ProfileTable.load(tmp_path / "table.json")
    assert found.checkpoint
    assert found.row(whole) == again.row(whole)
    assert "checkpointed" in found.describe()


@pytest.mark.slow  # like that of bfloat16
def test_a_measured_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STEPS", 1)
    settings = Settings("cnn", 4, variant="f", threads=1, checkpoint=True)
    prepare(tmp_path, settings)
    threads = torch.get_num_threads()
    try:
        again, plain = (measure.measure_here(tmp_path, key).cost for key in (Span(0, 3), 1.0))
    finally:
        torch.set_num_threads(threads)
    assert again.tensor_bytes < plain.tensor_bytes


@pytest.mark.parametrize("more", [{"rank": 2}, {"method": "width"}])
def test_what_has_no_such_table(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="checkpointing is for spans"):
        Settings("cnn", checkpoint=True, **more)


def plan(checkpoint: str, budget: Budget, **changes: Any) -> Any:
    setup = Setup(Experiment().changed({"strategy.checkpoint": checkpoint, **changes}))
    return setup.strategy.plan(Situation(0, 0, budget, np.random.default_rng(0)))


def test_auto_computes_again_only_what_does_not_fit_otherwise() -> None:
    spans = Setup(Experiment()).tables
    plain, again = spans.spans("qff"), spans.checkpointed("qff")
    tight = Budget(memory=(plain.row(plain.everything)[1] + again.row(plain.everything)[1]) / 2)
    assert plain.everything not in feasible(plain, tight)
    found = plan("never", tight)
    assert found.work.blocks != plain.everything
    found = plan("auto", tight)
    assert (found.work.blocks, found.work.checkpoint) == (plain.everything, True)
    assert found.time == pytest.approx(again.row(plain.everything)[0])
    found = plan("auto", Budget())
    assert (found.work.blocks, found.work.checkpoint) == (plain.everything, False)
    found = plan("always", Budget())
    assert found.work.checkpoint


def test_auto_takes_the_table_that_was_measured_beside_that_of_spans(tmp_path: Path) -> None:
    n, settings = len(Setup(Experiment()).chain), Settings("tiny", 4)
    cost, full = Cost(1.0, None, 100, 10), {1.0: Cost(2.0, None, 400, 30)}
    costs: dict[Any, Cost] = dict.fromkeys(all_spans(n), cost)
    settings.table(costs, n, source="measured").save(tmp_path / "own.json")
    changes = {"strategy.checkpoint": "auto", "tables.spans": str(tmp_path / "own.json")}
    setup = Setup(Experiment().changed(changes))
    assert "analytic" in setup.tables.checkpointed("qff").name
    again = replace(settings, checkpoint=True)
    again.table(costs | full, n, source="measured").save(tmp_path / "own-checkpoint.json")
    setup = Setup(Experiment().changed(changes))
    assert setup.tables.checkpointed("qff").row(Span(0, n)) == (0.5, 0.25, pytest.approx(1 / 3))
    assert "own-checkpoint.json" in setup.tables.served["qff checkpointed"]


def test_another_table_is_refused(tmp_path: Path) -> None:
    Setup(Experiment()).tables.spans("qff").save(tmp_path / "plain.json")
    with pytest.raises(TableMismatch, match="with trained blocks checkpointed"):
        plan("auto", Budget(), **{"tables.checkpointed": str(tmp_path / "plain.json")})
    Setup(Experiment()).tables.spans("qff").save(tmp_path / "plain-checkpoint.json")
    with pytest.raises(TableMismatch, match="or give that file another name"):
        plan("auto", Budget(), **{"tables.spans": str(tmp_path / "plain.json")})


def test_results_are_the_same_bits(tmp_path: Path) -> None:
    models = []
    for checkpoint in ("always", "never"):
        group = {"name": "all", "share": 1.0, "time": 4.0, "memory": 4.0, "upload": 1.0}
        changes = {**SMALL, "strategy.checkpoint": checkpoint, "devices.groups": [group]}
        run = simulate(
            Experiment().changed(changes), out=tmp_path / checkpoint, executor=InProcess()
        )
        models.append(run.state)
    again, plain = models
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[key], again[key]) for key in plain)
