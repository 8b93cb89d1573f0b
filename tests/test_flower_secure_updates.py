"""Contributions as whole numbers: their sums come to what merging them one by one does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Span, split
from cocofl.errors import RejectedUpdate
from cocofl.fl.merge import Mean
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.flower.secure_sum import Sum
from cocofl.flower.secure_updates import LIMIT, MOST_SAMPLES, SummableUpdates
from cocofl.flower.updates import Contract

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
CHAIN = split(NET, torch.randn(6, 4))
CONTRACT = Contract(CHAIN)
UPDATES = SummableUpdates(CONTRACT, len(CHAIN), least=3)
STATE = {slot.key: torch.rand(slot.shape) for slot in CONTRACT.slots(Span(0, len(CHAIN)))}


def device(blocks: Span, samples: int, seed: int, size: float = 0.1) -> Contribution:
    """What a device may well have trained."""
    rng = torch.Generator().manual_seed(seed)
    tensors: Tensors = {
        slot.key: STATE[slot.key] + size * torch.rand(slot.shape, generator=rng)
        for slot in CONTRACT.slots(blocks)
    }
    scales = {
        slot.key: 1e-7 * 10 ** (6 * torch.rand((), generator=rng))
        for slot in CONTRACT.scales(blocks)
    }
    return Contribution(tensors | scales, samples, loss=0.5 * seed)


def added(contributions: list[Contribution]) -> dict[int, Sum]:
    """As secure aggregation adds them up."""
    sums: dict[int, Sum] = {}
    for one in contributions:
        for block, numbers in UPDATES.numbers(one, STATE).items():
            before = sums.get(block, Sum(np.zeros_like(numbers), 0))
            sums[block] = Sum(before.numbers + numbers, before.devices + 1)
    return sums


def test_the_merge_of_a_sum_is_the_merge_of_all() -> None:
    sent = [device(Span(0, 2), 50, 1), device(Span(0, 1), 50, 2), device(Span(1, 2), 50, 3)]
    together = UPDATES.contribution(added(sent), STATE)
    assert (together.samples, together.loss) == (150, 1.0)
    merged, plain = (Mean()(ServerState(STATE), one).tensors for one in ([together], sent))
    assert merged.keys() == plain.keys()
    for key, tensor in plain.items():
        bound = 1e-6 if key.startswith("scales.") else 0.0
        torch.testing.assert_close(merged[key], tensor, rtol=bound, atol=2**-25 + 1e-7)


def test_a_device_with_more_samples_weighs_more_but_its_scales_do_not() -> None:
    few, many = device(Span(0, 2), 10, 1), device(Span(0, 2), 990, 2)
    together = UPDATES.contribution(added([few, many]), STATE)
    key = CONTRACT.slots(Span(0, 1))[0].key
    expected = 0.01 * few.tensors[key].double() + 0.99 * many.tensors[key].double()
    torch.testing.assert_close(together.tensors[key], expected, rtol=0, atol=2**-25 + 1e-7)
    scale = CONTRACT.scales(Span(0, 2))[0].key
    mean = (few.tensors[scale] + many.tensors[scale]) / 2
    assert float(together.tensors[scale]) == pytest.approx(float(mean), rel=1e-5)


def test_the_units_are_as_fine_as_told() -> None:
    sent = [device(Span(0, 2), MOST_SAMPLES, seed, size=200.0) for seed in range(1, 6)]
    together = UPDATES.contribution(added(sent), STATE)
    for slot in CONTRACT.slots(Span(0, 2)):
        exact = torch.stack([one.tensors[slot.key].double() for one in sent]).mean(0)
        assert float((together.tensors[slot.key] - exact).abs().max()) <= 2**-25


def test_what_is_too_large_is_cut_so_that_a_thousand_devices_fit() -> None:
    one = device(Span(0, 2), 10**9, 1, size=1e9)
    numbers = UPDATES.numbers(one, STATE)[0].view(np.int64)
    assert np.abs(numbers).max() * 1024 <= 2**62
    found = UPDATES.contribution(added([one] * 4), STATE)
    assert found.samples == 4 * MOST_SAMPLES
    key = CONTRACT.slots(Span(0, 1))[0].key
    assert float((found.tensors[key] - STATE[key]).max()) == pytest.approx(LIMIT)


def test_a_scale_that_nobody_measured_is_left_out() -> None:
    sent = device(Span(0, 2), 5, 1)
    without = Contribution({k: t for k, t in sent.tensors.items() if k[:7] != "scales."}, 5)
    found = UPDATES.contribution(added([without, without]), STATE)
    assert found.tensors.keys() == without.tensors.keys()


def test_training_that_broke_down_is_not_sent() -> None:
    broken = device(Span(0, 2), 5, 1)
    key = next(iter(broken.tensors))
    tensors = {**broken.tensors, key: torch.full_like(broken.tensors[key], torch.nan)}
    with pytest.raises(RejectedUpdate, match="NaN"):
        UPDATES.numbers(Contribution(tensors, 5), STATE)


@pytest.mark.parametrize(
    ("block", "at", "value", "reason"),
    [
        (2, 0, 0, "samples"),
        (2, 0, 2**40, "samples"),
        (0, 0, 2**60, "what no devices send"),
        (1, -2, 7, "measured 7 times"),
        (1, -1, -(2**50), "on average"),
    ],
)
def test_a_sum_that_no_honest_devices_make_is_refused(
    block: int, at: int, value: int, reason: str
) -> None:
    sums = added([device(Span(0, 2), 5, seed) for seed in (1, 2, 3)])
    sums[block].numbers[at] = np.int64(value).astype(np.uint64)
    with pytest.raises(RejectedUpdate, match=reason):
        UPDATES.contribution(sums, STATE)


def test_a_negative_variance_is_refused() -> None:
    low = device(Span(0, 2), 5, 1)
    (key,) = [key for key in low.tensors if key.endswith("running_var")]
    tensors = {**low.tensors, key: -torch.ones(8)}
    with pytest.raises(RejectedUpdate, match="negative variance"):
        UPDATES.contribution(added([Contribution(tensors, 5)] * 3), STATE)
