"""A cohort computes what its devices compute one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cocofl import BlockChain, InvalidSetting, Span, chain_state, split
from cocofl.fl.merge import Mean
from cocofl.fl.state import Contribution, ServerState
from cocofl.models import MODELS
from cocofl.vector import Adam, Cohort, DeviceWork, Optimizer, Program, Sgd
from cocofl.vector.kernels.choice import KernelSet
from tests.vector.serial import Round, draw_round, spans_of, train_one, with_biases

BATCH, SAMPLES = 8, 40
SIZES = [[8, 8, 5], [8, 8], [8, 3], [8, 8, 8], [6]]
SGD = Sgd(momentum=0.5, weight_decay=0.01, clip=1.0)
ADAM = Adam(weight_decay=0.01, clip=1.0)
NETWORKS = ["mobilenet", "resnet18", "densenet40", "transformer"]


def merged(state, sent):
    contributions = [Contribution(tensors, 8) for tensors, _ in sent]
    return Mean("everyone")(ServerState(state), contributions).tensors


def tiny(name: str, dtype: torch.dtype) -> tuple[BlockChain, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name](10, tiny=True).to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = MODELS[name](10, tiny=True).example_input(SAMPLES)
    x = x.to(dtype) if x.is_floating_point() else x
    return split(model, x[:BATCH]), x, torch.randint(0, 10, (SAMPLES,))


def cohort_of(chain: BlockChain, x: Tensor, y: Tensor, devices: int = 5, **more: Any) -> Cohort:
    options = {"optimizer": SGD, "precision": "fp32"} | more
    return Cohort(chain, lambda i: ((x[i],), y[i]), devices=devices, batch=BATCH, **options)


def serially(
    chain: BlockChain,
    state: dict[str, Tensor],
    one: Round,
    x: Tensor,
    y: Tensor,
    optimizer: Optimizer = SGD,
) -> list[tuple[dict[str, Tensor], float]]:
    found = []
    for d, work in enumerate(one.works):
        batches = [one.indices[s, d, :n] for s, n in enumerate(one.valid[:, d]) if n]
        loaded = [((x[i],), y[i]) for i in batches]
        found.append(train_one(chain, state, work, loaded, optimizer))
    return found


def together(
    cohort: Cohort, state: dict[str, Tensor], one: Round
) -> list[tuple[dict[str, Tensor], float]]:
    known = frozenset(key for key in cohort.program.sites.keys if key in state)
    cohort.train(cohort.rows_of([state]), [known], one.works, one.indices, one.valid)
    losses = cohort.losses.tolist()
    return [
        (cohort.update(cohort.rows_now(d), work), losses[d]) for d, work in enumerate(one.works)
    ]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[key].double() - b[key].double()).abs().max().item() for key in a)


@pytest.mark.parametrize("variant", ["f", "ff"])
@pytest.mark.parametrize(
    ("name", "optimizer", "lr"),
    [
        *[(name, SGD, 0.05) for name in NETWORKS],
        *[(name, ADAM, 0.005) for name in ("mobilenet", "transformer")],
    ],
)
def test_two_rounds_in_float64(name: str, optimizer: Optimizer, lr: float, variant: str) -> None:
    chain, x, y = tiny(name, torch.float64)
    cohort = cohort_of(chain, x, y, devices=6, optimizer=optimizer)  # one place stays empty
    works = [DeviceWork(s, variant, lr * (1 + 0.2 * i)) for i, s in enumerate(spans_of(len(chain)))]
    state = other = with_biases(chain_state(chain))
    for seed in range(2):
        one = draw_round(works, SAMPLES, BATCH, SIZES, seed)
        expected = serially(chain, state, one, x, y, optimizer)
        found = together(cohort, other, one)
        for (a, loss_a), (b, loss_b) in zip(expected, found, strict=True):
            assert largest_difference(a, b) < 1e-9
            assert loss_a == pytest.approx(loss_b, abs=1e-9)
        state = Mean("everyone")(
            ServerState(state), [Contribution(sent, 8) for sent, _ in expected]
        ).tensors
        other = Mean("everyone")(
            ServerState(other), [Contribution(sent, 8) for sent, _ in found]
        ).tensors


@pytest.mark.parametrize("name", ["resnet18", "densenet40", "transformer"])
def test_two_rounds_in_int8(name: str) -> None:
    """On the fly in the first round, with the server's scales in the second."""
    chain, x, y = tiny(name, torch.float32)
    cohort = cohort_of(chain, x, y)
    works = [DeviceWork(span, "qff", 0.05) for span in spans_of(len(chain))]
    state = chain_state(chain)
    for seed in range(2):
        one = draw_round(works, SAMPLES, BATCH, SIZES, seed)
        expected, found = serially(chain, state, one, x, y), together(cohort, state, one)
        for (a, _), (b, _) in zip(expected, found, strict=True):
            weights = [key for key in a if not key.startswith("scales.")]
            assert a.keys() == b.keys()
            assert largest_difference({k: a[k] for k in weights}, {k: b[k] for k in weights}) < 1e-2
        state = Mean("everyone")(
            ServerState(state), [Contribution(sent, 8) for sent, _ in expected]
        ).tensors


