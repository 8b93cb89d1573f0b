"""Which kernels a value gets: Triton's where it lies on CUDA and Triton is there."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels import plain

_HAS_TRITON = find_spec("triton") is not None


def runs_on(x: Tensor) -> bool:
    """Whether fused kernels can run on this tensor."""
    return _HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)


def kernels_for(x: Tensor) -> ModuleType:
    """Fused kernels where they run, else plain PyTorch."""
    if not runs_on(x):
        return plain
    from cocofl.vector.kernels import triton_rows  # noqa: PLC0415

    return triton_rows


def is_depthwise(w: Tensor, geometry: Geometry) -> bool:
    """Whether each channel is convolved by itself; ``w`` is (device, out, in per group, h, w)."""
    return w.shape[1] == geometry.groups and w.shape[2] == 1 and geometry.dilation == (1, 1)


def depthwise(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    raise NotImplementedError


def depthwise_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    raise NotImplementedError


def depthwise_weight(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    raise NotImplementedError
