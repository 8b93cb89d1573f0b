"""The kernels of a program: plain PyTorch's, and with a GPU and Triton our own.

They are chosen once, when a program is built; which of them a tensor gets depends on its type
and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels import plain
from cocofl.vector.kernels.base import Moments, is_pointwise

_HEAD_CHANNELS = 128  # of which a tile still fits
_SMALL = 512  # channels up to which a linear layer does little with what it reads
_ROW = 4096  # channels that a program can hold at a time


class LayerKernels(NamedTuple):
    """The kernels of one kind of layer with weights."""

    forward: Callable[..., tuple[Tensor, Moments | None]]
    """From ``x``, weights, geometry, and, if it ``reads``, what is left to do to ``x``, and how
    many samples of each device count in the moments of the result."""
    input: Callable[..., Tensor]
    """The gradient of ``x``, from that of the result, weights, ``x``, geometry, and who asks."""
    weight: Callable[..., Tensor]
    """The weights' gradient, from that of the result, ``x``, weights, geometry, who asks, and,
    if it ``reads``, what is left to do to ``x``."""
    reads: bool = False
    """Whether it finishes what it reads, and takes moments of what it makes."""


def unfinishing(forward: Callable[[Tensor, Tensor, Geometry], Tensor]) -> Callable[..., Any]:
    """A kernel that reads what is finished, and takes no moments, called like those that do."""
    return lambda x, w, geometry, *_: (forward(x, w, geometry), None)


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one program has at hand."""

    has_triton: bool = False

    @classmethod
    def on(cls, device: torch.device) -> KernelSet:
        """What there is on this device."""
        return cls(device.type == "cuda" and find_spec("triton") is not None)

    def own(self, name: str, x: Tensor) -> ModuleType | None:
        """The module of our own kernels of this name, where they can run on this tensor."""
        fits = x.is_cuda and x.dtype in {torch.float32, torch.bfloat16}
        return _triton_modules()[name] if self.has_triton and fits else None

    def rows(self, x: Tensor) -> ModuleType:
        """For the elementwise chains around a layer, with the functions of ``plain``."""
        return self.own("rows", x) or plain

    def norms(self, x: Tensor) -> ModuleType:
        """For norms over the batch and what follows them, with the functions of ``plain``."""
        return self.own("norms", x) or plain

    def chains(self, x: Tensor) -> ModuleType | None:
        """Our own dropout and LayerNorm of a sum, where they run."""
        return None if x.shape[-1] > _ROW else self.own("chains", x)

    def linear(self, x: Tensor, outs: int) -> ModuleType | None:
        """Our own linear layers, where they run and memory is what they wait for."""
        small = max(outs, x.shape[-1]) <= _SMALL
        return self.own("linear", x) if small and not _is_exact(x) else None

    def convolution(
        self, x: Tensor, shape: Sequence[int], geometry: Geometry
    ) -> LayerKernels | None:
        """Our own convolutions, where they run and are the faster ones.

        They are 3×3 of each channel by itself, 1×1, or of all channels with all; ``shape`` is that
        of a device's weight: out, in per group, height, width.
        """
        if geometry.dilation != (1, 1):
            return None
        by_channel = shape[0] == geometry.groups and shape[1] == 1
        if by_channel and tuple(shape[2:]) == (3, 3) and (own := self.own("depthwise", x)):
            ways = own.depthwise, own.depthwise_input, own.depthwise_weight
            return LayerKernels(*ways, reads=True)
        if _is_exact(x) or geometry.groups > 1:
            return None
        if is_pointwise(shape, geometry) and (own := self.own("pointwise", x)):
            ways = own.pointwise, own.pointwise_input, own.pointwise_weight
            return LayerKernels(*ways, reads=True)
        if own := self.own("dense", x):
            return LayerKernels(unfinishing(own.dense), own.dense_input, own.dense_weight)
        return None

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor], Tensor] | None:
        """Our own attention, whose weights are not dropped, where it is the faster one.

        It takes query, key, value, mask, scale, and which devices need gradients. Tensors are
        (sample, head, row, channel), and a mask may be over keys only.
        """
        own = self.own("attention", query)
        if own is None or query.dtype != torch.float32 or _is_exact(query) or query.ndim != 4:
            return None
        alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
        fits = query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] <= _HEAD_CHANNELS
        usable = alike and fits and (mask is None or _is_over_keys(mask, key))
        return own.attention if usable else None


PLAIN = KernelSet()
"""Where there are no kernels of our own."""


@cache
def _triton_modules() -> dict[str, ModuleType]:
    # Triton is imported only where there is a GPU to use it.
    from cocofl.vector.kernels import (  # noqa: PLC0415
        triton_attention,
        triton_chains,
        triton_dense,
        triton_depthwise,
        triton_linear,
        triton_norms,
        triton_pointwise,
        triton_rows,
    )

    return {
        "attention": triton_attention,
        "chains": triton_chains,
        "dense": triton_dense,
        "depthwise": triton_depthwise,
        "linear": triton_linear,
        "norms": triton_norms,
        "pointwise": triton_pointwise,
        "rows": triton_rows,
    }


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
