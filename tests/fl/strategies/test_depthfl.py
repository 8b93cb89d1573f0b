"""DepthFL: the first stages that fit, with exits that learn from each other."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cocofl import data
from cocofl.engine.cohort import CohortExecutor
from cocofl.errors import InvalidSetting, InvalidState
from cocofl.fl.batches import tensors
from cocofl.fl.exits import DepthWork, exit_of
from cocofl.fl.strategies import STRATEGIES
from cocofl.freeze import KernelPlan
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation


def test_a_device_trains_the_stages_that_fit() -> None:
    strategy = STRATEGIES["depthfl"](PlainTables(n_blocks=6), stages=3, ramp=0)
    plans = [strategy.plan(situation(memory=m)) for m in (0.3, 0.4, 0.7, 1.0)]
    assert [plan and plan.work for plan in plans] == [
        None,
        DepthWork((2,)),
        DepthWork((2, 4)),
        DepthWork((2, 4, 6)),
    ]


def test_exits_teach_each_other_the_more_the_later_it_is() -> None:
    strategy = STRATEGIES["depthfl"](PlainTables(n_blocks=6), distillation=2.0, ramp=10)
    plans = [strategy.plan(situation(round_index)) for round_index in (0, 5, 10, 11)]
    weights = [plan.work.distillation for plan in plans if plan]  # type: ignore[attr-defined]
    assert weights == pytest.approx([2 * math.exp(-5), 2 * math.exp(-1.25), 2.0, 2.0])


def test_steps_are_those_of_plain_training_with_exits(digits: data.DataSet) -> None:
    trainer = make_workshop(digits, weight_decay=0.01)
    state, n = initial(trainer), len(trainer.chain())
    for stages in ((2, 4), (2, 4, n)):
        one = task(DepthWork(stages, distillation=0.6))
        sent = trainer.train(one, state).tensors
        blocks = copy.deepcopy(trainer.chain()).train().blocks
        exits: dict[int, nn.Linear] = {}
        for depth in (2, 4):
            weight, bias = exit_of(trainer, depth, one.seed, {}).values()
            exits[depth] = nn.Linear(weight.shape[1], 10)
            exits[depth].load_state_dict({"weight": weight, "bias": bias})
        modules = nn.ModuleList([*blocks[: stages[-1]], *exits.values()])
        optimizer = torch.optim.SGD(modules.parameters(), lr=one.lr, weight_decay=0.01)
        for inputs, labels in trainer.load(one):
            values, scores = inputs, []
            for index, block in enumerate(blocks[: stages[-1]]):
                values = block(values)
                if index + 1 in exits:
                    scores.append(exits[index + 1](values.mean((2, 3))))
            scores += [values] if stages[-1] == n else []
            loss = sum(F.cross_entropy(one, labels) for one in scores)
            for student in scores:
                for teacher in scores:
                    if teacher is not student:
                        p = teacher.detach().softmax(-1)
                        apart = (p * (p.log() - student.log_softmax(-1))).sum(-1).mean()
                        loss = loss + 0.6 * apart / (len(scores) - 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        plain = {k: t for block in blocks[: stages[-1]] for k, t in block.state_dict().items()}
        for depth, layer in exits.items():
            plain |= {f"exits.{depth}.{name}": t for name, t in layer.state_dict().items()}
        assert sent.keys() == {key for key in plain if not key.endswith("tracked")}
        for key, value in sent.items():
            torch.testing.assert_close(value, plain[key], atol=1e-5, rtol=1e-4)


def test_blocks_and_exits_are_the_means_of_those_who_trained_them(digits: data.DataSet) -> None:
    trainer = make_workshop(digits)
    state, n = initial(trainer), len(trainer.chain())
    works = [DepthWork((2,)), DepthWork((2, 4)), DepthWork((2, 4, n))]
    sent = [trainer.train(task(work, device=d), state) for d, work in enumerate(works)]
    merged = STRATEGIES["depthfl"](PlainTables(n_blocks=n)).merge(state, sent).tensors
    assert {"exits.2.weight", "exits.4.bias"} < merged.keys()
    for key, value in merged.items():
        votes = [one.tensors[key].double() for one in sent if key in one.tensors]
        if votes:
            expected = torch.stack(votes).mean(0)
            torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-6)
    again = trainer.train(task(works[1]), trainer.server_state(merged))
    assert again.is_finite
    assert not torch.equal(again.tensors["exits.2.weight"], merged["exits.2.weight"])


def test_the_server_tests_the_mean_of_what_all_exits_say(digits: data.DataSet) -> None:
    trainer = make_workshop(digits)
    state, n = initial(trainer), len(trainer.chain())
    sent = [trainer.train(task(DepthWork((2, 4, n)), device=d), state) for d in range(2)]
    merged = STRATEGIES["depthfl"](PlainTables(n_blocks=n)).merge(state, sent)
    blocks = copy.deepcopy(trainer.chain()).blocks
    for block in blocks:
        own = block.state_dict()
        block.load_state_dict(
            own | {key: merged.tensors[key] for key in own & merged.tensors.keys()}
        )
    values, labels = tensors(trainer.spec.test, np.arange(100))
    scores = []
    for depth, block in enumerate(blocks.eval(), 1):
        values = block(values)
        if depth in (2, 4):
            weight, bias = (merged.tensors[f"exits.{depth}.{k}"] for k in ("weight", "bias"))
            scores.append(values.mean((2, 3)) @ weight.T + bias)
    right = (torch.stack([*scores, values]).mean(0).argmax(1) == labels).sum()
    alone = (values.argmax(1) == labels).sum()
    (found,) = trainer.test(merged, [np.arange(100)], "running")
    assert found[0].diagonal().sum() == right != alone
    executor = CohortExecutor("cpu", precision="fp32")
    executor.prepare(trainer, KernelPlan())
    stacked = executor.test(executor.placed(merged), [np.arange(100)], "running")
    assert (stacked[0] == found[0]).all()
    executor.close()
    for wrong, message in (
        ({"exits.9.bias": torch.zeros(10)}, "a part of exits.9, which is no exit"),
        ({"exits.2.weight": torch.zeros(10, 3)}, "expected 10 rows of the 8 features"),
    ):
        broken = trainer.server_state({**merged.tensors, **wrong})
        with pytest.raises(InvalidState, match=message):
            trainer.test(broken, [np.arange(4)], "running")


def test_what_it_cannot_do_is_said_before_anything_is_trained() -> None:
    with pytest.raises(InvalidSetting, match="but the labels of this data set are numbers"):
        STRATEGIES["depthfl"](PlainTables(labels="numbers"))
    with pytest.raises(InvalidSetting, match="stages is 4, but the network has 3 blocks"):
        STRATEGIES["depthfl"](PlainTables())
