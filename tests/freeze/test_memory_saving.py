"""Trained blocks are rewritten to move less memory; the numbers stay."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from torch import nn

from cocofl import Span, freeze, split
from cocofl.freeze import Network
from cocofl.freeze.memory_saving import relu_in_place
from cocofl.models import MODELS


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1)])
def test_pooling_before_relu_and_flattening_change_no_number(pool: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), pool),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 4)),
    )
    x = torch.randn(4, 3, 16, 16)
    chain = split(copy.deepcopy(model), x)
    order = [str(node.target) for node in Network(chain).trained_blocks[0].graph.nodes]
    assert any("relu" in target for target in order[order.index("0.3") :]), order
    net = freeze(chain, Span(0, len(chain)), variant="f").train()
    ours, plain = net(x), model.train()(x)
    torch.testing.assert_close(ours, plain)
    ours.square().sum().backward()
    plain.square().sum().backward()
    for one, other in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def _gradients(model: nn.Module, x: torch.Tensor, *, second: bool) -> list[torch.Tensor]:
    """Of a loss; or of the length of its gradient."""
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    if second:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = gradient.square().sum()
    return list(torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True))


@pytest.mark.parametrize("second", [False, True])
def test_relus_in_place_both_ways_change_no_number(second: bool) -> None:
    """One that a convolution reads, and one whose gradient goes two ways."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.second, self.third = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shared = self.first(x)
            read_once = self.norm(shared).relu()
            summed = (self.second(read_once) + shared).relu()
            return self.third(summed) + summed

    torch.manual_seed(0)
    model = Net()
    x = torch.randn(8, 3, 32, 32)
    chain = split(copy.deepcopy(model), x)
    net = freeze(chain, Span(0, len(chain)), variant="f").train()
    graphs = [block.graph for block in Network(chain).trained_blocks]
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert targets.count(relu_in_place) == 1, targets
    for ours, plain in zip(
        _gradients(net, x, second=second), _gradients(model.train(), x, second=second), strict=True
    ):
        assert (ours is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"checkpoint": True}, {"precision": "bfloat16"}], ids=str)
def test_relus_in_place_give_the_same_bits(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, which are measured beside it, too."""
    module = sys.modules[relu_in_place.__module__]
    torch.manual_seed(0)
    x = MODELS["mobilenet"](10, tiny=True).example_input(8)
    chain = split(MODELS["mobilenet"](10, tiny=True), x)
    found = []
    for worthwhile in (0, math.inf):
        monkeypatch.setattr(module, "_WORTHWHILE", worthwhile)
        net = freeze(chain, Span(0, len(chain)), backend="reference", **how).train()
        for measured in (False, True):
            if measured:
                net.measure_scales()
            torch.nn.functional.cross_entropy(net(x), torch.arange(8)).backward()
        gradients = {key: p.grad for key, p in net.named_parameters()}
        found.append(gradients | net.update().tensors)
    ours, plain = found
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
