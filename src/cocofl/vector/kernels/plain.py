"""The elementwise chains around a layer in plain PyTorch: the definition, on any device.

Values are (device, row, channel); a row is one position of one sample, and of each device only
the first ``rows`` count: the last mini-batch of a device may be smaller than the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cocofl.numerics import SIGNED_LEVELS, StackedGrid, snap, stacked_grid
from cocofl.vector.kernels.base import (
    Activation,
    Coefficients,
    Gradients,
    Kept,
    Moments,
    Norm,
    Reading,
)


def largest(x: Tensor, rows: Tensor) -> Tensor:
    """max|x| / 127 of each device, over its valid rows."""
    return _valid(x.detach(), rows).flatten(1).abs().amax(1).float() / SIGNED_LEVELS


def moments_of(y: Tensor, rows: Tensor) -> Moments:
    """Of all valid rows as one piece.

    Sums are in float64, like those of PyTorch's own norms on the CPU: int8 codes show the last bit.
    """
    own, n = _valid(y, rows).double(), rows.clamp_min(1).double()[:, None]
    mean = own.sum(1) / n
    squares = _valid(own - mean[:, None], rows).square().sum(1)
    return Moments(mean[:, None], squares[:, None], n)


def coefficients(
    y: Tensor, rows: Tensor, norm: Norm, moments: Moments | None = None
) -> Coefficients:
    """Normalise with the batch where a device trains, else with what was folded."""
    moments = moments or moments_of(y, rows)
    wide = norm.frozen_factor.dtype
    count, n = moments.counted[:, :, None], rows.clamp_min(1).to(moments.mean.dtype)[:, None]
    mean = (moments.mean * (count / n[:, None])).sum(1)
    apart = moments.mean - mean[:, None]
    variance = (moments.squares + apart.square() * count).sum(1) / n
    rstd = torch.rsqrt(variance + norm.eps).to(wide)
    mean, variance, n = mean.to(wide), variance.to(wide), n.to(wide)
    norm.track(mean, variance, n)
    factor = rstd if norm.weight is None else rstd * norm.weight
    offset = -mean * factor
    if norm.bias is not None:
        offset = offset + norm.bias
    with_batch = norm.with_batch[:, None]
    return Coefficients(
        torch.where(with_batch, factor, norm.frozen_factor),
        torch.where(with_batch, offset, norm.frozen_offset),
        mean,
        rstd,
    )


def read(y: Tensor, reading: Reading | None) -> Tensor:
    """Rows with what was left to do to them."""
    if reading is None:
        return y
    return _finished(_scaled(y, reading.c), None, reading.activation, reading.grid).to(y.dtype)


def finish(
    y: Tensor,
    offset: Tensor | None,
    addend: Tensor | None,
    activation: Activation,
    grid: StackedGrid | None,
) -> Tensor:
    """``round(activation(y + offset + addend))``."""
    z = y if offset is None else y + offset[:, None]
    return _finished(z, addend, activation, grid).to(y.dtype)


def normalise(
    y: Tensor,
    rows: Tensor,
    norm: Norm,
    addend: Tensor | None,
    activation: Activation,
    grid: StackedGrid | None,
    moments: Moments | None = None,
) -> tuple[Tensor, Coefficients]:
    """``round(activation(factor · y + offset + addend))``, and the coefficients."""
    c = coefficients(y, rows, norm, moments)
    return _finished(_scaled(y, c), addend, activation, grid).to(y.dtype), c


def _scaled(y: Tensor, c: Coefficients) -> Tensor:
    return y * c.factor[:, None] + c.offset[:, None]


def _finished(
    z: Tensor, addend: Tensor | None, activation: Activation, grid: StackedGrid | None
) -> Tensor:
    if addend is not None:
        z = z + addend
    if activation.present:
        z = z.clamp(0, activation.upper)
    return z if grid is None else snap(z, grid)


def back_through_norm(g: Tensor, grid: StackedGrid | None, kept: Kept) -> Gradients:
    """The whole way back, for all, whoever asked."""
    y, c, norm, rows = kept.y, kept.c, kept.norm, kept.rows
    assert y is not None
    assert c is not None
    assert norm is not None
    z = kept.z
    if z is None and kept.activation.present:
        z = _finished(_scaled(y, c), None, kept.activation, kept.z_grid).to(y.dtype)
    before = back(g, grid, kept._replace(z=z))
    n = rows.clamp_min(1).to(c.mean.dtype)[:, None]
    own = _valid(before, rows).to(c.mean.dtype)
    centered = y.to(c.mean.dtype) - c.mean[:, None]
    sum_g, sum_gy = own.sum(1), (own * centered).sum(1)
    with_batch = norm.with_batch[:, None]
    zero = torch.zeros_like(sum_g)
    shift = torch.where(with_batch, c.factor * sum_g / n, zero)
    slope = torch.where(with_batch, c.factor * c.rstd.square() * sum_gy / n, zero)
    gy = own * c.factor[:, None] - shift[:, None] - slope[:, None] * centered
    return _valid(gy, rows).to(y.dtype), before, sum_gy * c.rstd, sum_g


def normalise_leading(x: Tensor, channels: Tensor, eps: float) -> Tensor:
    """LayerNorm of the leading ``channels``, (device), of the last axis; what follows is 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    n = channels.view(-1, *[1] * (x.ndim - 1))
    there = torch.arange(x.shape[-1], device=x.device) < n
    mean = torch.where(there, x.to(wide), 0.0).sum(-1, keepdim=True) / n
    centered = torch.where(there, x - mean, 0.0)
    variance = centered.square().sum(-1, keepdim=True) / n
    return (centered * torch.rsqrt(variance + eps)).to(x.dtype)


def _valid(x: Tensor, rows: Tensor) -> Tensor:
    """``x`` with the rows that do not count set to zero."""
    inside = torch.arange(x.shape[1], device=x.device) < rows[:, None]
    return torch.where(inside[:, :, None], x, 0.0)


def total(g: Tensor, rows: Tensor) -> Tensor:
    """The sum over valid rows, (device, channel)."""
    return _valid(g, rows).sum(1)


def back(g: Tensor, grid: StackedGrid | None, kept: Kept) -> Tensor:
    """The way back through activation and rounding."""
    act = kept.activation
    before = g if grid is None else snap(g, grid)
    if act.present and kept.z is not None:
        passed = kept.z > 0
        if act.upper is not None:
            bound = torch.full((len(g), 1, 1), act.upper, device=g.device)
            passed &= kept.z < (bound if kept.z_grid is None else snap(bound, kept.z_grid))
        before = before * passed
    return before


def measured_grid(scale: Tensor, fly: Tensor, unsigned: Tensor, known: StackedGrid) -> StackedGrid:
    """The known grids, and those of the tensor's own scale where they are made on the fly."""
    own = stacked_grid(scale, unsigned)
    return StackedGrid(*(torch.where(fly, a, b) for a, b in zip(own, known, strict=True)))
