from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import data
from cocofl.fl.state import ServerState
from cocofl.fl.trainer import Task, Trainer, TrainerSpec, Work
from cocofl.fl.training import Training
from cocofl.freeze import chain_state
from cocofl.profiling.subject import Subject


@pytest.fixture(scope="session")
def digits() -> data.DataSet:
    return data.load("digits")


@pytest.fixture
def trainer(digits: data.DataSet) -> Trainer:
    return make_workshop(digits)


def make_workshop(digits: data.DataSet, weight_decay: float = 0.0, **training: object) -> Trainer:
    subject = Subject("resnet10-digits", 16, 10, (("tiny", True),))
    settings = Training(batch=16, weight_decay=weight_decay, **training)  # type: ignore[arg-type]
    return Trainer(TrainerSpec(subject, settings, digits.train, digits.test, "reference"))


def masked_step(
    model: nn.Module, masks: Mapping[str, Tensor], inputs: Tensor, labels: Tensor, lr: float
) -> None:
    """A step of plain SGD of a network some of whose weights are taken for zero."""
    masked = {key: p * masks[key] for key, p in model.named_parameters()}
    buffers = {key: b.clone() for key, b in model.named_buffers()}
    scores = torch.func.functional_call(model.train(), {**masked, **buffers}, inputs)
    model.zero_grad()
    F.cross_entropy(scores, labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(lr * parameter.grad)


def initial(trainer: Trainer) -> ServerState:
    return trainer.server_state(chain_state(trainer.chain()))


def task(work: Work, *, device: int = 3, samples: int = 40, lr: float = 0.1) -> Task:
    indices = np.arange(device * 50, device * 50 + samples)
    return Task(seed=5, round_index=2, device=device, indices=indices, work=work, lr=lr)
