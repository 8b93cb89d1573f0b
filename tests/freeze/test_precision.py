"""Blocks trained in bfloat16: their weights, gradients and statistics stay float32."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import BlockChain, InvalidSetting, Span, freeze, split
from cocofl.freeze import BFLOAT16, FLOAT32, VARIANTS, FrozenNet, adapt, precision
from cocofl.freeze.dispatch import OperationWatch
from cocofl.models import MODELS
from cocofl.profiling.memory import peak_tensor_bytes

IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(16) % 10


@pytest.fixture(scope="module")
def chain() -> BlockChain:
    torch.manual_seed(0)
    return split(MODELS["mobilenet"](10, tiny=True), IMAGES)


def frozen(chain: BlockChain, span: Span, variant: str, precision: str) -> FrozenNet:
    return freeze(chain, span, variant=variant, backend="reference", precision=precision)


def stepped(net: FrozenNet) -> dict[str, Tensor]:
    """The gradients and statistics of one step."""
    output = net(IMAGES)
    assert output.dtype is torch.float32
    F.cross_entropy(output, LABELS).backward()
    gradients = {key: p.grad for key, p in net.named_parameters() if p.grad is not None}
    return gradients | dict(net.named_buffers())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("span", [Span(0, 1), Span(2, 4), Span(1, 2) | Span(5, 6)])
def test_a_step_is_near_that_in_float32_and_all_that_stays_is_float32(variant, span, chain):
    exact, rounded = (stepped(frozen(chain, span, variant, p)) for p in (FLOAT32, BFLOAT16))
    assert exact.keys() == rounded.keys()
    for key, value in rounded.items():
        assert value.dtype is exact[key].dtype
        assert value.dtype is not torch.bfloat16
    flat = [torch.cat([x.double().flatten() for x in one.values()]) for one in (exact, rounded)]
    assert not torch.equal(*flat)
    assert F.cosine_similarity(*flat, dim=0) > 0.99


def test_what_is_uploaded_is_float32_with_scales_near_those_of_float32(chain):
    updates = []
    for one in (FLOAT32, BFLOAT16):
        net = frozen(chain, Span(2, 4), "qff", one)
        net.measure_scales()
        stepped(net)
        updates.append(net.update().tensors)
    exact, rounded = updates
    assert exact.keys() == rounded.keys()
    assert all(x.dtype is torch.float32 for x in rounded.values())
    scales = [key for key in exact if key.startswith("scales.")]
    assert scales
    assert all(float(rounded[k]) == pytest.approx(float(exact[k]), rel=0.2) for k in scales)


def test_small_steps_are_not_lost_in_rounding(chain):
    """A bfloat16 weight would not move by a thousandth of itself."""
    net = frozen(chain, Span(2, 3), "f", BFLOAT16)
    before = net.update().tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    stepped(net)
    optimizer.step()
    moved = net.update().tensors
    weights = [key for key in before if key.endswith("expand.weight")]
    assert weights
    for key in weights:
        assert not torch.equal(moved[key], before[key])
        assert torch.equal(moved[key].bfloat16(), before[key].bfloat16())


def test_computed_again_in_backward_it_is_the_same_bits(chain):
    plain, again = (
        stepped(freeze(chain, Span(0, 3), variant="f", precision=BFLOAT16, checkpoint=one))
        for one in (False, True)
    )
    assert all(torch.equal(plain[key], again[key]) for key in plain)


def test_it_takes_less_memory(chain):
    exact, rounded = (
        peak_tensor_bytes(partial(frozen, chain, Span(0, 6), "f", one), (IMAGES,))
        for one in (FLOAT32, BFLOAT16)
    )
    assert rounded < 0.7 * exact


class Convolutions(OperationWatch):
    """Notes of each the stride, the groups, the size of its filters and the type of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            _, weight, _, stride, *_, groups = args
            self.seen.add((max(stride), groups > 1, weight.shape[-1], weight.dtype))
        return func(*args, **kwargs or {})


def test_convolutions_that_are_slow_or_faulty_in_it_stay_float32():
    layers = [
        nn.Conv2d(3, 16, 3, stride=2),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 16, 3, stride=(2, 1), groups=16),
        nn.Conv2d(16, 8, 1, stride=2),
        nn.Conv2d(8, 8, 1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    ]
    net = frozen(split(nn.Sequential(*layers), IMAGES), Span(0, 6), "f", BFLOAT16)
    with Convolutions() as watch:
        stepped(net)
    assert watch.seen == {
        (2, False, 3, torch.bfloat16),
        (1, True, 3, torch.bfloat16),
        (2, True, 3, torch.float32),
        (2, False, 1, torch.float32),
        (1, False, 1, torch.bfloat16),
    }


def test_it_is_described(chain):
    rows = frozen(chain, Span(2, 3), "f", BFLOAT16).describe()
    assert {row.kernel for row in rows if row.role == "trained"} == {BFLOAT16}
    assert {row.kernel for row in rows if row.role != "trained"} == {FLOAT32}


def test_what_is_refused(chain):
    with pytest.raises(InvalidSetting, match="unknown precision 'half'"):
        freeze(chain, Span(0, 1), precision="half")
    with pytest.raises(InvalidSetting, match="adapters are trained in float32"):
        freeze(adapt(chain, 2), Span(2, 3), precision=BFLOAT16)


@pytest.fixture
def told_anew() -> Iterator[None]:
    precision.tell_if_slow.cache_clear()
    yield
    precision.tell_if_slow.cache_clear()


@pytest.mark.usefixtures("told_anew")
@pytest.mark.parametrize(("units", "lines"), [(True, 0), (False, 1)])
def test_a_processor_without_such_units_is_told_once(units, lines, chain, monkeypatch, caplog):
    monkeypatch.setattr(precision, "has_bfloat16_units", lambda: units)
    with caplog.at_level(logging.WARNING, "cocofl"):
        for _ in range(2):
            frozen(chain, Span(0, 1), "f", BFLOAT16)
    assert sum("no bfloat16 instructions" in line for line in caplog.messages) == lines
