"""Partial variable training: random blocks that fit, and what sets of blocks cost."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cocofl import data
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import STRATEGIES
from cocofl.profiling.block_costs import BlockCosts, blocks_of
from cocofl.span import Blocks
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation

N = 5


def by_hand(blocks: tuple[int, ...]) -> list[float]:
    """What the toy's steps, bytes kept and bytes sent come to, of those of all."""
    size, first = len(blocks), min(blocks)
    return [(2 * N - 1 - first + 2 * size) / (4 * N - 1), size / N, size / N]


def test_any_set_of_blocks_costs_what_its_blocks_add() -> None:
    costs = BlockCosts(PlainTables(n_blocks=N).spans("f"))
    for size in range(1, N + 1):
        for blocks in combinations(range(N), size):
            np.testing.assert_allclose(costs.of(blocks), by_hand(blocks), atol=1e-12)


def test_the_expected_time_is_the_mean_over_all_draws() -> None:
    costs, share = BlockCosts(PlainTables(n_blocks=N).spans("f")), 0.3
    total = weight = 0.0
    for size in range(1, N + 1):
        for blocks in combinations(range(N), size):
            chance = share**size * (1 - share) ** (N - size)
            total, weight = total + chance * by_hand(blocks)[0], weight + chance
    assert costs.expected_time(share) == pytest.approx(total / weight)


@pytest.mark.parametrize("budget", [{"time": 0.7}, {"memory": 0.5}, {"upload": 0.61, "time": 0.8}])
def test_a_device_trains_a_random_set_to_which_nothing_can_be_added(
    budget: dict[str, float],
) -> None:
    strategy = STRATEGIES["pvt"](PlainTables(n_blocks=N))
    drawn = set()
    for seed in range(40):
        plan = strategy.plan(situation(seed=seed, **budget))
        assert plan is not None
        assert isinstance(plan.work, SpanWork)
        chosen = tuple(plan.work.blocks)
        drawn.add(chosen)
        assert within(chosen, budget)
        others = set(range(N)) - set(chosen)
        assert not any(within((*chosen, other), budget) for other in others)
    assert len(drawn) > 3
    assert set().union(*drawn) == set(range(N))


def within(blocks: tuple[int, ...], budget: dict[str, float]) -> bool:
    needs = dict(zip(("time", "memory", "upload"), by_hand(blocks), strict=True))
    return all(needs[what] <= limit * (1 + 1e-6) for what, limit in budget.items())


def test_everything_is_trained_where_it_fits_and_nothing_where_nothing_does() -> None:
    strategy = STRATEGIES["pvt"](PlainTables(n_blocks=N))
    plan = strategy.plan(situation(time=1.0, memory=1.0, upload=1.0))
    assert plan is not None
    assert plan.work == SpanWork(blocks_of(range(N)), "f")
    assert plan.time == pytest.approx(1.0)
    assert strategy.plan(situation(memory=0.1)) is None


def test_steps_are_those_of_plain_training_of_these_parameters(digits: data.DataSet) -> None:
    trainer = make_workshop(digits, weight_decay=0.01)
    blocks = Blocks("1:2+4:6")
    one = task(SpanWork(blocks, "f"))
    sent = trainer.train(one, initial(trainer)).tensors

    chain, chosen = trainer.chain(), list(blocks)
    model = {key: t.clone() for key, t in trainer.model().state_dict().items()}
    learns = [k for b in chosen for k, _ in chain.blocks[b].named_parameters()]
    parameters = {key: model[key].requires_grad_() for key in learns}
    for inputs, labels in trainer.load(one):
        scores = torch.func.functional_call(trainer.model().train(), model, inputs)
        loss = F.cross_entropy(scores, labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for value, gradient in zip(parameters.values(), gradients, strict=True):
                value.sub_(one.lr * (gradient + 0.01 * value))
    assert {key for key in sent if "running" not in key} == set(learns)
    for key in learns:
        torch.testing.assert_close(sent[key], parameters[key].detach(), atol=1e-6, rtol=1e-5)
