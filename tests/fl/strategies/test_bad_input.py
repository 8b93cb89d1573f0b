"""What a method cannot do is said of every one of them before anything is trained."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from cocofl import Experiment
from cocofl.data import DataSet
from cocofl.errors import CocoflError
from cocofl.experiment import Setup
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.models import MODELS

TINY = Experiment().changed(
    {"model.options": {"tiny": True}, "tables.spans": "analytic", "tables.widths": "analytic"}
)


def stiff(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """It has no width, and two blocks."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
    return nn.Sequential(body, nn.Linear(8, num_classes)), torch.rand(4, 1, 8, 8)


def whole(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """It has one layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)), torch.rand(4, 1, 8, 8)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (stiff, whole):
        monkeypatch.setitem(MODELS, make.__name__, make)


def refused(experiment: Experiment, digits: DataSet, *, because: str) -> None:
    with pytest.raises(CocoflError, match=because) as caught:
        Setup(experiment, digits)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_options_that_it_does_not_have(name: str, digits: DataSet) -> None:
    own = TINY.with_strategy(name, sauce=1)
    refused(own, digits, because=re.escape("unknown key strategy.sauce"))


@pytest.mark.parametrize("name", [n for n in STRATEGIES if facts_of(n).tables == "widths"])
def test_a_network_that_it_cannot_slice(name: str, digits: DataSet) -> None:
    own = TINY.with_strategy(name).changed({"model.name": "stiff", "model.options": {}})
    refused(own, digits, because="stiff takes no width=")


@pytest.mark.parametrize(
    ("name", "model", "because"),
    [
        ("cocofl", "whole", "the model cannot be cut into two blocks"),
        ("depthfl", "stiff", "stages is 4, but the network has 2 blocks"),
        ("inclusivefl", "stiff", "stages is 4, but the network has 2 blocks"),
        ("slt", "stiff", "stiff takes no width="),
    ],
)
def test_a_network_that_it_cannot_cut(name: str, model: str, because: str, digits: DataSet) -> None:
    own = TINY.with_strategy(name).changed({"model.name": model, "model.options": {}})
    refused(own, digits, because=because)


@pytest.mark.parametrize("name", [n for n in STRATEGIES if facts_of(n).uploads != "blocks"])
def test_a_codec_that_it_cannot_use(name: str, digits: DataSet) -> None:
    own = TINY.with_strategy(name).changed({"upload.codec": "topk"})
    refused(own, digits, because="'topk'")
