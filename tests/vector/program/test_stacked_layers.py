"""A layer of many devices computes what each device's own layer computes, and so do gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels.base import Asked, side_by_side
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.program.stacked_layers import Weights, stacked_layer
from cocofl.vector.training.execution import Precision

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

DEVICES, BATCH = 3, 5
SAME = Geometry((1, 1), (1, 1))
# Inputs, filters, image, kernel, and how it walks.
CONVOLUTIONS = {
    "3x3": (64, 64, (8, 8), (3, 3), SAME),
    "3x3 of many": (128, 256, (4, 4), (3, 3), SAME),
    "3x3 strided": (64, 128, (8, 8), (3, 3), Geometry((2, 2), (1, 1))),
    "3x3 to few": (48, 12, (16, 16), (3, 3), SAME),
    "odd": (5, 7, (9, 6), (3, 3), Geometry((2, 2), (1, 1))),
    "no square": (8, 20, (7, 10), (2, 5), Geometry((3, 1), (2, 0))),
    "steps over inputs": (16, 16, (5, 2), (1, 1), Geometry((3, 3), (1, 0))),
    "grouped": (8, 12, (6, 6), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 4)),
    "dilated": (8, 12, (6, 6), (3, 3), Geometry((1, 1), (2, 2), (2, 2))),
    "depthwise": (16, 16, (6, 6), (3, 3), Geometry((2, 2), (1, 1), (1, 1), 16)),
}


def everyone(on: str) -> Asked:
    return Asked(*torch.ones(2, DEVICES, dtype=torch.bool, device=on))


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.cpu().double() - expected).norm() / expected.norm()).item())


def errors(case: str, dtype: torch.dtype, on: str) -> list[float]:
    """Of the result, the images' and the weights' gradients, against float64 one by one."""
    inputs, filters, size, kernel, g = CONVOLUTIONS[case]
    torch.manual_seed(0)
    x = torch.randn(DEVICES, BATCH, inputs, *size).to(dtype)
    forward, backward = torch.randn(2, DEVICES, filters, inputs // g.groups, *kernel).to(dtype)
    own_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    own = forward.to(on, own_dtype).requires_grad_()
    given = x.to(on).requires_grad_()
    weights = Weights(own, forward.to(on, own_dtype), backward.to(on, own_dtype))
    y, _ = stacked_layer(given, weights, g, everyone(on), KernelSet.on(given.device))
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad.to(on))

    expected: list[list[Tensor]] = [[], [], []]
    each = zip(*(t.double() for t in (x, forward, backward, grad)), strict=True)
    for images, w, w_back, from_above in each:
        expected[0].append(F.conv2d(images, w, None, g.stride, g.padding, g.dilation, g.groups))
        found = torch.ops.aten.convolution_backward(
            from_above, images, w_back, None, g.stride, g.padding, g.dilation,
            False, [0, 0], g.groups, [True, True, False],
        )  # fmt: skip
        expected[1].append(found[0])
        expected[2].append(found[1])
    assert given.grad is not None
    assert own.grad is not None
    results = (y.detach(), given.grad, own.grad)
    return [relative(a, torch.stack(b)) for a, b in zip(results, expected, strict=True)]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_plain(case: str) -> None:
    assert max(errors(case, torch.float64, "cpu")) < 1e-12


# float64 stays with PyTorch's own kernels.
@gpu
@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("fp32", torch.float64, 1e-12),
        ("fp32", torch.float32, 1e-5),
        ("tf32", torch.float32, 2e-3),
        ("bf16", torch.bfloat16, 1e-2),
    ],
)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_on_a_gpu(case: str, precision: str, dtype: torch.dtype, tolerance: float) -> None:
    with Precision(precision).active():
        assert max(errors(case, dtype, "cuda")) < tolerance


@gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_gradients_repeat_to_the_bit(precision: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 32, 16, 32, 32, device="cuda")
    own = torch.randn(2, 8, 16, 3, 3, device="cuda").requires_grad_()
    found = []
    for _ in range(2):
        with Precision(precision).active():
            y, _ = stacked_layer(
                x,
                Weights(own, own.detach(), own.detach()),
                SAME,
                everyone("cuda"),
                KernelSet.on(x.device),
            )
            found.append(torch.autograd.grad(y.square().sum(), own)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("dim", [1, 2, 3, -3])
def test_concatenated_images_stay_channels_last(dim: int) -> None:
    parts = [torch.randn(2, 3, 4, 4, 6).permute(0, 1, 4, 2, 3) for _ in range(3)]
    together = side_by_side(parts, dim)
    assert torch.equal(together, torch.cat(parts, dim))
    if dim in {2, -3}:
        assert together.permute(0, 1, 3, 4, 2).is_contiguous()


def test_the_cpu_has_plain_kernels_only() -> None:
    x, kernels = torch.zeros(2, 3, 4, 5, 5), KernelSet.on(torch.device("cpu"))
    for groups in (1, 4):
        w = torch.zeros(2, 4, 4 // groups, 3, 3)
        assert kernels.convolution(x, w.shape[1:], Geometry((1, 1), (1, 1), (1, 1), groups)) is None


@gpu
@pytest.mark.parametrize(
    ("geometry", "ours"),
    [
        (SAME, True),
        (Geometry((3, 1), (0, 4)), True),
        (Geometry((1, 1), (1, 1), (1, 1), 2), False),
        (Geometry((1, 1), (1, 1), (1, 2)), False),
    ],
)
def test_whose_kernels_a_gpu_takes(geometry: Geometry, ours: bool) -> None:
    x = torch.zeros(2, 3, 4, 5, 5, device="cuda")
    w = torch.zeros(2, 4, 4 // geometry.groups, 3, 3, device="cuda")
    kernels = KernelSet.on(x.device)
    with Precision("tf32").active():
        assert (kernels.convolution(x, w.shape[1:], geometry) is not None) == ours
        assert kernels.convolution(x.double(), w.shape[1:], geometry) is None
    with Precision("fp32").active():
        assert kernels.convolution(x, w.shape[1:], geometry) is None


@gpu
@pytest.mark.parametrize("case", ["3x3", "3x3 strided", "depthwise"])
def test_devices_that_do_not_ask(case: str) -> None:
    """The others get what they get in any case, and a weight that nobody trains gets zeros."""
    inputs, filters, size, kernel, g = CONVOLUTIONS[case]
    torch.manual_seed(0)
    x = torch.randn(DEVICES, BATCH, inputs, *size, device="cuda")
    w = torch.randn(DEVICES, filters, inputs // g.groups, *kernel, device="cuda")
    some = Asked(torch.tensor([True, False, True]).cuda(), torch.tensor([False, True, True]).cuda())
    found = []
    for asked in (everyone("cuda"), some):
        given, own = x.clone().requires_grad_(), w.clone().requires_grad_()
        # In fp32 convolutions are PyTorch's, which leave nothing out.
        with Precision("tf32").active():
            weights = Weights(own, own.detach(), own.detach())
            y, _ = stacked_layer(given, weights, g, asked, KernelSet.on(given.device))
            y.square().sum().backward()
        found.append((given.grad, own.grad))
    (values, weights), (some_values, some_weights) = found
    assert values is not None
    assert some_values is not None
    assert weights is not None
    assert some_weights is not None
    assert torch.equal(values[1:], some_values[1:])
    assert torch.equal(weights[::2], some_weights[::2])
    assert not some_weights[1].any()
