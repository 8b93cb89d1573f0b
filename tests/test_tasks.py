"""Networks that predict numbers, or a token for each position, rather than a class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Experiment, simulate
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import CocoflError, InvalidData
from cocofl.experiment import evaluate_run

TOKENS = 6


def brightness(_folder: Path | None) -> dict[str, Any]:
    """Images, and how bright each of their halves is."""
    images = np.random.default_rng(0).integers(0, 256, (160, 4, 4, 1), np.uint8)
    images //= np.arange(1, 161, dtype=np.uint8)[:, None, None, None] % 8 + 1
    halves = images.reshape(160, 2, 8).mean(2) / 255.0
    return {"train": (images[:120], halves[:120]), "test": (images[120:], halves[120:])}


def two_numbers(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, num_classes))
    return net, torch.zeros(2, 1, 4, 4)


def successors(_folder: Path | None) -> dict[str, Any]:
    """Of each token the one that follows in the alphabet."""
    texts = np.random.default_rng(0).integers(0, TOKENS, (160, 5))
    following = (texts + 1) % TOKENS
    return {"train": (texts[:120], following[:120]), "test": (texts[120:], following[120:])}


def reader(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Embedding(TOKENS, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, num_classes))
    return nn.Sequential(*layers), torch.zeros(2, 5, dtype=torch.long)


def experiment(data: str, model: str, changes: dict[str, Any]) -> Experiment:
    return Experiment.parse(
        {
            "rounds": 12,
            "model": {"name": f"{__name__}:{model}"},
            "data": {"name": f"{__name__}:{data}", "split": "iid"},
            "devices": {"count": 4, "per_round": 4},
            "training": {"lr": 0.5, "batch": 10},
            "evaluation": {"every": 4},
            "tables": {"spans": "analytic"},
        }
    ).changed(changes)


NUMBERS = {
    "training.loss": "squared_error",
    "training.epochs": 5,
    "evaluation.metrics": ["squared_error"],
}
CONSTANT_GUESS = 0.017
"""The squared error of who always says the mean brightness."""
TEXTS = {"evaluation.metrics": ["token_accuracy", "accuracy", "loss"]}


@pytest.mark.parametrize(
    ("data", "model", "settings", "metric", "is_learned"),
    [
        (
            "brightness",
            "two_numbers",
            NUMBERS,
            "squared_error",
            lambda found: found < CONSTANT_GUESS / 4,
        ),
        ("successors", "reader", TEXTS, "token_accuracy", lambda found: found > 0.9),
    ],
)
def test_a_task_without_classes_is_learned_alike_by_both_engines(
    data: str,
    model: str,
    settings: dict[str, Any],
    metric: str,
    is_learned: Callable[[float], bool],
    tmp_path: Path,
) -> None:
    own = experiment(data, model, settings)
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(
        own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", precision="fp32")
    )
    score = serial.final.scores[metric]
    assert is_learned(score)
    assert cohort.final.scores[metric] == pytest.approx(score, rel=0.02)
    assert evaluate_run(serial.path, executor=InProcess())[metric] == pytest.approx(score)


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (
            "brightness",
            {**NUMBERS, "training.loss": "cross_entropy"},
            "expected loss = .squared_error",
        ),
        (
            "brightness",
            {"training.loss": "squared_error"},
            "accuracy, which reads classes or tokens",
        ),
        ("brightness", {**NUMBERS, "data.split": "rc"}, "rc split goes by the class .* numbers"),
        ("successors", {**TEXTS, "data.split": "dirichlet"}, "dirichlet split goes by the class"),
    ],
)
def test_what_needs_classes_says_so(data: str, changes: dict[str, Any], message: str) -> None:
    model = "two_numbers" if data == "brightness" else "reader"
    with pytest.raises(CocoflError, match=message):
        simulate(experiment(data, model, changes))


def endless(folder: Path | None) -> dict[str, Any]:
    made = brightness(folder)
    made["train"][1][7, 0] = np.inf
    return made


def other_in_test(folder: Path | None) -> dict[str, Any]:
    made = brightness(folder)
    return {**made, "test": (made["test"][0], made["test"][1][:, 0])}


@pytest.mark.parametrize(
    ("data", "message"),
    [("endless", "finite numbers"), ("other_in_test", "train and test are not alike")],
)
def test_labels_that_are_no_numbers_are_refused(data: str, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        simulate(experiment(data, "two_numbers", NUMBERS))
