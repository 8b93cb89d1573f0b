"""The kernels of a program: plain PyTorch's, and with a GPU and Triton our own.

They are chosen once, when a program is built; which of them a tensor gets depends on its type
and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.numerics import StackedGrid
from cocofl.vector.kernels import plain
from cocofl.vector.kernels.base import Activation, Coefficients, Dropping, Gradients, Kept, Norm

_HEAD_CHANNELS = 128  # of which a tile still fits
_SMALL = 512  # channels up to which a linear layer does little with what it reads
_ROW = 4096  # channels that a program can hold at a time

_Maybe = Tensor | None


class RowKernels(NamedTuple):
    """The elementwise chains around a layer; :mod:`cocofl.vector.kernels.plain` defines them."""

    largest: Callable[[Tensor, Tensor], Tensor]
    coefficients: Callable[[Tensor, Tensor, Norm], Coefficients]
    finish: Callable[[Tensor, _Maybe, _Maybe, _Maybe, Activation, StackedGrid | None], Tensor]
    back: Callable[[Tensor, StackedGrid | None, Kept], Gradients]
    total: Callable[[Tensor, Tensor], Tensor]
    measured_grid: Callable[[Tensor, Tensor, Tensor, StackedGrid], StackedGrid]
    sgd: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None] | None = None
    """Descent by gradients alone, in one pass over memory."""


class ChainKernels(NamedTuple):
    """Dropout; and LayerNorm of a sum, one part of which may be dropped from."""

    drop: Callable[[Tensor, Dropping], Tensor]
    normalise: Callable[[Tensor, _Maybe, Dropping | None, _Maybe, _Maybe, float, _Maybe], Tensor]


class LinearKernels(NamedTuple):
    """Several linear layers of one input: results, gradients, and grids as these take them."""

    linear: Callable[[Tensor, Sequence[Tensor], Sequence[_Maybe], Activation], Sequence[Tensor]]
    stacked: Callable[[Sequence[StackedGrid | None]], _Maybe]
    linear_input: Callable[[Sequence[Tensor], Sequence[Tensor], _Maybe, _Maybe], Tensor]
    linear_weight: Callable[[Tensor, Tensor, _Maybe], tuple[Tensor, Tensor]]


Attention = Callable[[Tensor, Tensor, Tensor, _Maybe, float], Tensor]
"""From query, key, value, mask and scale: attention whose weights are not dropped."""


class Convolution(NamedTuple):
    """Kernels of our own for one kind of convolution."""

    forward: Callable[[Tensor, Tensor, Geometry], Tensor]
    """From images and weights."""
    input: Callable[[Tensor, Tensor, Tensor, Geometry, Tensor], Tensor]
    """The images' gradient, from that of the result, weights and images, and who needs it."""
    weight: Callable[[Tensor, Tensor, Tensor, Geometry, Tensor], Tensor]
    """The weights' gradient, from that of the result, images and weights, and who needs it."""


class TritonKernels(NamedTuple):
    """Kernels of our own."""

    rows: RowKernels
    chains: ChainKernels
    linear: LinearKernels
    attention: Attention
    depthwise: Convolution
    dense: Convolution


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one program has at hand."""

    triton: TritonKernels | None = None

    @classmethod
    def on(cls, device: torch.device) -> KernelSet:
        """What there is on this device."""
        if device.type != "cuda" or find_spec("triton") is None:
            return PLAIN
        return cls(_triton_kernels())

    def fused(self, x: Tensor) -> TritonKernels | None:
        """Our own, where they can run on this tensor."""
        fits = x.is_cuda and x.dtype in {torch.float32, torch.bfloat16}
        return self.triton if fits else None

    def rows(self, x: Tensor) -> RowKernels:
        """For the elementwise chains around a layer."""
        own = self.fused(x)
        return _PLAIN_ROWS if own is None else own.rows

    def chains(self, x: Tensor) -> ChainKernels | None:
        """Our own dropout and LayerNorm, where they run."""
        own = self.fused(x)
        return None if own is None or x.shape[-1] > _ROW else own.chains

    def linear(self, x: Tensor, outs: int) -> LinearKernels | None:
        """Our own linear layers, where they run and memory is what they wait for."""
        own = self.fused(x)
        if own is None or _is_exact(x) or max(outs, x.shape[-1]) > _SMALL:
            return None
        return own.linear

    def depthwise(self, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution | None:
        """For 3×3 convolutions of each channel by itself, where they run.

        ``w`` is (device, out, in per group, height, width).
        """
        by_channel = w.shape[1] == geometry.groups and w.shape[2] == 1
        small = tuple(w.shape[3:]) == (3, 3) and geometry.dilation == (1, 1)
        own = self.fused(x) if by_channel and small else None
        return None if own is None else own.depthwise

    def dense(self, x: Tensor, geometry: Geometry) -> Convolution | None:
        """For convolutions of all channels with all, where they run and are the faster ones."""
        own = self.fused(x)
        if own is None or geometry.groups != 1 or geometry.dilation != (1, 1) or _is_exact(x):
            return None
        return own.dense

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Attention | None:
        """Our own attention, where it is the faster one.

        Tensors are (sample, head, row, channel), and a mask may be over keys only.
        """
        own = self.fused(query)
        if own is None or query.dtype != torch.float32 or _is_exact(query) or query.ndim != 4:
            return None
        alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
        fits = query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] <= _HEAD_CHANNELS
        if not (alike and fits and (mask is None or _is_over_keys(mask, key))):
            return None
        return own.attention


_PLAIN_ROWS = RowKernels(
    plain.largest, plain.coefficients, plain.finish, plain.back, plain.total, plain.measured_grid
)
PLAIN = KernelSet()
"""Where there are no kernels of our own."""


@cache
def _triton_kernels() -> TritonKernels:
    # Triton is imported only where there is a GPU to use it.
    from cocofl.vector.kernels import (  # noqa: PLC0415
        triton_attention,
        triton_chains,
        triton_dense,
        triton_depthwise,
        triton_linear,
        triton_rows,
    )

    def of(module: Any, kind: Any, *names: str) -> Any:
        return kind(*(getattr(module, name) for name in names))

    return TritonKernels(
        of(triton_rows, RowKernels, *RowKernels._fields),
        of(triton_chains, ChainKernels, *ChainKernels._fields),
        of(triton_linear, LinearKernels, *LinearKernels._fields),
        triton_attention.attention,
        of(triton_depthwise, Convolution, "depthwise", "depthwise_input", "depthwise_weight"),
        of(triton_dense, Convolution, "dense", "dense_input", "dense_weight"),
    )


def _is_exact(x: Tensor) -> bool:
    """Whether matrix units are not to be used."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def _is_over_keys(mask: Tensor, key: Tensor) -> bool:
    """Whether a mask is the same for all queries: (sample or 1, head or 1, 1, key)."""
    samples, heads, keys, _ = key.shape
    return (
        mask.dtype == torch.bool
        and mask.ndim == 4
        and mask.shape[0] in {1, samples}
        and mask.shape[1] in {1, heads}
        and mask.shape[2:] == (1, keys)
    )
