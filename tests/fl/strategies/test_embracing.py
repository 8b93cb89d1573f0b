"""EmbracingFL: blocks at the output, each averaged over those who trained it."""

from __future__ import annotations

import pytest
import torch

from cocofl import data
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import STRATEGIES
from cocofl.span import Span
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation


@pytest.mark.parametrize(
    ("budget", "span"),
    [
        ({"time": 1.0}, "0:3"),
        ({"time": 0.8}, "1:3"),  # 8 of 11
        ({"memory": 0.4}, "2:3"),
        ({"upload": 0.7}, "1:3"),
    ],
)
def test_a_device_trains_the_most_blocks_at_the_output_that_fit(
    budget: dict[str, float], span: str
) -> None:
    plan = STRATEGIES["embracing"](PlainTables()).plan(situation(**budget))
    assert plan is not None
    assert plan.work == SpanWork(Span.parse(span), "f")


def test_a_device_whose_classifier_does_not_fit_sits_out() -> None:
    """Though another block may."""
    assert STRATEGIES["embracing"](PlainTables()).plan(situation(time=0.44)) is None


def test_a_block_is_the_mean_of_those_who_trained_it(digits: data.DataSet) -> None:
    trainer = make_workshop(digits)
    state, n = initial(trainer), len(trainer.chain())
    tasks = [
        task(SpanWork(Span(first, n), "f"), device=device, samples=samples)
        for device, (first, samples) in enumerate([(0, 40), (3, 24), (n - 1, 16)])
    ]
    sent = [trainer.train(one, state) for one in tasks]
    merged = STRATEGIES["embracing"](PlainTables()).merge(state, sent).tensors
    for index, block in enumerate(trainer.chain().blocks):
        for key, _ in block.named_parameters():
            votes = [(one.samples, one.tensors[key]) for one in sent if key in one.tensors]
            assert len(votes) == 1 + (index >= 3) + (index == n - 1)
            expected = sum(s * t.double() for s, t in votes) / sum(s for s, _ in votes)
            torch.testing.assert_close(merged[key].double(), expected, atol=1e-7, rtol=1e-6)
