"""Scales that nobody has sent: measured in the first mini-batch, or beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cocofl import InvalidSetting, Span, calibrate, chain_state, freeze, split
from cocofl.freeze import FrozenNet, adapt, steps

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 1, 0])


def unit(inside: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


@pytest.fixture
def chain() -> Any:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 2))
    return split(nn.Sequential(unit(3, 5), unit(5, 6), unit(6, 7), head), IMAGES)


@pytest.fixture
def on_the_fly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tensors were scaled on the fly since it was asked last."""
    count, scaled = [0], steps.quantize_on_the_fly

    def noted(x: Tensor, **options: Any) -> Any:
        count[0] += 1
        return scaled(x, **options)

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(steps, "quantize_on_the_fly", noted)
    return since


def step(net: FrozenNet, x: Tensor = IMAGES) -> Tensor:
    y = net(x)
    y.square().sum().backward()
    return y.detach()


@pytest.mark.parametrize(("span", "borders"), [(Span(3, 4), 1), (Span(0, 1), 1), (Span(1, 2), 2)])
def test_from_the_second_step_on_only_borders_are_scaled_on_the_fly(
    span, borders, chain, on_the_fly
):
    net = freeze(chain, span, backend="reference")
    before = step(net)
    assert on_the_fly() > borders
    after = step(net)
    assert on_the_fly() <= borders
    torch.testing.assert_close(before, after, atol=0.05, rtol=0.05)


def test_it_computes_as_if_its_scales_had_been_sent(chain):
    net, state = freeze(chain, Span(3, 4), backend="reference"), chain_state(chain)
    step(net)
    (region,) = [part.run for part in net._parts if part.blocks == range(3)]
    grids = {one.name: one._grid for one in region._steps if one._grid is not None}
    assert len(grids) == 2  # what leaves the region is float, and so is what enters
    for name, grid in grids.items():
        state[f"scales.{name}.output"] = torch.tensor(grid.scale * 255 / 127 / 2)
    other = freeze(chain, Span(3, 4), backend="reference", state=state, calibrate=False)
    assert torch.equal(net(IMAGES), other(IMAGES))


def test_what_was_sent_is_not_measured_again(chain):
    key = "scales.0._0_2.output"
    net = freeze(
        chain, Span(3, 4), backend="reference", state=chain_state(chain) | {key: torch.tensor(9.0)}
    )
    step(net)
    (region,) = [part.run for part in net._parts if part.blocks == range(3)]
    assert next(one for one in region._steps if one.name == "0._0_2")._grid.scale > 8


def test_an_update_has_the_scales_of_trained_blocks_only(chain):
    net = freeze(chain, Span(1, 2), backend="reference")
    step(net)
    assert not [key for key in net.update().tensors if key.startswith("scales.")]


def test_a_broken_batch_says_nothing_about_scales(chain, on_the_fly):
    net = freeze(chain, Span(1, 2), backend="reference")
    step(net, IMAGES * torch.nan)
    on_the_fly()
    step(net)
    assert on_the_fly() > 2
    step(net)
    assert on_the_fly() <= 2


def test_evaluation_leaves_gradients_to_be_measured(chain, on_the_fly):
    net = freeze(chain, Span(0, 1), backend="reference")
    with torch.no_grad():
        net(IMAGES)
    step(net)
    on_the_fly()
    step(net)
    assert on_the_fly() <= 1


def test_calibrating_beforehand(chain, on_the_fly):
    before = chain_state(chain)
    state = calibrate(chain, [(IMAGES, LABELS)])
    for span in (Span(3, 4), Span(0, 1)):
        step(freeze(chain, span, backend="reference", state=state))
        assert on_the_fly() <= 1
    assert all(torch.equal(t, chain_state(chain)[key]) for key, t in before.items())


def test_the_largest_scale_of_all_batches_counts(chain):
    def scale(*factors: float) -> float:
        state = calibrate(chain, [(factor * IMAGES, LABELS) for factor in factors])
        return float(state["scales.0._0_2.output"])

    assert scale(1.0) < scale(3.0) == scale(3.0, 1.0) == scale(1.0, 3.0)


def test_calibrating_on_nothing(chain):
    with pytest.raises(InvalidSetting, match="at least one mini-batch"):
        calibrate(chain, [])


def test_calibrating_a_network_with_adapters(chain, on_the_fly):
    adapted = adapt(chain, 2)
    state = calibrate(adapted, [(IMAGES, LABELS)])
    assert any(key.startswith("scales.0.") for key in state)
    freeze(adapted, Span(3, 4), backend="reference", state=state)(IMAGES)
    assert on_the_fly() <= 2