@pytest.mark.parametrize("variant", ["f", "ff", "qff"])
@pytest.mark.parametrize("name", ["mobilenet", "transformer"])
def test_blocks_apart(name: str, variant: str) -> None:
    """A middle block beside the last, the ends, and three apart, each beside a span."""
    dtype, tolerance = (torch.float32, 1e-2) if variant == "qff" else (torch.float64, 1e-9)
    chain, x, y = tiny(name, dtype)
    n = len(chain)
    first, middle, last = Span(0, 1), Span(n // 2, n // 2 + 1), Span(n - 1, n)
    sets = [middle | last, first | last, first | middle | last, middle]
    works = [DeviceWork(blocks, variant, 0.05) for blocks in sets]
    cohort, state = cohort_of(chain, x, y), with_biases(chain_state(chain))
    for seed in range(2):
        one = draw_round(works, SAMPLES, BATCH, SIZES[: len(works)], seed)
        expected, found = serially(chain, state, one, x, y), together(cohort, state, one)
        for (a, _), (b, _) in zip(expected, found, strict=True):
            weights = [key for key in a if not key.startswith("scales.")]
            assert a.keys() == b.keys()
            own, others = ({k: sent[k] for k in weights} for sent in (a, b))
            assert largest_difference(own, others) < tolerance
        state = Mean("everyone")(
            ServerState(state), [Contribution(sent, 8) for sent, _ in expected]
        ).tensors


def test_devices_of_different_variants_share_a_cohort() -> None:
    chain, x, y = tiny("resnet18", torch.float32)
    cohort = cohort_of(chain, x, y)
    spans, variants = spans_of(len(chain)), ["f", "ff", "qff", "ff", "f"]
    works = [DeviceWork(s, v, 0.05) for s, v in zip(spans, variants, strict=True)]
    one = draw_round(works, SAMPLES, BATCH, SIZES)
    state = chain_state(chain)
    expected, found = serially(chain, state, one, x, y), together(cohort, state, one)
    for (a, _), (b, _) in zip(expected, found, strict=True):
        assert largest_difference(a, b) < 1e-3


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_what_a_device_freezes_keeps_its_bits(optimizer: Optimizer) -> None:
    chain, x, y = tiny("mobilenet", torch.float32)
    cohort = cohort_of(chain, x, y, optimizer=optimizer)
    works = [DeviceWork(span, "qff", 0.05) for span in spans_of(len(chain))]
    rows = cohort.rows_of([chain_state(chain)])
    one = draw_round(works, SAMPLES, BATCH, SIZES)
    cohort.train(rows, [frozenset()], works, one.indices, one.valid)
    for kind, before, after in (
        (cohort.program.layout.parameters, rows.parameters, cohort.parameters),
        (cohort.program.layout.statistics, rows.statistics, cohort.statistics),
    ):
        for slot in dict.fromkeys(kind.by_key.values()):
            for d, work in enumerate(works):
                same = torch.equal(slot.of(before)[0], slot.of(after)[d])
                assert same == (slot.block not in work.blocks)


def test_samples_that_do_not_count_change_nothing() -> None:
    chain, x, y = tiny("mobilenet", torch.float64)
    works = [DeviceWork(Span(0, len(chain)), "f", 0.1)]
    one = draw_round(works, SAMPLES, BATCH, [[5, 3]])
    cohort = cohort_of(chain, x, y, devices=1)
    first, _ = together(cohort, chain_state(chain), one)[0]
    one.indices[0, 0, 5:] = 17  # other padding
    one.indices[1, 0, 3:] = 23
    second, _ = together(cohort, chain_state(chain), one)[0]
    assert largest_difference(first, second) == 0


def test_dropout_is_active_where_a_block_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    x, y = torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,))
    chain = split(model, x[:BATCH])
    n = len(chain)
    works = [DeviceWork(Span(0, n), "ff", 0.1), DeviceWork(Span(n - 1, n), "ff", 0.1)]
    one = draw_round(works, SAMPLES, BATCH, [[8], [8]])
    cohort = cohort_of(chain, x, y, devices=2)
    torch.manual_seed(1)
    first = together(cohort, chain_state(chain), one)
    torch.manual_seed(2)
    second = together(cohort, chain_state(chain), one)
    assert largest_difference(first[0][0], second[0][0]) > 0
    assert largest_difference(first[1][0], second[1][0]) == 0


