"""What a device trained with is gone when it has sent its update."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from cocofl import Span, freeze, split


def test_measuring_scales_keeps_no_network_alive() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net = freeze(split(model, torch.ones(1, 4)), Span(0, 2), backend="reference").train()
    trained = [weakref.ref(block) for block in net.trained]
    net.measure_scales()
    net(torch.rand(3, 4)).sum().backward()
    assert any(key.startswith("scales.") for key in net.update().tensors)
    del net
    gc.collect()
    assert [block() for block in trained] == [None] * len(trained)
