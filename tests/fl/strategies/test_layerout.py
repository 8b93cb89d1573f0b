"""LayerOut: blocks frozen at random per mini-batch, as plain PyTorch does it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from cocofl import data
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.layerout import SHARES, LayerOutWork
from cocofl.profiling.block_costs import BlockCosts
from cocofl.span import Span
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation


def test_a_device_trains_the_largest_share_whose_expected_time_it_has() -> None:
    strategy = STRATEGIES["layerout"](PlainTables())
    costs = BlockCosts(PlainTables().spans("f"))
    for time in (0.6, 0.7, 0.8, 1.0):
        plan = strategy.plan(situation(time=time))
        assert plan is not None
        assert isinstance(plan.work, LayerOutWork)
        share = plan.work.share
        assert costs.expected_time(share) <= time * (1 + 1e-6)
        assert share == 1.0 or costs.expected_time(SHARES[SHARES.index(share) + 1]) > time
        assert plan.time == pytest.approx(costs.expected_time(share) / time)
    assert plan.work.share == 1.0


@pytest.mark.parametrize("budget", [{"time": 0.45}, {"memory": 0.9}, {"upload": 0.9}])
def test_it_saves_time_and_nothing_else(budget: dict[str, float]) -> None:
    """The cheapest mini-batch, of the last block alone, takes 5 of 11."""
    assert STRATEGIES["layerout"](PlainTables()).plan(situation(**budget)) is None


def test_steps_are_those_of_plain_training_with_some_gradients_left_out(
    digits: data.DataSet,
) -> None:
    trainer = make_workshop(digits, weight_decay=0.01, momentum=0.5)
    work = LayerOutWork(Span(0, len(trainer.chain())), 0.4)
    one = task(work, samples=64)
    sent = trainer.train(one, initial(trainer)).tensors

    model = copy.deepcopy(trainer.model()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=one.lr, weight_decay=0.01, momentum=0.5)
    own = [set(block.state_dict()) for block in trainer.chain().blocks]
    partly = 0
    for (inputs, labels), learns in zip(trainer.load(one), work.drawn(one), strict=False):
        before = {key: t.clone() for key, t in model.state_dict().items()}
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        frozen = {k for keys, on in zip(own, learns, strict=True) if not on for k in keys}
        partly += bool(frozen)
        for key, parameter in model.named_parameters():
            if key in frozen:
                parameter.grad = None
        optimizer.step()
        for key, tensor in model.state_dict().items():
            if key in frozen:
                tensor.copy_(before[key])
    assert partly > 1
    for key, value in sent.items():
        torch.testing.assert_close(value, model.state_dict()[key], atol=1e-5, rtol=1e-4)
