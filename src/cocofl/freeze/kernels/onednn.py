"""int8 through the operators behind PyTorch's own int8 inference.

Plain uint8 and int8 tensors go in and out; oneDNN multiplies in int8, accumulates in int32,
and applies bias, addend and ReLU before it rounds to the output codes.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.freeze.kernels.base import (
    REFERENCE,
    Geometry,
    Kernel,
    LinearMap,
    Prepared,
    bits_with,
    finished,
    is_x86,
)
from cocofl.numerics import Codes, Grid, as_float

_FLOAT_GRID = Grid(1.0, 0)  # what oneDNN wants to hear when its output is float32


def _prepare(linear_map: LinearMap) -> Prepared:
    if linear_map.geometry is None:
        return _prepare_linear(linear_map)
    if _errs_on_arm(linear_map, linear_map.geometry):
        return REFERENCE.prepare(linear_map)
    return _prepare_convolution(linear_map, linear_map.geometry)


def _errs_on_arm(linear_map: LinearMap, geometry: Geometry) -> bool:
    """Whether its result would be off by some percent: seen on ARM with SVE, 1×1 in groups."""
    pointwise = linear_map.weight.codes.shape[2:] == (1, 1)
    return pointwise and geometry.groups > 1 and not is_x86()


def _prepare_convolution(linear_map: LinearMap, geometry: Geometry) -> Prepared:
    """A convolution whose input has zero point 0 for oneDNN, whatever it is for us.

    oneDNN's own handling of a zero point costs up to half the time of a convolution. The same
    comes for free as a bias, ``-zero_point * sum(weight)``, once the border is padded with the
    code of zero rather than with code 0.
    """
    zero_point, groups = linear_map.input_zero_point, geometry.groups
    scale, own_bias, codes = linear_map.weight.scale, linear_map.bias, linear_map.weight.codes
    vertical, horizontal = geometry.padding if zero_point else (0, 0)
    border = [horizontal, horizontal, vertical, vertical]
    padding = [0, 0] if zero_point else list(geometry.padding)
    batch, channels, height, width = linear_map.input_shape
    padded_shape = [batch, channels, height + 2 * vertical, width + 2 * horizontal]
    walk = [list(geometry.stride), padding, list(geometry.dilation)]
    # Scales do not change how weights are packed, and PyTorch reads each of them by itself.
    alike = torch.ones(1)
    packed = torch.ops.onednn.qconv_prepack(codes, alike, 1.0, 0, *walk, groups, padded_shape)
    offset: Tensor | None = None
    if zero_point:
        sums = linear_map.weight.sums
        sums = codes.flatten(1).sum(1, dtype=torch.float32) if sums is None else sums
        offset = (sums * -zero_point).mul_(scale)
    no_offsets = _zeros(len(scale))
    relu = "relu" if linear_map.relu else None
    plain = torch.ops.onednn.qconv2d_pointwise.default
    binary = torch.ops.onednn.qconv2d_pointwise.binary

    last = (math.nan, no_offsets)  # a scale from the server stays the same for a whole round

    def biased(input_scale: float) -> Tensor:
        nonlocal last
        if last[0] != input_scale:
            assert offset is not None
            shift = offset * input_scale
            last = input_scale, shift if own_bias is None else shift + own_bias
        return last[1]

    def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        grid, dtype = (_FLOAT_GRID, torch.float32) if out is None else (out, torch.uint8)
        values, bias = x.values, own_bias
        if any(border):
            values = F.pad(values, border, value=zero_point)
        if offset is not None:
            bias = biased(x.grid.scale)
        head = (values, x.grid.scale, 0, packed, scale, no_offsets)
        tail = (bias, *walk, groups, grid.scale, grid.zero_point, dtype)
        if addend is None:
            y = plain(*head, *tail, relu or "none", [], "")
        else:
            # The operator overwrites its addend, which others may still need.
            if out is None:
                added, step, middle = as_float(addend), 1.0, 0
            else:
                assert isinstance(addend, Codes), "oneDNN adds float32 only to a float32 output"
                added, step, middle = addend.values, *astuple(addend.grid)
            added = added.clone(memory_format=torch.channels_last)
            y = binary(*head, added, *tail, step, middle, "sum", 1.0, relu, [], "")
        return y if out is None else Codes(y, out)

    return run


@cache
def _zeros(count: int) -> Tensor:
    """The zero points of weights; nobody writes into them."""
    return torch.zeros(count, dtype=torch.int64)


def _prepare_linear(linear_map: LinearMap) -> Prepared:
    scale, bias, zero_point = linear_map.weight.scale, linear_map.bias, linear_map.input_zero_point
    packed = torch.ops.onednn.qlinear_prepack(linear_map.weight.codes, list(linear_map.input_shape))
    no_offsets = _zeros(len(scale))
    relu = linear_map.relu
    operator = torch.ops.onednn.qlinear_pointwise.default

    def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        alone = addend is None  # it cannot add
        grid, dtype = (out, torch.uint8) if out and alone else (_FLOAT_GRID, torch.float32)
        # The operator reads its input as if it were contiguous, whatever the strides say.
        head = (x.values.contiguous(), x.grid.scale, zero_point, packed, scale, no_offsets, bias)
        after = "relu" if alone and relu else "none"
        y = operator(*head, grid.scale, grid.zero_point, dtype, after, [], "")
        if not alone:
            return finished(y, addend, out, relu=relu)
        return y if out is None else Codes(y, out)

    return run


def _missing() -> str | None:
    if not torch.backends.mkldnn.is_available():
        return "this build of PyTorch has no oneDNN"
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
        return "this build of PyTorch has no int8 oneDNN operators"
    # It takes its code for 256 bits there and ends the process, which no trial in it survives.
    if (bits := torch.cpu.get_capabilities().get("sve_max_length", 0)) > 256:
        return f"its int8 code crashes on ARM with SVE vectors of {bits} bits"
    return None


ONEDNN = Kernel(
    "onednn",
    _prepare,
    _missing,
    integer=True,
    weight_bits=lambda: bits_with("avx512_vnni", "avx_vnni"),
)
