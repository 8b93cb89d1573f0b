"""Trained blocks are rewritten to move less memory; the numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cocofl import Span, freeze, split
from cocofl.freeze import Network


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
