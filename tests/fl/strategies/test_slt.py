"""Successive layer training against a network whose head really is narrow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import Budget, Experiment, data
from cocofl.errors import InvalidModel, InvalidSetting
from cocofl.experiment import Setup
from cocofl.fl.codec import Upload
from cocofl.fl.state import ServerState
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.slt import GrowingWork, quiet
from cocofl.fl.trainer import Trainer, TrainerSpec
from cocofl.fl.training import Training
from cocofl.freeze import chain_state
from cocofl.models import MODELS
from cocofl.profiling.subject import Subject
from tests.fl.conftest import task
from tests.fl.strategies.tables import PlainTables, situation

HIDDEN, WIDTH = 8, 0.5


def plain(sizes: list[int], num_classes: int) -> nn.Sequential:
    """Convolutions with norms, one per size, and a classifier."""
    pairs = zip([1, *sizes], sizes, strict=False)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], num_classes))
    return nn.Sequential(*blocks, head)


def network(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    return plain([round(HIDDEN * width)] * 3, num_classes), torch.rand(4, 1, 8, 8)


@pytest.fixture
def trainer(digits: data.DataSet, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setitem(MODELS, "growing", network)
    training = Training(batch=16, weight_decay=0.01, momentum=0.5)
    spec = TrainerSpec(Subject("growing", 16, 10), training, digits.train, digits.test, "reference")
    return Trainer(spec)


def mixed(state: ServerState, first: int) -> nn.Sequential:
    """The same network with a head that has nothing but the leading channels."""
    narrow = round(HIDDEN * WIDTH)
    model = plain([HIDDEN if block <= first else narrow for block in range(3)], 10)
    own = {
        key: state.tensors[key][tuple(slice(n) for n in tensor.shape)]
        for key, tensor in model.state_dict().items()
        if key in state.tensors
    }
    model.load_state_dict(own, strict=False)
    return model


@pytest.mark.parametrize("first", [0, 1, 2])
def test_steps_are_those_of_a_network_with_a_narrow_head(trainer: Trainer, first: int) -> None:
    chain = trainer.chain()
    assert len(chain) == 4
    fresh = quiet(trainer, chain_state(chain), [WIDTH])
    state = trainer.server_state(fresh)
    one = task(GrowingWork(first, 4, WIDTH), samples=40)
    sent = trainer.train(one, state)
    merged = STRATEGIES["slt"](PlainTables()).merge(state, [sent])

    model = mixed(state, first).train()
    for block in model[:first]:
        block.requires_grad_(False)
    learns = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learns, lr=one.lr, weight_decay=0.01, momentum=0.5)
    for inputs, labels in trainer.load(one):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    found, expected = merged.tensors, model.state_dict()
    frozen = tuple(f"{block}." for block in range(first))
    for key, before in fresh.items():
        if key.startswith(frozen):
            assert torch.equal(found[key], before), key
            continue
        inside = tuple(slice(n) for n in expected[key].shape)
        torch.testing.assert_close(found[key][inside], expected[key], atol=1e-5, rtol=1e-4)
        outside = torch.ones_like(before, dtype=torch.bool)
        outside[inside] = False
        assert torch.equal(found[key][outside], before[outside]), "others wait"
    own = sum(
        t.nbytes for k, t in expected.items() if not k.startswith(frozen) and "tracked" not in k
    )
    assert sent.nbytes - own in (0, 4 * 4 * 9 * 4), "the second block may read all channels"

    # The whole network says what the one with the narrow head says.
    model.eval()
    whole = trainer.whole_network(found).eval()
    model.load_state_dict({k: t for k, t in fresh.items() if k.startswith(frozen)}, strict=False)
    inputs = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(whole(inputs), model(inputs), atol=1e-5, rtol=1e-4)


class Shortcut(nn.Module):
    """Of a narrow network, that hands on the leading channels."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x[:, : len(self.conv.weight)])


