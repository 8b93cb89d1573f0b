"""FedPart: one block for all, in turn."""

from __future__ import annotations

import pytest
import torch

from cocofl import data
from cocofl.errors import InvalidExperiment
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import STRATEGIES
from cocofl.span import Span
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation


def spans(rounds: int, **options: object) -> list[str | None]:
    strategy = STRATEGIES["fedpart"](PlainTables(), **options)
    plans = (strategy.plan(situation(index)) for index in range(rounds))
    return [None if plan is None else str(plan.work) for plan in plans]


def test_blocks_have_their_turn_between_full_rounds() -> None:
    full, a, b, c = "0:3", "0:1", "1:2", "2:3"
    assert spans(12, warmup=2, each=2, between=1) == [full, full, a, a, b, b, c, c, full, a, a, b]
    assert spans(5, warmup=0, each=1, between=0, order="backward") == [c, b, a, c, b]
    assert spans(6) == [full] * 5 + [a]


def test_a_device_on_which_the_block_does_not_fit_sits_out() -> None:
    strategy = STRATEGIES["fedpart"](PlainTables(), warmup=1, each=1, between=1)
    plans = [strategy.plan(situation(index, time=0.6)) for index in range(5)]
    # All of it costs 11, the first block 7, the second 6, the last 5.
    assert [plan and str(plan.work) for plan in plans] == [None, None, "1:2", "2:3", None]


def test_nothing_but_the_block_moves(digits: data.DataSet) -> None:
    trainer = make_workshop(digits, weight_decay=0.01)
    state = initial(trainer)
    work = SpanWork(Span(2, 3), "f")
    sent = [trainer.train(task(work, device=device), state) for device in range(2)]
    merged = STRATEGIES["fedpart"](PlainTables()).merge(state, sent).tensors
    moved = {key for key, t in state.tensors.items() if not torch.equal(t, merged[key])}
    assert moved == set(sent[0].tensors)
    for key in moved:
        mean = (sent[0].tensors[key].double() + sent[1].tensors[key].double()) / 2
        torch.testing.assert_close(merged[key].double(), mean, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"each": 0}, "strategy.each is 0; expected a number at least 1"),
        ({"warmup": -1}, "strategy.warmup is -1"),
        ({"order": "random"}, "strategy.order is 'random'; expected one of forward, backward"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        STRATEGIES["fedpart"](PlainTables(), **options)
