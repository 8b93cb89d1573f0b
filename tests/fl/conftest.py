from __future__ import annotations

import numpy as np
import pytest

from cocofl import data
from cocofl.fl.local import Materials, Task, Work, Workshop
from cocofl.fl.state import ServerState
from cocofl.fl.training import Training
from cocofl.freeze import chain_state
from cocofl.profiling.subject import Subject


@pytest.fixture(scope="session")
def digits() -> data.DataSet:
    return data.load("digits")


@pytest.fixture
def workshop(digits: data.DataSet) -> Workshop:
    return make_workshop(digits)


def make_workshop(digits: data.DataSet, weight_decay: float = 0.0, **training: object) -> Workshop:
    subject = Subject("resnet10-digits", 16, 10, (("tiny", True),))
    settings = Training(batch=16, weight_decay=weight_decay, **training)  # type: ignore[arg-type]
    return Workshop(Materials(subject, settings, digits.train, digits.test, "reference"))


def initial(workshop: Workshop) -> ServerState:
    return workshop.server_state(chain_state(workshop.chain()))


def task(work: Work, *, device: int = 3, samples: int = 40, lr: float = 0.1) -> Task:
    indices = np.arange(device * 50, device * 50 + samples)
    return Task(seed=5, round_index=2, device=device, indices=indices, work=work, lr=lr)
