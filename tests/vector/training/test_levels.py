"""Narrower networks inside a cohort compute what they compute by themselves."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cocofl import chain_state, split
from cocofl.fl.merge import Mean
from cocofl.fl.state import Contribution, KeyLayout, ServerState
from cocofl.models import MODELS
from cocofl.models.widths import places
from cocofl.vector import Adam, Cohort, DeviceWork, Optimizer, Sgd
from cocofl.vector.training.levels import factor_row
from tests.vector.serial import Round, draw_round, with_biases

WIDTHS = (0.25, 0.5, 1.0)
BATCH, SAMPLES, LR = 8, 40, 0.05
SIZES = [[8, 8, 5], [8, 8, 8], [8, 3, 8]]
NETWORKS = [
    "mobilenet", "mobilenet-groupnorm", "resnet18", "densenet40", "transformer",
    "transformer-seq2seq",
]  # fmt: skip
SGD = Sgd(momentum=0.5, weight_decay=0.01, clip=1.0)
ADAM = Adam(weight_decay=0.01, clip=1.0)
CLASSES = [(1, 4, 7), None, (0, 2, 3, 4, 5, 6, 8)]  # whose scores count, by device
CASES = [
    *[(name, kind, SGD, LR) for name in NETWORKS for kind in ("heterofl", "fjord")],
    *[(name, "masked", SGD, LR) for name in ("mobilenet", "transformer-seq2seq")],
    *[("transformer", kind, ADAM, LR / 10) for kind in ("heterofl", "fjord")],
    *[
        pytest.param(name, kind, ADAM, LR / 10, marks=pytest.mark.slow)
        for name in ("mobilenet", "mobilenet-groupnorm")
        for kind in ("heterofl", "fjord")
    ],
]


@cache
def network(name: str, width: float) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name](10, width=width, tiny=True).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def samples(model: nn.Module) -> Tensor:
    x: Tensor = model.example_input(SAMPLES)  # type: ignore[operator]
    if x.is_floating_point():
        return x.double()
    x[::3, :5] = 0  # some texts are shorter
    return x


def add_level(cohort: Cohort, full: nn.Module, narrow: nn.Module, x: Tensor) -> Tensor:
    row = factor_row(cohort.program.layout.parameters, places(full, narrow))
    cohort.add_level(row, cohort.program.channels_in(split(narrow, x[:BATCH])))
    return row


def alone(
    name: str, state: dict[str, Tensor], one: Round, device: int, widths: list[float], x: Tensor,
    y: Tensor, settings: Optimizer,
) -> dict[str, Tensor]:  # fmt: skip
    """Parameters of the widest network after steps at ``widths``, each a slice of it."""
    widest = network(name, WIDTHS[device])
    at = places(network(name, 1.0), widest)
    parameters = {
        key: nn.Parameter(state[key][at[key]].clone()) for key, _ in widest.named_parameters()
    }
    optimizer = settings.for_one_device(parameters.values(), one.works[device].lr)
    for step, width in enumerate(widths):
        chosen = one.indices[step, device, : one.valid[step, device]]
        model = network(name, width).train()
        inside = places(widest, model)
        sliced = {key: p[inside[key]] for key, p in parameters.items()}
        optimizer.zero_grad()
        buffers = {key: b.clone() for key, b in model.named_buffers()}
        scores = torch.func.functional_call(model, {**sliced, **buffers}, x[chosen])
        if (present := one.works[device].classes) is not None:
            scores = scores * torch.isin(torch.arange(10), torch.tensor(present))
        F.cross_entropy(scores, y[chosen]).backward()
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    return {key: p.detach() for key, p in parameters.items()}


@pytest.mark.parametrize(("name", "kind", "optimizer", "lr"), CASES)
def test_two_rounds_in_float64(name: str, kind: str, optimizer: Optimizer, lr: float) -> None:
    full = network(name, 1.0)
    x = samples(full)
    y = torch.randint(0, 10, (SAMPLES,), generator=torch.Generator().manual_seed(0))
    chain = split(full, x[:BATCH])
    cohort = Cohort(
        chain,
        lambda i: ((x[i],), y[i]),
        devices=4,
        batch=BATCH,
        optimizer=optimizer,
        precision="fp32",
    )
    slots = cohort.program.layout.parameters
    where = {width: places(full, network(name, width)) for width in WIDTHS}
    for width in WIDTHS:
        add_level(cohort, full, network(name, width), x)
    works = [
        DeviceWork(cohort.everything, "f", lr, level=level, classes=classes)
        for level, classes in enumerate(CLASSES if kind == "masked" else [None] * 3)
    ]
    state = other = with_biases(chain_state(chain))
    for seed in range(2):
        one = draw_round(works, SAMPLES, BATCH, SIZES, seed)
        schedule: NDArray[np.int64] = np.tile(np.arange(3), (3, 1))
        levels = None
        if kind == "fjord":
            schedule = np.random.default_rng(seed).integers(0, [1, 2, 3], (3, 3))
            levels = schedule, torch.zeros(4, 3, cohort.statistics.shape[1]).double()
        cohort.train(cohort.rows_of([other]), [frozenset()], works, one.indices, one.valid, levels)
        expected, found = [], []
        layout = KeyLayout(lambda width, _roll: where[width])
        for d, width in enumerate(WIDTHS):
            widths = [WIDTHS[level] for level in schedule[:, d]]
            a = alone(name, state, one, d, widths, x, y, optimizer)
            b = {
                key: slots.by_key[key].of(cohort.parameters)[d][where[width][key]].clone()
                for key in a
            }
            assert max((a[key] - b[key]).abs().max().item() for key in a) < 1e-9
            expected.append(Contribution(a, 8, width=width))
            found.append(Contribution(b, 8, width=width))
        state = Mean("senders")(ServerState(state, layout), expected).tensors
        other = Mean("senders")(ServerState(other, layout), found).tensors


def test_a_place_that_a_narrower_network_lacks_stays_zero() -> None:
    full = network("resnet18", 1.0)
    x, y = full.example_input(SAMPLES).double(), torch.zeros(SAMPLES).long()  # type: ignore[operator]
    chain = split(full, x[:BATCH])
    cohort = Cohort(chain, lambda i: ((x[i],), y[i]), devices=1, batch=BATCH, precision="fp32")
    row = add_level(cohort, full, network("resnet18", 0.25), x)
    works = [DeviceWork(cohort.everything, "f", LR, level=0)]
    one = draw_round(works, SAMPLES, BATCH, [[8, 8]])
    cohort.train(cohort.rows_of([chain_state(chain)]), [frozenset()], works, one.indices, one.valid)
    lacking = cohort.parameters[0][row == 0]
    assert len(lacking) > 0
    assert (lacking == 0).all()


def test_there_is_room_for_any_number_of_widths() -> None:
    full = network("resnet18", 1.0)
    x, y = full.example_input(SAMPLES).double(), torch.zeros(SAMPLES).long()  # type: ignore[operator]
    chain = split(full, x[:BATCH])
    cohort = Cohort(chain, lambda i: ((x[i],), y[i]), devices=3, batch=BATCH, precision="fp32")
    slots = cohort.program.layout.parameters
    widths = [0.1 + 0.05 * i for i in range(18)]
    wheres = [places(full, MODELS["resnet18"](10, width=w, tiny=True)) for w in widths]
    rows = [factor_row(slots, where) for where in wheres]
    assert [cohort.add_level(row, {}) for row in rows] == list(range(18))
    assert cohort.levels is not None
    found = cohort.levels.hold([0, 17, None])
    assert torch.equal(found[0], rows[0] != 0)
    assert torch.equal(found[1], rows[17] != 0)
    assert found[2].all()


def test_levels_know_how_many_channels_values_have() -> None:
    full = network("transformer", 1.0)
    x, y = samples(full), torch.zeros(SAMPLES).long()
    chain = split(full, x[:BATCH])
    cohort = Cohort(chain, lambda i: ((x[i],), y[i]), devices=2, batch=BATCH, precision="fp32")
    assert sorted(cohort.program.channels.values()) == [8, 8, 16, 16, 16, 16]  # heads and norms
    for _ in range(9):  # more than there is room for at first
        add_level(cohort, full, network("transformer", 0.25), x)
    assert cohort.levels is not None
    cohort.levels.hold([8, None])
    found = cohort.levels.channels()
    assert {tuple(n.tolist()) for n in found.values()} == {(2, 8), (4, 16)}


@pytest.mark.parametrize("name", ["transformer", "transformer-seq2seq"])
def test_narrower_transformers_train_with_dropout(name: str) -> None:
    torch.manual_seed(0)
    full, narrow = (MODELS[name](10, width=width, tiny=True) for width in (1.0, 0.5))
    x, y = full.example_input(SAMPLES), torch.zeros(SAMPLES).long()
    chain = split(full, x[:BATCH])
    cohort = Cohort(chain, lambda i: ((x[i],), y[i]), devices=2, batch=BATCH, precision="fp32")
    row = add_level(cohort, full, narrow, x)
    works = [DeviceWork(cohort.everything, "f", LR, level=level) for level in (0, None)]
    one = draw_round(works, SAMPLES, BATCH, [[8] * 10] * 2)
    states = cohort.rows_of([chain_state(chain)])
    cohort.train(states, [frozenset()], works, one.indices, one.valid)
    assert bool(torch.isfinite(cohort.parameters).all())
    assert not cohort.parameters[0][row == 0].any()
    assert float(cohort.losses.max()) < 2.3  # of ten classes drawn at random: log 10