class WholeShortcut(Shortcut):
    """Of one with as many channels everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


def with_shortcuts(
    sizes: list[int], num_classes: int, make: type[Shortcut] = Shortcut
) -> nn.Sequential:
    """A stem, blocks with a shortcut, and a classifier."""
    a, *_ = sizes
    stem = nn.Sequential(nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU())
    blocks = [make(a, b) for a, b in pairwise(sizes)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], num_classes))
    return nn.Sequential(stem, *blocks, head)


def residual(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    return with_shortcuts([round(HIDDEN * width)] * 4, num_classes, WholeShortcut), EXAMPLE


EXAMPLE = torch.linspace(0, 1, 4 * 64).reshape(4, 1, 8, 8)


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_shortcut_hands_on_is_no_part_of_a_narrow_head(
    digits: data.DataSet, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Channels of the last full block come by it to all blocks behind, which read none of them."""
    monkeypatch.setitem(MODELS, "residual", residual)
    training = Training(batch=16, weight_decay=0.01, momentum=0.5)
    subject = Subject("residual", 16, 10)
    trainer = Trainer(TrainerSpec(subject, training, digits.train, digits.test, "reference"))
    chain = trainer.chain()
    assert len(chain) == 5
    fresh = quiet(trainer, chain_state(chain), [WIDTH])
    state = trainer.server_state(fresh)
    one = task(GrowingWork(first, 5, WIDTH), samples=40)
    found = STRATEGIES["slt"](PlainTables()).merge(state, [trainer.train(one, state)]).tensors

    narrow = round(HIDDEN * WIDTH)
    model = with_shortcuts([HIDDEN if block <= first else narrow for block in range(4)], 10)
    inside = {key: tuple(slice(n) for n in t.shape) for key, t in model.state_dict().items()}
    model.load_state_dict({key: t[inside[key]] for key, t in fresh.items()}, strict=False)
    for block in model.train()[:first]:
        block.requires_grad_(False)
    learns = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learns, lr=one.lr, weight_decay=0.01, momentum=0.5)
    for inputs, labels in trainer.load(one):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for key, learned in model.named_parameters():
        torch.testing.assert_close(found[key][inside[key]], learned.data, atol=1e-5, rtol=1e-4)
        outside = torch.ones_like(found[key], dtype=torch.bool)
        outside[inside[key]] = False
        assert torch.equal(found[key][outside], fresh[key][outside]), f"{key}: others wait"


def test_a_codec_sees_no_change_where_a_channel_is_absent(trainer: Trainer) -> None:
    """Or what it loses of a norm, which has one scale, would go by what waits there."""
    state = trainer.server_state(quiet(trainer, chain_state(trainer.chain()), [WIDTH]))
    one = task(GrowingWork(0, 4, WIDTH), samples=40)
    plain = trainer.train(one, state)
    upload = Upload(codec="int8")
    coded = Trainer(replace(trainer.spec, upload=upload)).train(one, state)
    moved = 0
    for key, rows in plain.rows.items():
        start, sent = state.tensors[key], plain.tensors[key]
        rest = torch.ones(len(sent), dtype=torch.bool)
        rest[torch.from_numpy(rows)] = False
        assert torch.equal(sent[rest], start[rest]), key
        if not key.endswith(("running_mean", "running_var", "tracked")):
            step = (sent - start).abs().max() / 127
            assert float((coded.tensors[key] - sent).abs().max()) <= step * 1.01, key
            moved += bool(step > 0)
    assert moved > 3


def test_blocks_grow_until_the_rest_fits_the_weakest_device() -> None:
    """0:3 keeps 90 bytes, of which the two blocks of its head keep 60 times their width."""
    least = (Budget(memory=0.84), Budget(memory=0.99), Budget(time=0.01))
    strategy = STRATEGIES["slt"](PlainTables(least=least), each=2)
    plans = [strategy.plan(situation(index, memory=0.84)) for index in range(6)]
    grown = [GrowingWork(0, 3, 0.75)] * 2 + [GrowingWork(1, 3, 1.0)] * 4
    assert [plan and plan.work for plan in plans] == grown
    assert strategy.plan(situation(0, memory=0.8)) is None, "it is enforced"
    everybody = STRATEGIES["slt"](PlainTables(least=(Budget(time=1.0),)), each=2)
    plan = everybody.plan(situation(0))
    assert plan is not None
    assert plan.work == GrowingWork(0, 3, 1.0)


def test_networks_that_it_cannot_narrow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="those of a Transformer share their width"):
        STRATEGIES["slt"](PlainTables(is_text=True))

    def normed(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
        model, example = network(num_classes, width)
        assert isinstance(model, nn.Sequential)
        model[1][1] = nn.GroupNorm(1, round(HIDDEN * width))
        return model, example

    monkeypatch.setitem(MODELS, "normed", normed)
    settings = {
        "model": {"name": "normed"},
        "tables.spans": "analytic",
        "tables.widths": "analytic",
    }
    groups = [{"name": "weak", "memory": 0.6}]
    experiment = Experiment().changed(settings | {"devices.groups": groups}).with_strategy("slt")
    with pytest.raises(InvalidModel, match="normed has a GroupNorm"):
        Setup(experiment).job()
