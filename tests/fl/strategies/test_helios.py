"""Helios against a brute-force version, and whose turn it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cocofl import Budget, data
from cocofl.engine.cohort import CohortExecutor, TrainedAlone
from cocofl.errors import InvalidExperiment
from cocofl.fl.federation import Situation
from cocofl.fl.state import Contribution
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.helios import SoftWork
from cocofl.fl.trainer import Trainer
from cocofl.freeze import KernelPlan
from tests.engine.collecting import collected
from tests.fl.conftest import initial, make_workshop, masked_step, task
from tests.fl.test_strategies import WidthTables

EIGHT, SIXTEEN = "stem.0.weight", "residuals.2.conv1.weight"


def trained_neurons(trainer: Trainer, sent: Contribution) -> dict[int, list[int]]:
    """By number of neurons of a layer, those whose weights are others than the server's."""
    start = initial(trainer).tensors
    found = {}
    for key in (EIGHT, SIXTEEN):
        moved = (sent.tensors[key] - start[key]).abs().flatten(1).sum(1)
        found[len(moved)] = torch.nonzero(moved).flatten().tolist()
    return found


def test_a_step_is_one_of_the_full_network_without_the_other_neurons(digits: data.DataSet) -> None:
    """By brute force: masks on the full network's tensors, and plain SGD."""
    trainer = make_workshop(digits)
    state, one = initial(trainer), task(SoftWork(0.5, 0.1), samples=40)
    sent = trainer.train(one, state)
    chosen = trained_neurons(trainer, sent)
    assert {n: len(kept) for n, kept in chosen.items()} == {8: 4, 16: 8}
    model, _ = trainer.spec.subject.build()
    model.load_state_dict(state.tensors, strict=False)
    masks = {}
    for key, parameter in model.named_parameters():
        masks[key] = torch.ones_like(parameter)
        for axis, n in enumerate(parameter.shape[:2]):
            if n in chosen:
                out = torch.tensor([i for i in range(n) if i not in chosen[n]])
                masks[key].index_fill_(axis, out, 0.0)
    for inputs, labels in trainer.load(one):
        masked_step(model, masks, inputs, labels, one.lr)
    assert sent.tensors.keys() == dict(model.named_parameters()).keys()  # and no statistics
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(sent.tensors[key], parameter.data, rtol=1e-3, atol=1e-5, msg=key)
    narrow = sum(p.nbytes for p in trainer.model(0.5).parameters())
    assert (sent.nbytes, sent.samples) == (narrow, 20)
    ways = (sent.tensors[SIXTEEN] - state.tensors[SIXTEEN]).abs().flatten(1).sum(1)
    kept = sent.memory["moved"]["neurons.16"]
    assert bool((kept[ways > 0] >= ways[ways > 0]).all())  # this layer and others
    assert sent.memory["waited"]["neurons.16"].tolist() == (ways == 0).float().tolist()


def test_all_neurons_have_their_turn_and_the_best_more_often(trainer: Trainer) -> None:
    work, state = SoftWork(0.25, 0.5), initial(trainer)
    memory: dict[str, dict[str, torch.Tensor]] = {}
    turns, longest = torch.zeros(16), 0.0
    for index in range(24):
        one = replace(task(work, samples=16), round_index=index, memory=memory)
        sent = trainer.train(one, state)
        memory = {
            name: {key: t.clone() for key, t in own.items()} for name, own in sent.memory.items()
        }
        waited = memory["waited"]["neurons.16"]
        turns, longest = turns + (waited == 0), max(longest, float(waited.max()))
        memory["moved"]["neurons.16"][5] = 1e6  # the best, whatever it does
    assert longest <= 1 + 1 / work.width + 16 / 4  # all may be overdue at once
    assert float(turns.min()) >= 2
    assert int(turns.argmax()) == 5


def test_with_all_neurons_it_is_plain_training(trainer: Trainer) -> None:
    sent = trainer.train(task(SoftWork(1.0, 0.1)), initial(trainer))
    assert trained_neurons(trainer, sent) == {8: list(range(8)), 16: list(range(16))}
    assert sent.samples == 40


def test_a_memory_that_does_not_fit_is_forgotten(trainer: Trainer) -> None:
    wrong = {"moved": {"neurons.16": torch.ones(3)}, "waited": {"neurons.16": torch.ones(2, 2)}}
    one = task(SoftWork(0.5, 0.1))
    odd = trainer.train(replace(one, memory=wrong), initial(trainer))
    plain = trainer.train(one, initial(trainer))
    assert all(torch.equal(odd.tensors[key], t) for key, t in plain.tensors.items())


def test_a_device_trains_as_many_neurons_as_fit() -> None:
    plan = STRATEGIES["helios"](WidthTables()).plan

    def width(**budget: float) -> str | None:
        found = plan(Situation(0, 0, Budget(**budget), np.random.default_rng(0)))
        return None if found is None else str(found.work)

    assert (width(), width(time=0.5), width(time=0.05)) == ("1", "0.4", None)
    with pytest.raises(InvalidExperiment, match="top is 2; expected"):
        STRATEGIES["helios"](WidthTables(), top=2)


def test_a_cohort_says_why_devices_train_one_after_the_other(trainer: Trainer) -> None:
    state, work = initial(trainer), SoftWork(0.5, 0.1)
    executor = CohortExecutor("cpu", precision="fp32")
    executor.prepare(trainer, KernelPlan())
    with pytest.warns(TrainedAlone, match="every device trains other neurons"):
        (sent,) = collected(executor, [task(work)], executor.placed(state))
    alone: Contribution = trainer.train(task(work), state)
    assert all(torch.equal(sent.tensors[key], t) for key, t in alone.tensors.items())
    executor.close()
