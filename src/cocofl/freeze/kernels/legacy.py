"""int8 through ``torch.ops.quantized``: fbgemm on x86, qnnpack on ARM.

PyTorch has announced the removal of the quantized dtypes this needs. Nothing needs it: where it is
missing, or left out (``COCOFL_WITHOUT=legacy``), the others do its work. It is one file, so that it
can be deleted.

These operators cannot add before they round, so a sum is rounded twice here, and they cannot
return float32, so such maps run as the reference does. So do depthwise convolutions on fbgemm,
whose kernels for them sum pairs of products in int16 on every processor.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from cocofl.freeze.kernels.base import (
    REFERENCE,
    Kernel,
    LinearMap,
    Prepared,
    bits_with,
    finished,
    grid_before_adding,
    is_x86,
)
from cocofl.numerics import Codes, Grid

_SEVEN_BITS = 63  # the largest code of a 7-bit weight


@cache
def _silence_deprecation() -> None:
    # PyTorch warns once, when the first quantized tensor is made: let it be here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


def _prepare(linear_map: LinearMap, engine: str) -> Prepared:
    if engine == "fbgemm" and _sums_in_int16(linear_map):
        return REFERENCE.prepare(linear_map)
    _silence_deprecation()
    ops, geometry, relu = torch.ops.quantized, linear_map.geometry, linear_map.relu
    weight = torch._make_per_channel_quantized_tensor(
        linear_map.weight.codes.contiguous(),
        linear_map.weight.scale.double(),
        torch.zeros(linear_map.weight.scale.shape, dtype=torch.int64),
        0,
    )
    previous = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        if geometry is None:
            packed = ops.linear_prepack(weight, linear_map.bias)
            plain, rectified = ops.linear.default, ops.linear_relu.default
        else:
            walk = [list(geometry.stride), list(geometry.padding), list(geometry.dilation)]
            packed = ops.conv2d_prepack(weight, linear_map.bias, *walk, geometry.groups)
            plain, rectified = ops.conv2d.new, ops.conv2d_relu.new
    finally:
        torch.backends.quantized.engine = previous
    in_float = REFERENCE.prepare(linear_map)

    def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        if out is None:
            return in_float(x, out, addend)
        boxed = torch._make_per_tensor_quantized_tensor(x.values, x.grid.scale, x.grid.zero_point)
        if addend is None:
            y = (rectified if relu else plain)(boxed, packed, out.scale, out.zero_point)
            return Codes(y.int_repr(), out)
        wide = grid_before_adding(out, addend)
        part = Codes(plain(boxed, packed, wide.scale, wide.zero_point).int_repr(), wide)
        return finished(part.dequantize(), addend, out, relu=relu)

    return run


def _sums_in_int16(linear_map: LinearMap) -> bool:
    """Whether this is a depthwise convolution with weights so large that int16 overflows."""
    depthwise = linear_map.geometry is not None and linear_map.geometry.groups > 1
    codes = linear_map.weight.codes
    return depthwise and codes.shape[1] == 1 and int(codes.abs().max()) > _SEVEN_BITS


def _missing(engine: str) -> str | None:
    engines = getattr(getattr(torch.backends, "quantized", None), "supported_engines", ())
    if engine not in engines or not hasattr(torch, "_make_per_tensor_quantized_tensor"):
        return f"this build of PyTorch has no {engine}"
    # PyTorch lists it for ARM, too, where it raises.
    return "fbgemm is for x86 only" if engine == "fbgemm" and not is_x86() else None


FBGEMM = Kernel(
    "legacy-fbgemm",
    lambda m: _prepare(m, "fbgemm"),
    lambda: _missing("fbgemm"),
    integer=True,
    weight_bits=lambda: bits_with("avx512_vnni"),  # it does not use AVX-VNNI
)
QNNPACK = Kernel(
    "legacy-qnnpack", lambda m: _prepare(m, "qnnpack"), lambda: _missing("qnnpack"), integer=True
)
NATIVE = FBGEMM if is_x86() else QNNPACK
