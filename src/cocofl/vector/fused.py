"""Which kernels a value gets: Triton's where it lies on CUDA and Triton is there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels import plain

_HEAD_CHANNELS = 128  # of which a tile still fits
_SMALL = 512  # channels up to which a linear layer does little with what it reads
_ROW = 4096  # channels that a program can hold at a time

_HAS_TRITON = find_spec("triton") is not None


def runs_on(x: Tensor) -> bool:
    """Whether fused kernels can run on this tensor."""
    return _HAS_TRITON and x.is_cuda and x.dtype in {torch.float32, torch.bfloat16}


def _is_exact(x: Tensor) -> bool:
    """Whether matrix units are not to be used."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def kernels_for(x: Tensor) -> Any:
    """Fused kernels where they run, else plain PyTorch."""
    # Triton is imported only where there is a GPU to use it.
    return import_module("cocofl.vector.kernels.triton_rows") if runs_on(x) else plain


def chains_for(x: Tensor) -> Any | None:
    """Our own dropout and LayerNorm, where they run."""
    if not (runs_on(x) and x.shape[-1] <= _ROW):
        return None
    return import_module("cocofl.vector.kernels.triton_chains")


def linear_for(x: Tensor, outs: int) -> Any | None:
    """Our own linear layers, where they run and memory is what they wait for."""
    if not runs_on(x) or _is_exact(x) or max(outs, x.shape[-1]) > _SMALL:
        return None
    return import_module("cocofl.vector.kernels.triton_linear")


class Convolution(NamedTuple):
    """Kernels of our own for one kind of convolution."""

    forward: Callable[[Tensor, Tensor, Geometry], Tensor]
    """From images and weights."""
    input: Callable[[Tensor, Tensor, Tensor, Geometry, Tensor], Tensor]
    """The images' gradient, from that of the result, weights and images, and who needs it."""
    weight: Callable[[Tensor, Tensor, Tensor, Geometry, Tensor], Tensor]
    """The weights' gradient, from that of the result, images and weights, and who needs it."""


def depthwise_for(x: Tensor, w: Tensor, geometry: Geometry) -> Convolution | None:
    """For 3×3 convolutions of each channel by itself, where they run.

    ``w`` is (device, out, in per group, height, width).
    """
    by_channel = w.shape[1] == geometry.groups and w.shape[2] == 1
    small = tuple(w.shape[3:]) == (3, 3) and geometry.dilation == (1, 1)
    if not (by_channel and small and runs_on(x)):
        return None
    run = import_module("cocofl.vector.kernels.triton_depthwise")
    return Convolution(run.depthwise, run.depthwise_input, run.depthwise_weight)


def dense_for(x: Tensor, geometry: Geometry) -> Convolution | None:
    """For convolutions of all channels with all, where they run and are the faster ones."""
    if geometry.groups != 1 or geometry.dilation != (1, 1) or not runs_on(x) or _is_exact(x):
        return None
    run = import_module("cocofl.vector.kernels.triton_dense")
    return Convolution(run.dense, run.dense_input, run.dense_weight)


def attention_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any | None:
    """Our own attention, where it is the faster one.

    Tensors are (sample, head, row, channel), and a mask may be over keys only.
    """
    if not runs_on(query) or query.dtype != torch.float32 or _is_exact(query) or query.ndim != 4:
        return None
    alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
    fits = query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] <= _HEAD_CHANNELS
    if not (alike and fits and (mask is None or _is_over_keys(mask, key))):
        return None
    return import_module("cocofl.vector.kernels.triton_attention")


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
