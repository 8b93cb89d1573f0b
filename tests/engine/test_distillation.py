"""FjORD's distillation in a cohort is what each device does alone: in float64, over two rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.data import Facts, Samples, load
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import Executor, InProcess
from cocofl.fl.merge import Mean
from cocofl.fl.state import Contribution, Tensors
from cocofl.fl.trainer import Task, Trainer, TrainerSpec
from cocofl.fl.training import Training
from cocofl.fl.widths import OrderedWork, WidthWork
from cocofl.freeze import KernelPlan, chain_state
from cocofl.models import MODELS
from cocofl.profiling.subject import Subject
from tests.engine.collecting import collected

BATCH = 8
# What each device does, and with how many samples: last mini-batches have 8, 5, 3, 8, 2 and 5.
DEVICES = [
    (OrderedWork((0.25, 0.5, 1.0), 0.3), 40),
    (OrderedWork((0.25, 0.5), 1.0), 37),
    (OrderedWork((0.5,), 0.3), 19),  # nothing narrower to teach
    (OrderedWork((0.25, 0.5, 1.0)), 40),
    (WidthWork(0.5), 26),
    (OrderedWork((0.25, 1.0), 1.0), 5),  # one mini-batch: at 0.25 in the first round
]
SEED = 6


class ToFloat64(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def cnn(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    """With a BatchNorm after every convolution."""
    network = MODELS["resnet10-digits"](num_classes, width=width, tiny=True).double()
    return nn.Sequential(ToFloat64(), network), torch.rand(4, 1, 8, 8)


def averaging_cnn(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Its statistics are plain means over mini-batches: of those at a width, for each width."""
    network, example = cnn(num_classes, width)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    return network, example


def transformer(num_classes: int, width: float = 1.0) -> nn.Module:
    network = MODELS["transformer"](num_classes, width=width, tiny=True).double()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def distance_from_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss of one's own."""
    return (outputs - F.one_hot(labels, outputs.shape[-1])).square().mean()


def texts() -> Samples:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 256, (200, 24))
    tokens[::3, 17:] = 0  # some are shorter
    facts = Facts("text", tuple("abcdefghij"), vocab_size=256, pad_id=0)
    return Samples(Path(), facts, tokens, rng.integers(0, 10, 200), None, b"")


NETWORKS = {"cnn": cnn, "averaging-cnn": averaging_cnn, "transformer": transformer}


def spec(network: str, loss: str) -> TrainerSpec:
    data = texts() if network == "transformer" else load("digits").train
    training = Training(batch=BATCH, momentum=0.5, weight_decay=0.01, clip=1.0, loss=loss)
    return TrainerSpec(
        Subject(f"{network} in float64", BATCH, 10), training, data, data, "reference"
    )


def tasks(round_index: int) -> list[Task]:
    rng = np.random.default_rng(round_index)
    return [
        Task(SEED, round_index, device, rng.choice(200, samples, replace=False), work, 0.05)
        for device, (work, samples) in enumerate(DEVICES)
    ]


def play(executor: Executor, made_of: TrainerSpec) -> tuple[list[list[Contribution]], Tensors]:
    """What devices sent in each of two rounds, and the server's state after them."""
    trainer = Trainer(made_of)
    state = chain_state(trainer.chain())
    executor.prepare(trainer, KernelPlan())
    rounds = []
    for index in range(2):
        sent = [
            Contribution(dict(one.tensors), one.samples, one.loss, one.width)
            for one in collected(
                executor, tasks(index), executor.placed(trainer.server_state(state))
            )
        ]
        merged = Mean("senders")(trainer.server_state(state), sent).tensors
        learned = dict(trainer.model().named_parameters())
        # The server has its statistics in float32.
        state = {k: t if k in learned else t.float().double() for k, t in merged.items()}
        rounds.append(sent)
    executor.close()
    return rounds, state


def differences(one: Tensors, other: Tensors) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {key: float((one[key] - other[key]).abs().max()) for key in one}


@pytest.mark.parametrize("loss", ["cross_entropy", f"{__name__}:distance_from_labels"])
@pytest.mark.parametrize("network", NETWORKS)
def test_two_rounds_in_float64(network: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, f"{network} in float64", NETWORKS[network])
    made_of = spec(network, loss)
    expected, state = play(InProcess(), made_of)
    found, other = play(CohortExecutor("cpu", precision="fp32", devices=4), made_of)
    for serial, cohort in zip(expected, found, strict=True):
        for one, same in zip(serial, cohort, strict=True):
            assert max(differences(one.tensors, same.tensors).values()) < 1e-9
            assert same.loss == pytest.approx(one.loss, abs=1e-9)
            assert same.nbytes == one.nbytes
    assert max(differences(state, other).values()) < 1e-6
