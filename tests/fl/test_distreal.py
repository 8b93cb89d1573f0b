"""DISTREAL against a brute-force version, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cocofl import Budget
from cocofl.engine.cohort import CohortExecutor, TrainedAlone
from cocofl.fl.batches import tensors
from cocofl.fl.federation import Situation
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.distreal import DroppingWork, keeping_everything
from cocofl.fl.trainer import Trainer
from cocofl.freeze import KernelPlan
from tests.engine.collecting import collected
from tests.fl.conftest import initial, masked_step, task
from tests.fl.test_strategies import WidthTables


def test_a_step_is_one_of_the_full_network_with_zeros_in_place_of_dropped_filters(
    trainer: Trainer,
) -> None:
    """By brute force: masks on the full network's tensors, and plain SGD."""
    work, state = DroppingWork(0.5), initial(trainer)
    one = task(work, samples=40)  # three mini-batches
    sent = trainer.train(one, state)
    model, _ = trainer.spec.subject.build()
    model.load_state_dict(state.tensors, strict=False)
    rng = one.rng("dropped filters")
    for indices in trainer.batches(one):
        at = work.kept(trainer, rng)
        masks = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
        for key, mask in masks.items():
            mask[at[key]] = 1.0
        inputs, labels = tensors(trainer.spec.train, indices)
        masked_step(model, masks, inputs, labels, one.lr)
    assert sent.width == 1.0
    assert sent.tensors.keys() == dict(model.named_parameters()).keys()  # all, and no statistics
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(sent.tensors[key], parameter.data, rtol=1e-3, atol=1e-5, msg=key)


def test_every_mini_batch_keeps_other_filters_and_every_filter_is_kept_as_often(
    trainer: Trainer,
) -> None:
    rng, counts, drawn = np.random.default_rng(0), torch.zeros(8), set()
    for _ in range(200):
        rows = torch.arange(8)[DroppingWork(0.5).kept(trainer, rng)["stem.0.weight"][0].flatten()]
        counts[rows] += 1
        drawn.add(tuple(sorted(rows.tolist())))
    assert len(drawn) > 30
    assert float(counts.sum()) == 200 * 4
    assert float((counts - 100).abs().max()) < 30


def test_with_all_filters_it_is_plain_training(trainer: Trainer) -> None:
    at = DroppingWork(1.0).kept(trainer, np.random.default_rng(0))
    assert all(isinstance(axis, slice) for place in at.values() for axis in place)


def test_all_is_held_and_sent_whatever_is_dropped() -> None:
    plain = WidthTables().widths()  # full training: 1000 bytes of memory, 100 of upload
    table = keeping_everything(plain)
    assert set(table.upload) == {1.0}
    assert table.time is plain.time
    narrower = plain.upload < 1
    assert np.all(table.memory >= plain.memory)
    assert not narrower.any() or np.all(table.memory[narrower] > plain.memory[narrower])
    plan = STRATEGIES["distreal"](WidthTables()).plan

    def width(**budget: float) -> str | None:
        found = plan(Situation(0, 0, Budget(**budget), np.random.default_rng(0)))
        return None if found is None else str(found.work)

    assert (width(), width(time=0.5), width(time=0.05)) == ("1", "0.4", None)
    assert width(upload=0.9) is None


def test_a_cohort_says_why_devices_train_one_after_the_other(trainer: Trainer) -> None:
    state = initial(trainer)
    executor = CohortExecutor("cpu", precision="fp32")
    executor.prepare(trainer, KernelPlan())
    with pytest.warns(TrainedAlone, match="every mini-batch keeps other filters"):
        (sent,) = collected(executor, [task(DroppingWork(0.5))], executor.placed(state))
    alone = trainer.train(task(DroppingWork(0.5)), state)
    assert all(torch.equal(sent.tensors[key], t) for key, t in alone.tensors.items())
    executor.close()
