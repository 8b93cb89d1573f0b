"""FedProx: as many steps as there is time for, near the server, as plain PyTorch does it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from cocofl import data
from cocofl.errors import InvalidExperiment
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.fedprox import Proximal
from cocofl.span import Span
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation


@pytest.mark.parametrize(("time", "steps"), [(1.0, 10), (5.0, 10), (0.5, 5), (0.39, 3), (0.1, 1)])
def test_a_device_takes_the_steps_that_fit_its_time(time: float, steps: int) -> None:
    plan = STRATEGIES["fedprox"](PlainTables()).plan(situation(time=time))
    assert plan is not None
    assert plan.work == SpanWork(Span(0, 3), "f", Proximal(0.1), steps=steps)
    assert plan.time == pytest.approx(steps / 10 / time)
    assert task(plan.work, lr=0.1).steps == steps


@pytest.mark.parametrize("budget", [{"time": 0.09}, {"memory": 0.99}, {"upload": 0.5}])
def test_what_cannot_be_had_in_parts_must_fit(budget: dict[str, float]) -> None:
    assert STRATEGIES["fedprox"](PlainTables()).plan(situation(**budget)) is None


def test_steps_are_those_of_plain_training_with_the_term_in_the_loss(
    digits: data.DataSet,
) -> None:
    trainer = make_workshop(digits, weight_decay=0.01)
    work = SpanWork(Span(0, len(trainer.chain())), "f", Proximal(0.7), steps=2)
    one = task(work, samples=48)
    state = initial(trainer)
    sent = trainer.train(one, state)

    model = copy.deepcopy(trainer.model()).train()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=one.lr, weight_decay=0.01)
    everything = trainer.load(task(SpanWork(work.blocks, "f"), samples=48))
    batches = list(everything)
    assert len(batches) == 3
    for inputs, labels in batches[:2]:
        near = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True))
        loss = F.cross_entropy(model(inputs), labels) + 0.7 / 2 * near
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for key, value in model.named_parameters():
        torch.testing.assert_close(sent.tensors[key], value.detach(), atol=1e-6, rtol=1e-5)


def test_an_option_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match="mu is -1; expected a number at least 0"):
        STRATEGIES["fedprox"](PlainTables(), mu=-1)
