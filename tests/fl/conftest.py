from __future__ import annotations

import numpy as np
import pytest

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


def initial(trainer: Trainer) -> ServerState:
    return trainer.server_state(chain_state(trainer.chain()))


def task(work: Work, *, device: int = 3, samples: int = 40, lr: float = 0.1) -> Task:
    indices = np.arange(device * 50, device * 50 + samples)
    return Task(seed=5, round_index=2, device=device, indices=indices, work=work, lr=lr)
