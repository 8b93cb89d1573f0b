from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cocofl import Experiment, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.engine.workers import Workers
from cocofl.errors import InvalidSetting
from cocofl.fl.metrics import Populations, Tally, metric, scores
from tests.extensions import write_extensions

OUTPUTS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.0, 4.0]])
LABELS = torch.tensor([0, 1, 1, 2])


def found(names: tuple[str, ...], populations: Populations | None = None) -> dict[str, Any]:
    """Over two mini-batches."""
    tally = Tally(names, 3)
    halves = [tally.sums(OUTPUTS[part], LABELS[part]) for part in (slice(0, 1), slice(1, 4))]
    sums = [a.numpy() + b.numpy() for a, b in zip(*halves, strict=True)]
    return scores(tally, sums, populations)


def test_accuracy_has_classes_groups_and_devices() -> None:
    densities = np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    record = found(("accuracy", "f1"), Populations(("weak", "strong"), densities, densities))
    assert record["accuracy"] == 0.75
    assert record["class_accuracy"] == [1.0, 0.5, 1.0]
    assert record["group_accuracy"] == {"weak": 0.5, "strong": 1.0}
    assert record["device_accuracy"]["min"] == 0.5
    # Precision 1/2, 1, 1 and recall 1, 1/2, 1.
    assert record["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3, abs=1e-6)
    assert [*record] == ["accuracy", "f1", "class_accuracy", "group_accuracy", "device_accuracy"]


def test_loss_and_squared_error_are_means_over_samples() -> None:
    loss = torch.nn.functional.cross_entropy(OUTPUTS, LABELS)
    assert found(("loss",)) == {"test_loss": pytest.approx(float(loss), abs=1e-6)}
    one = metric("squared_error")
    sums = one.sums(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 2.0]), 0)
    assert one.value(sums.numpy()) == 2.0


def value_of(name: str, outputs: list[Any], labels: torch.Tensor) -> float:
    """Over two mini-batches."""
    one, given = metric(name), torch.tensor(outputs)
    parts = [one.sums(given[part], labels[part], 0).numpy() for part in (slice(0, 1), slice(1, 4))]
    return one.value(parts[0] + parts[1])


def test_several_labels_are_counted_one_by_one() -> None:
    outputs = [[1.0, -1.0, -1.0], [2.0, 1.0, -1.0], [-1.0, 3.0, -1.0], [-1.0, -1.0, -1.0]]
    labels = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.uint8)
    # The first: right, false, missed, left out; the second always right; the third never there.
    assert value_of("label_accuracy", outputs, labels) == pytest.approx(10 / 12)
    assert value_of("label_f1", outputs, labels) == pytest.approx((0.5 + 1.0) / 2)


def test_errors_of_numbers() -> None:
    outputs, labels = [[1.0], [2.0], [3.0], [2.0]], torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert value_of("rmse", outputs, labels) == 2.0
    assert value_of("mae", outputs, labels) == 1.0
    assert value_of("r2", outputs, labels) == pytest.approx(1 - 16 / 14)
    assert not metric("rmse").facts.higher_is_better
    rows = torch.tensor([[1e6, 1.0], [1e6 + 1, 1.0], [1e6 + 2, 1.0], [1e6 + 3, 1.0]])
    assert value_of("r2", rows.tolist(), rows) == 1.0  # of what never changes nothing is said
    assert np.isnan(value_of("r2", [[1.0]] * 4, torch.ones(4)))


def test_unknown_metrics_are_named() -> None:
    with pytest.raises(InvalidSetting, match=r"unknown metric 'acuracy' .did you mean accuracy"):
        metric("acuracy")


def test_a_metric_of_ones_own_is_the_same_on_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_extensions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = Experiment.parse(
        {
            "rounds": 1,
            "model": {"name": "resnet10-digits", "options": {"tiny": True}},
            "devices": {"count": 6, "per_round": 2},
            "strategy": {"name": "fedavg-full"},
            "evaluation": {"every": 1, "metrics": ["top3_metric:top3", "accuracy", "loss"]},
            "tables": {"spans": "analytic"},
        }
    )
    records = []
    for name, executor in (
        ("here", InProcess()),
        ("workers", Workers(2)),
        ("cohort", CohortExecutor("cpu", precision="fp32")),
    ):
        run = simulate(experiment, out=tmp_path / name, executor=executor)
        executor.close()
        records.append(run.rounds[-1])
    here, workers, cohort = records
    assert here == workers, "to the bit, however many processes look at the data"
    assert 0 < here.scores["accuracy"] <= here.scores["top3"] <= 1
    assert cohort.scores["top3"] == pytest.approx(here.scores["top3"], abs=0.05)
    assert cohort.scores["test_loss"] == pytest.approx(here.scores["test_loss"], rel=0.05)
