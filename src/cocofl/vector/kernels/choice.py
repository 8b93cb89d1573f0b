"""The kernels of a program: plain PyTorch's, and with a GPU and Triton our own.

They are chosen once, when a program is built; which of them a tensor gets depends on its type
and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.numerics import StackedGrid
from cocofl.vector.kernels import plain
from cocofl.vector.kernels.base import Activation, Backward, Coefficients, Dropping, Norm

_HEAD_CHANNELS = 128  # of which a tile still fits
_SMALL = 512  # channels up to which a linear layer does little with what it reads
_ROW = 4096  # channels that a program can hold at a time


class RowKernels(Protocol):
    """The elementwise chains around a layer, on (device, row, channel).

    See :mod:`cocofl.vector.kernels.plain`, which defines them.
    """

    def largest(self, x: Tensor, rows: Tensor, /) -> Tensor:
        """max|x| / 127 of each device."""

    def coefficients(self, y: Tensor, rows: Tensor, norm: Norm, /) -> Coefficients:
        """What a norm does to each channel."""

    def finish(
        self,
        y: Tensor,
        factor: Tensor | None,
        offset: Tensor | None,
        addend: Tensor | None,
        activation: Activation,
        grid: StackedGrid | None,
        /,
    ) -> Tensor:
        """``round(activation(factor · y + offset + addend))``."""

    def back(
        self,
        g: Tensor,
        z: Tensor | None,
        activation: Activation,
        grid: StackedGrid | None,
        y: Tensor | None,
        rows: Tensor,
        c: Coefficients | None,
        norm: Norm | None,
        z_grid: StackedGrid | None,
        /,
        *,
        asked: Tensor,
        share: bool,
    ) -> tuple[Tensor, Backward]:
        """The whole way back."""

    def total(self, g: Tensor, rows: Tensor, /) -> Tensor:
        """The sum over valid rows."""

    def measured_grid(
        self, scale: Tensor, fly: Tensor, unsigned: Tensor, known: StackedGrid, /
    ) -> StackedGrid:
        """The known grids, and those made on the fly."""


class FusedRowKernels(RowKernels, Protocol):
    """The same, and the plainest optimizer, each in one pass over memory."""

    def sgd(
        self,
        parameters: Tensor,
        gradients: Tensor,
        learns: Tensor,
        valid: Tensor,
        lr: Tensor,
        weight_decay: float,
        /,
    ) -> None:
        """Move the places that learn."""


class ChainKernels(Protocol):
    """Dropout and LayerNorm."""

    def drop(self, x: Tensor, dropping: Dropping, /) -> Tensor:
        """Drop elements on some devices."""

    def normalise(
        self,
        x: Tensor,
        addend: Tensor | None,
        dropping: Dropping | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        channels: Tensor | None,
        /,
    ) -> Tensor:
        """Drop, add and normalise."""


class LinearKernels(Protocol):
    """Several linear layers of one input."""

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: Activation,
        /,
    ) -> Sequence[Tensor]:
        """Their results."""

    def stacked(self, grids: Sequence[StackedGrid | None], /) -> Tensor | None:
        """Grids as the two below take them."""

    def linear_input(
        self,
        gradients: Sequence[Tensor],
        weights: Sequence[Tensor],
        addend: Tensor | None,
        grid: Tensor | None,
        /,
    ) -> Tensor:
        """The input's gradient."""

    def linear_weight(
        self, gradient: Tensor, x: Tensor, grid: Tensor | None, /
    ) -> tuple[Tensor, Tensor]:
        """The gradients of a weight and a bias."""


class AttentionKernels(Protocol):
    """Attention whose weights are not dropped."""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, /
    ) -> Tensor:
        """As ``F.scaled_dot_product_attention``."""


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

    rows: FusedRowKernels
    chains: ChainKernels
    linear: LinearKernels
    attention: AttentionKernels
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
        return plain if own is None else own.rows

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
    ) -> AttentionKernels | None:
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

    depthwise, dense = triton_depthwise, triton_dense
    return TritonKernels(
        triton_rows,
        triton_chains,
        triton_linear,
        triton_attention,
        Convolution(depthwise.depthwise, depthwise.depthwise_input, depthwise.depthwise_weight),
        Convolution(dense.dense, dense.dense_input, dense.dense_weight),
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
