"""Descent on rows moves each row as PyTorch's optimizers move it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cocofl.vector import Adam, Optimizer, Sgd


@dataclass(frozen=True, kw_only=True)
class SignDescent(Optimizer):
    """An optimizer of one's own: steps of one length along a mean gradient's signs."""

    inertia: float = 0.9

    def memory(self, parameters: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(parameters),)

    def direction(
        self, gradients: Tensor, memory: tuple[Tensor, ...], lr: Tensor, learns: Tensor
    ) -> tuple[Tensor, Tensor]:
        (mean,) = memory
        mean.copy_(torch.where(learns, torch.lerp(gradients, mean, self.inertia), mean))
        return mean.sign(), lr


PLACES = 7
VALID = [[4, 0, 4, 0], [4, 4, 0, 0], [1, 4, 0, 0], [4, 2, 3, 0]]  # by step and device
LR = [0.1, 0.02, 0.3, 0.1]
LEARNS = [PLACES, 4, 5, PLACES]  # the leading places, by device
SETTINGS = [
    Sgd(),
    Sgd(momentum=0.9, weight_decay=0.1, clip=0.5),
    Adam(),
    Adam(weight_decay=0.1, clip=0.5),
    SignDescent(weight_decay=0.1, clip=0.5),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_move_as_each_does_alone(settings: Optimizer) -> None:
    """Devices rest in the middle, at the beginning, for long, and always."""
    torch.manual_seed(0)
    begin = torch.randn(4, PLACES).double()
    gradients = torch.randn(4, 4, PLACES).double()
    learns = torch.arange(PLACES) < torch.tensor(LEARNS)[:, None]
    rows, memory = begin.clone(), settings.memory(begin)
    where = [tensor.data_ptr() for tensor in memory]
    for _ in range(2):  # the second round knows nothing of the first
        rows.copy_(begin)
        for tensor in memory:
            tensor.zero_()
        for valid, gradient in zip(VALID, gradients, strict=True):
            lr = torch.tensor(LR, dtype=torch.float64)
            settings.step(rows, gradient, memory, lr, learns, torch.tensor(valid))
    assert [tensor.data_ptr() for tensor in memory] == where

    for device, n in enumerate(LEARNS):
        alone = nn.Parameter(begin[device, :n].clone())
        optimizer = settings.for_one_device([alone], LR[device])
        for valid, gradient in zip(VALID, gradients, strict=True):
            if valid[device]:
                alone.grad = gradient[device, :n].clone()
                if settings.clip is not None:
                    nn.utils.clip_grad_norm_([alone], settings.clip)
                optimizer.step()
        torch.testing.assert_close(rows[device, :n], alone.data, rtol=1e-12, atol=1e-12)
        assert torch.equal(rows[device, n:], begin[device, n:])
        assert all(not kept[device, n:].any() for kept in memory if kept.ndim == 2)
    assert torch.equal(rows[3], begin[3])


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (Sgd(weight_decay=0.1), partial(torch.optim.SGD, weight_decay=0.1)),
        (Sgd(momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
        (Adam(weight_decay=0.1), partial(torch.optim.Adam, weight_decay=0.1)),
    ],
    ids=str,
)
def test_a_device_alone_descends_with_the_bits_of_pytorch(
    settings: Optimizer, theirs: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    begin = [torch.randn(5, 3), torch.randn(7), torch.randn(2)]
    ours, other = ([nn.Parameter(x.clone()) for x in begin] for _ in range(2))
    ways = ((settings.for_one_device(ours, 0.1), ours), (theirs(other, lr=0.1), other))
    for step in range(3):
        gradients = [torch.randn_like(x) for x in begin]
        for optimizer, parameters in ways:
            optimizer.zero_grad()
            for index, parameter in enumerate(parameters):
                if (step, index) != (0, 1):  # one comes later than the others
                    parameter.grad = gradients[index].clone()
            optimizer.step()
    assert all(map(torch.equal, ours, other))
    assert not any(map(torch.equal, ours, begin))


def test_a_device_alone_leaves_what_has_no_gradient() -> None:
    one, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    optimizer = SignDescent(weight_decay=0.1).for_one_device([one, other], 0.5)
    one.grad = torch.tensor([[1.0, -1.0, 2.0], [-3.0, 4.0, 5.0]])
    optimizer.step()
    assert one.tolist() == [[0.5, 1.5, 0.5], [1.5, 0.5, 0.5]]
    assert other.tolist() == [1.0] * 4


def test_the_first_steps_of_adam_are_corrected_exactly_in_float32() -> None:
    rows, gradient = torch.ones(1, 1), torch.full((1, 1), 0.3)
    alone = nn.Parameter(torch.ones(1))
    adam, other = Adam(), torch.optim.Adam([alone], 0.1)
    memory, learns = adam.memory(rows), torch.ones(1, 1, dtype=torch.bool)
    alone.grad = gradient[0].clone()
    for _ in range(3):
        adam.step(rows, gradient, memory, torch.tensor([0.1]), learns, torch.tensor([1]))
        other.step()
    assert float(rows) == pytest.approx(float(alone.detach()), rel=1e-6)
