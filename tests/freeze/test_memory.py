"""What a device trained with is gone when it has sent its update."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from cocofl import Span, freeze, split
from cocofl.profiling.memory import peak_tensor_bytes


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


class Residual(nn.Module):
    """Much arithmetic of which autograd keeps one result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 0.5 * self.up(x) + 1
        return x + self.down(torch.tanh(hidden - 2) / 3)


def test_float_operations_of_a_passing_region_keep_what_backward_reads_and_no_more() -> None:
    x = torch.rand(512, 8)
    chain = split(nn.Sequential(nn.Linear(8, 8), *(Residual() for _ in range(4))), x)

    def peak(span: Span) -> int:
        return peak_tensor_bytes(lambda: freeze(chain, span, backend="reference"), (x,))

    assert peak(Span(0, 1)) < 0.8 * peak(Span(0, len(chain)))
