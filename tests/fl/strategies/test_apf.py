"""APF against a version that looks at one number after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cocofl import data
from cocofl.errors import InvalidExperiment
from cocofl.fl.spans import SpanWork
from cocofl.fl.state import Contribution, ServerState
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.apf import FreezeStable, KeepFrozen
from cocofl.span import Span
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation

ROUNDS = 40


def one_by_one(moves: np.ndarray, threshold: float, ema: float, every: int) -> np.ndarray:
    """(round): the value of one parameter that wants to make these moves."""
    value = mean = size = moved = period = 0.0
    thaw, found = 0.0, []
    for index, move in enumerate(moves):
        is_frozen = thaw > index
        if not is_frozen:
            value, moved = value + move, moved + move
        if (index + 1) % every == 0:
            if not is_frozen:
                mean = ema * mean + (1 - ema) * moved
                size = ema * size + (1 - ema) * abs(moved)
                if size > 0 and abs(mean) / size <= threshold:
                    period += every
                else:
                    period //= 2
                thaw = index + 1 + period
            moved = 0.0
        found.append(value)
    return np.array(found)


@pytest.mark.parametrize(("threshold", "ema", "every"), [(0.3, 0.8, 1), (0.5, 0.5, 3)])
def test_what_is_stable_freezes_for_longer_and_longer(
    threshold: float, ema: float, every: int
) -> None:
    rng = np.random.default_rng(0)
    moves = rng.normal(size=(ROUNDS, 30))
    moves[:, :5] = np.abs(moves[:, :5])  # these get somewhere
    moves[:, 5] = 0.0  # never moves
    merge = FreezeStable(threshold, ema, every)
    state = ServerState({"a": torch.zeros(30, dtype=torch.float64)})
    frozen = np.zeros(30)
    for index in range(ROUNDS):
        if index == 13:  # interrupted, and resumed
            state = ServerState.from_flat({k: t.clone() for k, t in state.flat().items()})
        sent = state.parts["a"] + torch.from_numpy(moves[index])
        before, state = state, merge(state, [Contribution({"a": sent}, 5)], index)
        frozen += (state.parts["a"] == before.parts["a"]).numpy()
    expected = [one_by_one(moves[:, i], threshold, ema, every)[-1] for i in range(30)]
    np.testing.assert_allclose(state.parts["a"].numpy(), expected, atol=1e-12)
    assert frozen[:5].sum() == 0
    assert frozen[6:].mean() > ROUNDS / 10


def test_what_is_frozen_neither_moves_nor_is_sent(digits: data.DataSet) -> None:
    trainer = make_workshop(digits, weight_decay=0.1, momentum=0.9)
    state, n = initial(trainer), len(trainer.chain())
    generator = torch.Generator().manual_seed(0)
    frozen = {
        key: (torch.rand(state.parts[key].shape, generator=generator) < 0.3).float()
        for key in state.learned
    }
    state = replace(state, memory={"frozen": frozen})
    plain = trainer.train(task(SpanWork(Span(0, n), "f")), state)
    sent = trainer.train(task(SpanWork(Span(0, n), "f", KeepFrozen())), state)
    for key, mask in frozen.items():
        same = sent.tensors[key] == state.tensors[key]
        assert bool(same[mask > 0].all())
        assert not bool(same[mask == 0].all())
    unsent = int(sum(mask.sum() for mask in frozen.values()))
    assert sent.nbytes == plain.nbytes - 4 * unsent


def test_who_cannot_train_everything_is_not_asked() -> None:
    strategy = STRATEGIES["apf"](PlainTables())
    assert strategy.only_able
    assert strategy.plan(situation(time=0.9)) is None
    assert strategy.plan(situation(upload=0.9)) is None
    assert strategy.plan(situation(time=1.0)) is not None


@pytest.mark.parametrize("options", [{"threshold": 1.5}, {"ema": 1.0}, {"every": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidExperiment, match=f"strategy.{next(iter(options))} is"):
        STRATEGIES["apf"](PlainTables(), **options)
