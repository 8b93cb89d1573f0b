"""InclusiveFL: shallower networks with ends of their own, which learn from the blocks behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cocofl import data
from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.fl.exits import exit_of
from cocofl.fl.state import Contribution
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.inclusivefl import ShallowWork
from tests.fl.conftest import initial, make_workshop, task
from tests.fl.strategies.tables import PlainTables, situation


def test_a_device_trains_the_stages_that_fit() -> None:
    strategy = STRATEGIES["inclusivefl"](PlainTables(n_blocks=6), stages=3)
    plans = [strategy.plan(situation(memory=m)) for m in (0.3, 0.4, 0.7, 1.0)]
    works = [plan and plan.work for plan in plans]
    assert works == [None, ShallowWork(2), ShallowWork(4), ShallowWork(6)]


def test_steps_are_those_of_a_shallower_network_that_begins_with_its_own_end(
    digits: data.DataSet,
) -> None:
    trainer = make_workshop(digits, weight_decay=0.01)
    plain, one = initial(trainer), task(ShallowWork(2))
    own = trainer.chain().blocks[1].state_dict()
    changed = {f"ends.2.{key}": 0.5 * t for key, t in own.items() if not key.endswith("tracked")}
    for state in (plain, trainer.server_state({**plain.tensors, **changed})):
        blocks = copy.deepcopy(trainer.chain()).train().blocks[:2]
        if "ends.2.residuals.0.conv1.weight" in state.tensors:
            blocks[1].load_state_dict({key: 0.5 * t for key, t in own.items()})
        weight, bias = exit_of(trainer, 2, one.seed, {}).values()
        classifier = nn.Linear(weight.shape[1], 10)
        classifier.load_state_dict({"weight": weight, "bias": bias})
        modules = nn.ModuleList([*blocks, classifier])
        optimizer = torch.optim.SGD(modules.parameters(), lr=one.lr, weight_decay=0.01)
        for inputs, labels in trainer.load(one):
            loss = F.cross_entropy(classifier(blocks[1](blocks[0](inputs)).mean((2, 3))), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        expected = dict(blocks[0].state_dict())
        expected |= {f"ends.2.{key}": t for key, t in blocks[1].state_dict().items()}
        expected |= {f"ends.2.exits.2.{k}": t for k, t in classifier.state_dict().items()}
        sent = trainer.train(one, state).tensors
        assert sent.keys() == {key for key in expected if not key.endswith("tracked")}
        for key, value in sent.items():
            torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.3])
def test_blocks_are_shared_and_ends_follow_those_behind(
    digits: data.DataSet, momentum: float
) -> None:
    trainer = make_workshop(digits)
    state, n = initial(trainer), len(trainer.chain())
    merge = STRATEGIES["inclusivefl"](PlainTables(n_blocks=n), momentum=momentum).merge
    for _ in range(2):  # in the second round the ends are there
        works = [ShallowWork(2), ShallowWork(2), ShallowWork(n)]
        sent = [trainer.train(task(work, device=d), state) for d, work in enumerate(works)]
        old, state = state.tensors, merge(state, sent)
        check_merged(old, sent, state.tensors, momentum)
    deep = trainer.train(task(ShallowWork(n), device=2), state)
    lonely = merge(state, [deep]).tensors
    for key in lonely:  # a network of which no device came stays as it is
        assert not key.startswith("ends.") or torch.equal(lonely[key], state.tensors[key])


def check_merged(
    old: dict[str, torch.Tensor],
    sent: list[Contribution],
    found: dict[str, torch.Tensor],
    momentum: float,
) -> None:
    for key, value in found.items():
        votes = [one.tensors[key].double() for one in sent if key in one.tensors]
        expected = torch.stack(votes).mean(0)
        own = key.removeprefix("ends.2.")
        if own != key and "exits" not in own and "running" not in own:
            begin = old.get(key, old[own]).double()
            # Blocks 1 and 2 have 8 channels, the others have 16.
            behind = [own, own.replace("residuals.0", "residuals.1")]
            ways = [found[one].double() - old[one].double() for one in behind]
            own_way = expected - begin
            expected = begin + (1 - momentum) * own_way + momentum * sum(ways) / 2
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5, msg=key)


def test_what_it_cannot_do_is_said_before_anything_is_trained() -> None:
    make = STRATEGIES["inclusivefl"]
    with pytest.raises(InvalidSetting, match="but the labels of this data set are numbers"):
        make(PlainTables(labels="numbers"))
    with pytest.raises(InvalidSetting, match="stages is 4, but the network has 3 blocks"):
        make(PlainTables())
    with pytest.raises(InvalidExperiment, match="momentum is 2; expected"):
        make(PlainTables(n_blocks=6), momentum=2)
