"""What a kernel is: it computes one linear map on codes, and everything else is built of that.

A convolution, a linear layer, a folded BatchNorm and the input gradient of each are all linear
maps with int8 weights, so this one small interface is all a new backend has to fill.

The kernel ``reference`` is the definition of the numbers: codes are dequantized, multiplied in
float32, and quantized again. It runs on every device, CUDA included, and every other kernel is
tested against it. ``bfloat16`` does the same with fewer bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.numerics import LARGEST_CODE, Codes, Grid, QuantizedWeight, as_float, quantize


@dataclass(frozen=True)
class Geometry:
    """How a two-dimensional convolution walks over its input."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


@dataclass(frozen=True, eq=False)
class LinearMap:
    """``y = relu?(weight · x + bias + addend?)`` on codes; linear where geometry is None."""

    weight: QuantizedWeight
    bias: Tensor | None
    geometry: Geometry | None
    relu: bool
    input_zero_point: int
    input_shape: tuple[int, ...]

    @property
    def signature(self) -> str:
        """What decides how fast a kernel is at this map: shapes, but not weights."""
        out, per_group, *kernel = self.weight.codes.shape
        size = "x".join(map(str, self.input_shape))
        if self.geometry is None:
            return f"linear {per_group}>{out} on {size}"
        g = self.geometry
        walk = f"k{'x'.join(map(str, kernel))} s{g.stride[0]}x{g.stride[1]} g{g.groups}"
        pads = f"p{g.padding[0]}x{g.padding[1]} d{g.dilation[0]}x{g.dilation[1]}"
        return f"conv {per_group * g.groups}>{out} {walk} {pads} z{self.input_zero_point} on {size}"


Prepared = Callable[[Codes, Grid | None, Codes | Tensor | None], Codes | Tensor]
"""A linear map ready to run: from an input, the grid of the result and an addend to codes on that
grid, or to float32 where it is None. The addend is left untouched."""


@dataclass(frozen=True)
class Kernel:
    """One way to run linear maps on this machine."""

    name: str
    prepare: Callable[[LinearMap], Prepared]
    missing: Callable[[], str | None]
    """Why this machine cannot run it, or None."""
    integer: bool
    """Whether products are really computed in int8."""
    cpu_only: bool = True
    weight_bits: Callable[[], int] = lambda: 8
    """How many bits weights may have here: with more, sums of products would saturate."""


def is_x86() -> bool:
    """Whether this is an x86 processor, as AMD and Intel make them."""
    return platform.machine().lower() in {"x86_64", "amd64"}


def bits_with(*instructions: str) -> int:
    """8 where x86 has one of ``instructions``, which sum int8 products in int32, and 7 elsewhere.

    Without them, pairs of products are added in int16, where two of 8 bits saturate.
    """
    features = torch.cpu.get_capabilities()
    return 8 if not is_x86() or any(features.get(name) for name in instructions) else 7


def finished(
    y: Tensor, addend: Codes | Tensor | None, out: Grid | None, *, relu: bool
) -> Codes | Tensor:
    """What follows a product in float32, which is overwritten."""
    if addend is not None:
        y += as_float(addend)
    if relu:
        y.relu_()
    return y if out is None else quantize(y, out)


def grid_before_adding(out: Grid, addend: Codes | Tensor) -> Grid:
    """The grid of all values which, with some addend, give a sum that ``out`` can hold.

    For kernels that round before they can add.
    """
    low, high = _ends(out)
    least, most = _ends(addend.grid) if isinstance(addend, Codes) else torch.aminmax(addend)
    low, high = min(low - float(most), 0.0), max(high - float(least), 0.0)
    scale = (high - low) / LARGEST_CODE
    return Grid(scale, round(-low / scale))


def _ends(grid: Grid) -> tuple[float, float]:
    return -grid.scale * grid.zero_point, grid.scale * (LARGEST_CODE - grid.zero_point)


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
        return finished(y.float(), addend, out, relu=linear_map.relu)

    return run


def _no_fast_bfloat16() -> str | None:
    if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "this processor has no bfloat16 instructions"


_in_float32, _in_bfloat16 = (partial(_prepare, dtype=t) for t in (torch.float32, torch.bfloat16))
REFERENCE = Kernel("reference", _in_float32, lambda: None, integer=False, cpu_only=False)
BFLOAT16 = Kernel("bfloat16", _in_bfloat16, _no_fast_bfloat16, integer=False, cpu_only=False)
