"""The definition of the numbers (``reference``), and the same in bfloat16.

Codes are dequantized, multiplied in floating point, and quantized again. ``reference`` runs on
every device, CUDA included, and every other kernel is tested against it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.freeze.kernels.base import Kernel, LinearMap, Prepared
from cocofl.numerics import Codes, Grid, as_float, quantize


def _prepare(linear_map: LinearMap, dtype: torch.dtype) -> Prepared:
    weight, geometry = linear_map.weight, linear_map.geometry
    bias = None if linear_map.bias is None else linear_map.bias.to(dtype)

    def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        values, w = x.dequantize().to(dtype), weight.dequantize().to(dtype)
        if geometry is None:
            y = F.linear(values, w, bias)
        else:
            g = geometry
            y = F.conv2d(values, w, bias, g.stride, g.padding, g.dilation, g.groups)
        y = y.float()
        if addend is not None:
            y += as_float(addend)
        if linear_map.relu:
            y.relu_()
        return y if out is None else quantize(y, out)

    return run


def _no_fast_bfloat16() -> str | None:
    if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "this processor has no bfloat16 instructions"


REFERENCE = Kernel(
    "reference",
    lambda m: _prepare(m, torch.float32),
    lambda: None,
    integer=False,
    cpu_only=False,
)
BFLOAT16 = Kernel(
    "bfloat16",
    lambda m: _prepare(m, torch.bfloat16),
    _no_fast_bfloat16,
    integer=False,
    cpu_only=False,
)
