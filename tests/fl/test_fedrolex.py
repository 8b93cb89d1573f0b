"""FedRolex against a brute-force version, and that it is the same on both engines."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cocofl import Budget
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidExperiment
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.trainer import Trainer
from cocofl.fl.widths import WidthWork
from cocofl.freeze import KernelPlan
from tests.engine.collecting import collected
from tests.fl.conftest import initial, task
from tests.fl.test_strategies import WidthTables
from tests.fl.test_trainer import plain_training


def situation(round_index: int, time: float = 0.5) -> Situation:
    return Situation(0, round_index, Budget(time=time), np.random.default_rng(0))


def test_the_window_of_a_round_begins_one_channel_later() -> None:
    for options, step in ({}, 1), ({"step": 5}, 5):
        plan = STRATEGIES["fedrolex"](WidthTables(), **options).plan
        works = [plan(situation(index)) for index in range(3)]
        assert [one.work.roll for one in works if one] == [0, step, 2 * step]  # type: ignore[attr-defined]
    still = STRATEGIES["heterofl"](WidthTables()).plan(situation(0))
    assert works[0] == still
    assert STRATEGIES["fedrolex"](WidthTables()).plan(situation(0, time=0.05)) is None
    with pytest.raises(InvalidExperiment, match=r"strategy.step is 0"):
        STRATEGIES["fedrolex"](WidthTables(), step=0)


def test_a_round_is_the_mean_of_networks_made_of_single_channels(trainer: Trainer) -> None:
    """By brute force: channels are picked one by one, and every element is averaged alone."""
    state, roll = initial(trainer), 6
    full = trainer.model().state_dict()
    tasks = [task(WidthWork(0.5, roll=roll)), task(WidthWork(1.0, roll=roll), device=4)]
    merged = Mean("senders")(state, [trainer.train(one, state) for one in tasks]).tensors

    def channels(size: int, of: int) -> list[int]:
        return (
            [i % of if size < of else i for i in range(roll, roll + size)]
            if size < of
            else [*range(of)]
        )

    totals = {key: torch.zeros(t.shape) for key, t in full.items()}
    counts = {key: torch.zeros(t.shape) for key, t in full.items()}
    for one, width in zip(tasks, (0.5, 1.0), strict=True):
        model, _ = trainer.spec.subject.build(width)
        where = {
            key: np.ix_(*(channels(n, f) for n, f in zip(t.shape, full[key].shape, strict=True)))
            for key, t in model.state_dict().items()
            if t.ndim
        }
        picked = {key: state.tensors[key][at] for key, at in where.items() if key in state.tensors}
        model.load_state_dict(picked, strict=False)
        plain_training(trainer, model, one)
        for key, parameter in model.named_parameters():
            totals[key][where[key]] += parameter.data
            counts[key][where[key]] += 1
    for key, _ in trainer.model().named_parameters():
        mean = torch.where(counts[key] > 0, totals[key] / counts[key], state.tensors[key])
        torch.testing.assert_close(merged[key], mean, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("scaler", [False, True])
def test_a_cohort_trains_the_same_window(trainer: Trainer, scaler: bool) -> None:
    """Also beside devices with another window, or none."""
    works = [
        WidthWork(0.5, scaler, roll=11),
        WidthWork(0.25, scaler, roll=3),
        WidthWork(0.5, scaler),
        WidthWork(1.0, scaler),
    ]
    tasks = [task(work, device=2 + i) for i, work in enumerate(works)]
    found = []
    for executor in (InProcess(), CohortExecutor("cpu", precision="fp32")):
        executor.prepare(trainer, KernelPlan())
        state = executor.placed(initial(trainer))
        merge, sent = Mean("senders").begin(state, 0), []
        for one in collected(executor, tasks, state):
            merge.add(one)
            sent.append((one.width, one.roll, one.nbytes, dict(one.tensors)))
        found.append(([facts for *facts, _ in sent], [t for *_, t in sent], merge.finish().tensors))
        executor.close()
    (facts, tensors, merged), (facts_too, tensors_too, merged_too) = found
    assert facts == facts_too
    for alone, together in zip([*tensors, merged], [*tensors_too, merged_too], strict=True):
        for key, tensor in alone.items():
            torch.testing.assert_close(together[key], tensor, rtol=1e-3, atol=1e-5, msg=key)


def test_flower_brings_the_window_along(trainer: Trainer) -> None:
    records = pytest.importorskip("cocofl.flower.records")
    sent = trainer.train(task(WidthWork(0.5, roll=11)), initial(trainer))
    reply = SimpleNamespace(content=records.packed_contribution(sent))
    found = records.unpacked_contribution(reply)
    assert (found.width, found.roll) == (0.5, 11)
    assert all(torch.equal(found.tensors[key], t) for key, t in sent.tensors.items())
