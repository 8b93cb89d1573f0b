import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocofl.numerics import (
    Codes,
    Grid,
    as_float,
    grid_for,
    measure_scale,
    quantize,
    quantize_on_the_fly,
    quantize_weight,
)

numbers = st.lists(st.floats(-1e4, 1e4, allow_nan=False, width=32), min_size=1, max_size=40).map(
    torch.tensor
)
steps = st.floats(1e-3, 1e3)
zero_points = st.sampled_from([0, 1, 100, 128, 255])


def test_literal_codes_on_a_signed_grid():
    codes = quantize(torch.tensor([-64.0, -0.5, 0.0, 0.25, 0.75, 63.5]), Grid(0.5, 128))
    assert codes.values.tolist() == [0, 127, 128, 128, 130, 255]  # 0.25 / 0.5 is half: to even
    assert codes.values.dtype == torch.uint8
    assert codes.dequantize().tolist() == [-64.0, -0.5, 0.0, 0.0, 1.0, 63.5]


def test_literal_codes_on_an_unsigned_grid():
    codes = quantize(torch.tensor([-3.0, 0.0, 1.0, 254.6, 300.0]), Grid(1.0, 0))
    assert codes.values.tolist() == [0, 0, 1, 255, 255]


@given(numbers, steps, zero_points)
def test_inside_the_range_a_round_trip_is_off_by_half_a_step_at_most(x, step, zero_point):
    grid = Grid(step, zero_point)
    x = x.clamp(-step * zero_point, step * (255 - zero_point))
    error = (quantize(x, grid).dequantize() - x).abs().max()
    assert error <= step / 2 + 1e-5 * x.abs().max()


@given(numbers, steps, zero_points)
def test_what_the_grid_cannot_hold_saturates(x, step, zero_point):
    low, high = -step * zero_point, step * (255 - zero_point)
    held = quantize(x, Grid(step, zero_point)).dequantize()
    nearest = x.clamp(low, high)
    assert (held - nearest).abs().max() <= step / 2 + 1e-5 * nearest.abs().max()


@given(steps, zero_points)
def test_zero_is_exact_on_every_grid(step, zero_point):
    codes = quantize(torch.zeros(3), Grid(step, zero_point))
    assert codes.values.tolist() == [zero_point] * 3
    assert codes.dequantize().tolist() == [0.0] * 3


@given(numbers, st.booleans())
def test_on_the_fly_nothing_saturates(x, unsigned):
    x = x.abs() if unsigned else x
    codes = quantize_on_the_fly(x, unsigned=unsigned)
    assert codes.grid.zero_point == (0 if unsigned else 128)
    largest = x.abs().max()
    step = largest / (255 if unsigned else 127)
    assert (codes.dequantize() - x).abs().max() <= 0.501 * step + 1e-18


@pytest.mark.parametrize("unsigned", [False, True])
def test_all_zeros_stay_zeros(unsigned):
    assert measure_scale(torch.zeros(4)) == 0
    codes = quantize_on_the_fly(torch.zeros(4), unsigned=unsigned)
    assert codes.dequantize().tolist() == [0.0] * 4


def test_not_a_number_does_not_turn_into_a_number():
    held = quantize_on_the_fly(torch.tensor([1.0, float("nan")])).dequantize()
    assert held.isnan().all()


def test_headroom_widens_a_grid_and_an_unsigned_one_is_twice_as_fine():
    assert grid_for(0.1) == Grid(0.1, 128)
    assert grid_for(0.1, headroom=2.0) == Grid(0.2, 128)
    assert grid_for(255 / 127, unsigned=True) == Grid(1.0, 0)
    assert grid_for(255 / 127, unsigned=True, headroom=2.0) == Grid(2.0, 0)


def test_a_scale_is_the_largest_magnitude_over_127():
    assert measure_scale(torch.tensor([-254.0, 127.0])) == 2.0
    assert measure_scale(torch.tensor([-1.0, 127.0])) == 1.0
    assert not measure_scale(torch.ones(2, requires_grad=True)).requires_grad


def images() -> torch.Tensor:
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))


def test_channels_last_stays_channels_last():
    x = images().contiguous(memory_format=torch.channels_last)
    codes = quantize_on_the_fly(x)
    assert codes.values.is_contiguous(memory_format=torch.channels_last)
    assert codes.dequantize().is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 3),
        lambda x: x[:, ::2, 1:, ::3],
        lambda x: x[:1, :1].expand(2, 3, 4, 5),
        lambda x: x[0, 0, 0, 0],
    ],
)
def test_strides_do_not_matter(view):
    x, grid = view(images()), Grid(0.01, 128)
    assert torch.equal(quantize(x, grid).values, quantize(x.clone().contiguous(), grid).values)


def test_quantizing_leaves_its_input_alone():
    x = images()
    quantize_on_the_fly(x)
    assert torch.equal(x, images())


def test_codes_and_floats_both_read_as_floats():
    x, codes = torch.ones(2), Codes(torch.tensor([130], dtype=torch.uint8), Grid(0.5, 128))
    assert as_float(x) is x
    assert as_float(codes).tolist() == [1.0]
    assert codes.dequantize().tolist() == [1.0]


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 99), st.sampled_from([7, 8]))
def test_a_weight_is_off_by_half_a_step_of_its_own_channel(out, inside, seed, bits):
    weight = torch.randn(out, inside, generator=torch.Generator().manual_seed(seed))
    weight *= torch.logspace(-3, 3, out)[:, None]  # every channel has a range of its own
    quantized = quantize_weight(weight, bits)
    largest = {7: 63, 8: 127}[bits]
    assert quantized.codes.dtype == torch.int8
    assert quantized.codes.abs().amax(1).tolist() == [largest] * out
    torch.testing.assert_close(quantized.scale, weight.abs().amax(1) / largest)
    error = (quantized.dequantize() - weight).abs()
    assert (error <= 0.501 * quantized.scale[:, None]).all()


def test_a_channel_of_zeros_has_zero_codes():
    weight = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    quantized = quantize_weight(weight)
    assert quantized.codes.tolist() == [[0, 0], [64, 127]]
    assert quantized.dequantize()[0].tolist() == [0.0, 0.0]


def test_a_weight_may_have_any_strides():
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(2))
    plain = quantize_weight(weight)
    strided = quantize_weight(weight.contiguous(memory_format=torch.channels_last))
    assert torch.equal(plain.codes, strided.codes)
    turned = quantize_weight(weight[:, :, 0, 0].t())
    assert torch.equal(turned.codes, quantize_weight(weight[:, :, 0, 0].t().contiguous()).codes)
