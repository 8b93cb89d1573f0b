from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cocofl.freeze.gradient import InputGradient, phases, transposed
from cocofl.freeze.kernels import REFERENCE, Geometry
from cocofl.numerics import Codes, Grid, quantize, quantize_weight

# With weights of -127..127 whose largest magnitude per channel is 127, and gradients of -8..8,
# int8 holds both exactly, float32 adds them exactly, and every comparison below is exact too.
EXACT = Grid(1.0, 128)


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(
        low, high + 1, shape, generator=torch.Generator().manual_seed(seed)
    ).float()


def exact_weight(out: int, per_group: int, groups: int, kernel: tuple[int, ...]) -> Tensor:
    weight = integers(-127, 127, out, per_group, *kernel, seed=1)
    weight.view(groups, out // groups, per_group, -1)[:, 0, :, 0] = 127.0  # per *input* channel
    return weight


def check(
    batch: int, channels: int, out: int, size: tuple[int, int], kernel: tuple[int, int], g: Geometry
) -> None:
    """The gradient in codes equals autograd's, as float32 and as codes, alone and added to."""
    weight = exact_weight(out, channels // g.groups, g.groups, kernel)
    x = torch.zeros(batch, channels, *size, requires_grad=True)
    y = F.conv2d(x, weight, None, g.stride, g.padding, g.dilation, g.groups)
    upstream = integers(-8, 8, *y.shape, seed=2)
    (expected,) = torch.autograd.grad(y, x, upstream)

    shapes = tuple(x.shape), tuple(y.shape)
    quantized = quantize_weight(transposed(weight, g.groups))
    gradient = InputGradient(quantized, g, *shapes, REFERENCE.prepare)
    codes = Codes(
        quantize(upstream, EXACT).values.contiguous(memory_format=torch.channels_last), EXACT
    )
    assert torch.equal(gradient(codes, None, None), expected)

    addend = integers(-9, 9, *x.shape, seed=3)
    assert torch.equal(gradient(codes, None, addend), expected + addend)
    assert torch.equal(addend, integers(-9, 9, *x.shape, seed=3)), "the addend was overwritten"

    wide = Grid(float(expected.abs().max() + 9) / 100, 128)
    for extra in (None, addend, quantize(addend, EXACT)):
        total = expected if extra is None else expected + addend
        found = gradient(codes, wide, extra)
        assert isinstance(found, Codes)
        assert torch.equal(found.values, quantize(total, wide).values)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (1, 3), (5, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 3), (2, 1), (1, 3)])
def test_every_kernel_and_stride(kernel, stride):
    for padding in {(0, 0), (1, 1), (kernel[0] // 2, kernel[1] // 2), kernel}:
        check(2, 2, 3, (9, 8), kernel, Geometry(stride, padding))


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_grouped_and_depthwise(groups, stride):
    check(2, 4, 4, (7, 7), (3, 3), Geometry(stride, (1, 1), (1, 1), groups))
    check(1, 4, 8, (6, 5), (3, 3), Geometry(stride, (1, 1), (1, 1), groups))


@pytest.mark.parametrize("dilation", [(2, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 2), (4, 4)])
def test_dilated(dilation, padding):
    check(2, 2, 2, (9, 9), (3, 3), Geometry((1, 1), padding, dilation))


def test_inputs_that_the_stride_never_reads_get_no_gradient():
    weight = torch.full((1, 1, 1, 1), 127.0)
    g, quantized = Geometry(stride=(2, 2)), quantize_weight(weight)
    gradient = InputGradient(quantized, g, (1, 1, 4, 4), (1, 1, 2, 2), REFERENCE.prepare)
    ones = quantize(torch.ones(1, 1, 2, 2), EXACT)
    row, gap = [127.0, 0.0, 127.0, 0.0], [0.0] * 4
    assert gradient(ones, None, None)[0, 0].tolist() == [row, gap, row, gap]
    coded = gradient(ones, Grid(127.0, 128), None)
    assert coded.values[0, 0, 1].tolist() == [128] * 4


geometries = st.tuples(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),  # kernel
    st.tuples(st.integers(1, 4), st.integers(1, 4)),  # stride
    st.tuples(st.integers(0, 5), st.integers(0, 5)),  # padding
    st.tuples(st.integers(5, 11), st.integers(5, 11)),  # size
    st.sampled_from([(2, 2, 1), (2, 4, 2), (3, 3, 3), (4, 2, 2), (1, 3, 1)]),  # channels
    st.integers(1, 3),  # batch
)


@settings(max_examples=150)
@given(geometries)
def test_any_geometry(drawn):
    kernel, stride, padding, size, (channels, out, groups), batch = drawn
    check(batch, channels, out, size, kernel, Geometry(stride, padding, (1, 1), groups))


@settings(max_examples=60)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.integers(10, 13), st.integers(1, 3)
)
def test_any_dilation(kernel, dilation, padding, size, other):
    check(1, 2, 2, (size, size), (kernel, 2), Geometry((1, 1), (padding, 1), (dilation, other)))


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 4), st.integers(0, 7))
def test_phases_share_out_the_input_and_the_taps(size, kernel, stride, padding):
    result = (size + 2 * padding - kernel) // stride + 1
    if result < 1:
        return
    found = phases(size, result, kernel, stride, padding, 1)
    positions = [p for ph in found for p in range(ph.first, size, stride)]
    assert sorted(positions) == list(range(size))
    taps = sorted(t for ph in found for t in ph.taps)
    assert taps == list(range(kernel)) if size >= stride else len(taps) == len(set(taps))
    assert all(ph.padding >= 0 and ph.skip >= 0 for ph in found)
    assert [ph.count for ph in found] == [len(range(ph.first, size, stride)) for ph in found]


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 3)])
def test_linear(shape):
    weight = integers(-127, 127, 4, 3, seed=1)
    weight[0] = 127.0
    upstream = integers(-8, 8, *shape[:-1], 4, seed=2)
    gradient = InputGradient(
        quantize_weight(transposed(weight)), None, shape, (*shape[:-1], 4), REFERENCE.prepare
    )
    expected, addend = upstream @ weight, integers(-9, 9, *shape, seed=3)
    codes, wide = quantize(upstream, EXACT), Grid(50.0, 128)
    assert torch.equal(gradient(codes, None, None), expected)
    assert torch.equal(gradient(codes, None, addend), expected + addend)
    for extra in (addend, quantize(addend, EXACT)):
        total = quantize(expected + addend, wide)
        assert torch.equal(gradient(codes, wide, extra).values, total.values)


def test_the_weight_is_quantized_anew_per_input_channel():
    # One scale per output channel would leave the second input channel only 1 step of 1/127.
    weight = torch.tensor([[100.0, 0.4]])
    gradient = InputGradient(
        quantize_weight(transposed(weight)), None, (1, 2), (1, 1), REFERENCE.prepare
    )
    found = gradient(quantize(torch.tensor([[1.0]]), EXACT), None, None)
    torch.testing.assert_close(found, weight)


def test_transposing_swaps_channels_within_their_group():
    weight = torch.arange(8.0).view(4, 2, 1, 1)  # two groups of two in, two out
    assert transposed(weight, 2).flatten(1).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    for groups, out in product((1, 2), (2, 4)):
        turned = transposed(torch.zeros(out, 3, 2, 1), groups)
        assert turned.shape == (3 * groups, out // groups, 2, 1)
