"""What a kernel is: it computes one linear map on codes, and everything else is built of that.

A convolution, a linear layer, a folded BatchNorm and the input gradient of each are all linear
maps with int8 weights, so this one small interface is all a new backend has to fill.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cocofl.numerics import Codes, Grid, QuantizedWeight


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


class Prepared(Protocol):
    """A linear map ready to run."""

    def __call__(
        self, x: Codes, out: Grid | None, addend: Codes | Tensor | None, /
    ) -> Codes | Tensor:
        """Codes on ``out``, or float32 where ``out`` is None; ``addend`` is left untouched."""


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
