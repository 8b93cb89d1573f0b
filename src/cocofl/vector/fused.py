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

_HAS_TRITON = find_spec("triton") is not None


def runs_on(x: Tensor) -> bool:
    """Whether fused kernels can run on this tensor."""
    return _HAS_TRITON and x.is_cuda and x.dtype in {torch.float32, torch.bfloat16}


def kernels_for(x: Tensor) -> Any:
    """Fused kernels where they run, else plain PyTorch."""
    # Triton is imported only where there is a GPU to use it.
    return import_module("cocofl.vector.kernels.triton_rows") if runs_on(x) else plain


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
    """For convolutions of all channels with all, where they run."""
    if geometry.groups != 1 or geometry.dilation != (1, 1) or not runs_on(x):
        return None
    run = import_module("cocofl.vector.kernels.triton_dense")
    return Convolution(run.dense, run.dense_input, run.dense_weight)