def test_states_of_several_seeds_train_side_by_side() -> None:
    chain, x, y = tiny("resnet18", torch.float64)
    states = [chain_state(chain), {k: t * 1.1 for k, t in chain_state(chain).items()}]
    works = [DeviceWork(Span(0, 2), "ff", 0.1, state=i) for i in (0, 1)]
    one = draw_round(works, SAMPLES, BATCH, [[8, 8], [8, 8]])
    cohort = cohort_of(chain, x, y, devices=2)
    nothing: frozenset[str] = frozenset()
    rows = cohort.rows_of(states)
    cohort.train(rows, [nothing, nothing], works, one.indices, one.valid)
    for d, work in enumerate(works):
        loaded = [((x[one.indices[s, d]],), y[one.indices[s, d]]) for s in range(2)]
        expected, _ = train_one(chain, states[d], work, loaded, SGD)
        assert largest_difference(expected, cohort.update(cohort.rows_now(d), work)) < 1e-9


def test_too_many_devices_and_unknown_precisions_are_refused() -> None:
    chain, x, y = tiny("resnet18", torch.float32)
    with pytest.raises(InvalidSetting, match="unknown precision 'fp16'; expected one of fp32"):
        cohort_of(chain, x, y, precision="fp16")
    cohort = cohort_of(chain, x, y, devices=1)
    works = [DeviceWork(Span(0, 1), "f", 0.1)] * 2
    one = draw_round(works, SAMPLES, BATCH, [[8], [8]])
    with pytest.raises(InvalidSetting, match="2 devices in a cohort with room for 1"):
        together(cohort, chain_state(chain), one)


def test_states_survive_as_rows() -> None:
    chain, x, y = tiny("mobilenet", torch.float32)
    cohort = cohort_of(chain, x, y)
    state = chain_state(chain)
    key = cohort.program.sites.keys[3]
    state[key] = torch.tensor(0.25)
    work = DeviceWork(cohort.everything, "f", 0.0)
    again = cohort.update(cohort.rows_of([state]), work)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[k], state[k]) for k in state)
    assert np.isfinite(float(again[key]))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.twice(self.twice(self.first(x).relu()).relu()).relu())
        return y


def test_a_tied_weight_is_not_read_once() -> None:
    """Its gradients are summed up on the way, so none of them may come late."""
    program = Program(split(_Tied(), torch.randn(4, 6)), torch.device("cpu"))
    slots = program.layout.parameters.by_key
    once = {key for key, slot in slots.items() if slot in program.read_once}
    assert {key for key in slots if "twice" in key} == set(slots) - once
    assert len(once) == 4


def test_a_device_that_rests_keeps_its_statistics() -> None:
    """Also where a norm runs device by device: of no samples it would track no number."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.GELU(), nn.Flatten(), nn.Linear(64, 10))
    x, y = torch.randn(SAMPLES, 1, 6, 6), torch.randint(0, 10, (SAMPLES,))
    chain = split(model, x[:BATCH])
    one = draw_round([DeviceWork(Span(0, len(chain)), "f", 0.05)] * 5, SAMPLES, BATCH, SIZES)
    state = chain_state(chain)
    found = together(cohort_of(chain, x, y, devices=6), state, one)
    for (a, _), (b, _) in zip(serially(chain, state, one, x, y), found, strict=True):
        assert largest_difference(a, b) < 1e-5


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_steps_that_only_compile_kernels_leave_nothing_behind(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they compute as well, so what they changed would show."""
    chain, x, y = tiny("mobilenet", torch.float32)
    state = chain_state(chain)
    compilers = []

    @contextmanager
    def nobody_compiles(on: torch.device) -> Iterator[None]:
        compilers.append(on)
        yield

    monkeypatch.setattr("cocofl.vector.training.cohort.compiling_only", nobody_compiles)
    found = []
    for kernels in (KernelSet(), KernelSet(has_triton=True)):
        cohort = cohort_of(chain, x, y, optimizer=optimizer)
        cohort.program.kernels = kernels
        works = [DeviceWork(span, "qff", 0.05) for span in spans_of(len(chain))]
        for seed in (0, 1):
            one = draw_round(works, SAMPLES, BATCH, SIZES, seed)
            cohort.train(cohort.rows_of([state]), [frozenset()], works, one.indices, one.valid)
            ends = [cohort.parameters, cohort.statistics, cohort.measured, cohort.losses]
            found += [tensor.nan_to_num(-1) for tensor in ends]
    assert compilers == [torch.device("cpu")], "a kind of step is compiled once"
    half = len(found) // 2
    for one_way, other_way in zip(found[:half], found[half:], strict=True):
        assert torch.equal(one_way, other_way)
