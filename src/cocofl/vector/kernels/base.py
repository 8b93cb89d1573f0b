"""What the kernels of a stacked layer take and give.

Elementwise kernels take the values of many devices as rows of channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.numerics import StackedGrid


class Activation(NamedTuple):
    """None, ReLU, or a ReLU with an upper bound."""

    present: bool
    upper: float | None = None


NO_ACTIVATION = Activation(False)


class Asked(NamedTuple):
    """Whose gradients somebody needs, (device); kernels may leave the others undefined."""

    weight: Tensor
    """Of a layer's weight: devices that train it."""
    value: Tensor
    """Of what it takes in: devices that train it or something before it."""


class Coefficients(NamedTuple):
    """What a norm does to each channel, and the batch statistics behind it: (device, channel).

    The statistics mean nothing on devices that do not use them.
    """

    factor: Tensor
    offset: Tensor
    mean: Tensor
    rstd: Tensor


class Reading(NamedTuple):
    """What is left to do to a value, by whoever reads it: ``round(activation(norm(y)))``."""

    c: Coefficients
    activation: Activation
    grid: StackedGrid | None


class Moments(NamedTuple):
    """Of pieces of what a layer made, as its kernel saw them: (device, piece, channel)."""

    mean: Tensor
    squares: Tensor
    """Sums of squared deviations from the piece's mean."""
    counted: Tensor
    """How many rows of a piece count, (device, piece)."""

    @classmethod
    def empty(cls, devices: int, pieces: int, channels: int, on: torch.device) -> Moments:
        """Room for them."""
        shape = devices, pieces, channels
        return cls(*(torch.empty(s, device=on) for s in (shape, shape, shape[:2])))


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Of what a layer's product made, of the addend, and of a norm's weight and bias."""


class Kept(NamedTuple):
    """What the way back through a layer's end needs of the way forward."""

    z: Tensor | None
    """The result; where it is not given, it is computed from ``y`` again."""
    y: Tensor | None
    activation: Activation
    z_grid: StackedGrid | None
    rows: Tensor
    c: Coefficients | None
    norm: Norm | None
    asked: Tensor
    """Devices that need a gradient; kernels may leave the others' undefined."""
    share: bool
    """Whether the addend's gradient is wanted, too."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A BatchNorm of many devices: its tensors, and which devices use the batch."""

    weight: Tensor | None
    bias: Tensor | None
    layer_bias: Tensor | None
    """Of the layer before; the batch's mean takes it out again, but it shows in what is tracked."""
    running_mean: Tensor | None
    running_variance: Tensor | None
    momentum: Tensor | float
    """A tensor (device, 1) where the average is cumulative."""
    eps: float
    with_batch: Tensor
    tracks: Tensor
    """(device, 1): who trains this norm."""
    frozen_factor: Tensor
    frozen_offset: Tensor

    def track(self, mean: Tensor, variance: Tensor, n: Tensor) -> None:
        """Move the running statistics of those who train, as ``nn.BatchNorm2d`` does."""
        if self.running_mean is None or self.running_variance is None:
            return
        if self.layer_bias is not None:
            mean = mean + self.layer_bias
        unbiased = variance * n / (n - 1).clamp_min(1)
        pairs = ((self.running_mean, mean), (self.running_variance, unbiased))
        for running, new in pairs:
            moved = running + self.momentum * (new - running)
            running.copy_(torch.where(self.tracks, moved, running))


class Dropping(NamedTuple):
    """Dropout on the devices where it is ``active``, (device,)."""

    p: float
    active: Tensor


def is_pointwise(shape: Sequence[int], geometry: Geometry) -> bool:
    """Whether a convolution only mixes channels (be it at every other position)."""
    return tuple(shape[-2:]) == (1, 1) and geometry.padding == (0, 0) and geometry.groups == 1


def rows_of(x: Tensor, *, image: bool = True) -> Tensor:
    """(device, sample, …) to (device, row, channel); images (…, channel, height, width).

    A linear layer has its channels last whatever it is given: there ``image`` is false.
    """
    if x.ndim == 2:
        return x.unsqueeze(-1)
    if x.ndim == 5 and image:
        x = x.permute(0, 1, 3, 4, 2)
    return x.reshape(len(x), -1, x.shape[-1])


def row_count(x: Tensor, *, image: bool = True) -> int:
    """How many rows of each device :func:`rows_of` gives."""
    if x.ndim == 2:
        return x.shape[1]
    return math.prod(x.shape[1:]) // x.shape[2 if x.ndim == 5 and image else -1]


def from_rows(rows: Tensor, like: Tensor, *, image: bool = True) -> Tensor:
    """Rows of any number of channels in the shape of ``like``, images channels last."""
    if like.ndim == 5 and image:
        d, b, _, h, w = like.shape
        return rows.view(d, b, h, w, -1).permute(0, 1, 4, 2, 3)
    if like.ndim == 2:
        return rows.view(like.shape)
    return rows.view(*like.shape[:-1], -1)


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenated along ``dim``; images stay channels last, which ``torch.cat`` would undo."""
    if parts[0].ndim == 5 and dim % 5 == 2:
        return from_rows(torch.cat([rows_of(part) for part in parts], -1), parts[0])
    return torch.cat(list(parts), dim)
