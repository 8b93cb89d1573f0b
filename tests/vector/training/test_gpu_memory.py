"""How many devices fit a GPU; what needs one is in tests/vector/test_cuda.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocofl import split
from cocofl.models import MODELS
from cocofl.vector.training.gpu_memory import ample_bytes, evenly

MEASURED = json.loads(Path("bench/results/cohort.json").read_text())


@pytest.mark.parametrize("name", MEASURED["models"])
def test_no_device_took_more_than_what_is_counted_without_trying(name: str) -> None:
    model = MODELS[name](2 if name == "transformer" else 10)
    chain = split(model, model.example_input(MEASURED["batch"]))
    peaks = [row["peak_gb"] for row in MEASURED["models"][name]["cohort"]]
    assert ample_bytes(chain) > 1.2 * 1e9 * max(peaks) / MEASURED["devices"]


def test_more_samples_take_more() -> None:
    model = MODELS["mobilenet"](10, tiny=True)
    few, many = (ample_bytes(split(model, model.example_input(n))) for n in (4, 32))
    assert few < many < 8 * few


@pytest.mark.parametrize("fitting", [1, 2, 7, 29])
def test_goes_are_as_few_as_can_be_and_alike(fitting: int) -> None:
    for wanted in range(fitting, 30):
        at_once = evenly(wanted, fitting)
        goes = -(-wanted // at_once)
        assert at_once <= fitting
        assert goes == -(-wanted // fitting)
        assert goes * at_once - wanted < goes
