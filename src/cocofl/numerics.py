"""The int8 arithmetic, defined once: what a code means, how a scale is measured and used.

A *scale* is what travels between devices and server: ``max|x| / 127`` of one tensor. A *grid*
is what an operation computes with: the meaning of its uint8 codes. Between the two stands the
headroom: a scale that comes from the server is a round old, so its grid is made twice as wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SIGNED_LEVELS = 127
"""Codes on either side of zero on a signed grid, as in the paper's 2·max|x|/127."""

MIDDLE = 128
"""The code of zero on a signed grid."""

LARGEST_CODE = 255

HEADROOM = 2.0
"""How much wider than its measured range a tensor's grid is when the measurement is a round old."""

_TINY = 1e-20  # a tensor of zeros still needs a grid that divides


@dataclass(frozen=True, slots=True)
class Grid:
    """A uint8 code ``q`` on this grid stands for ``scale * (q - zero_point)``."""

    scale: float
    zero_point: int


class Codes(NamedTuple):
    """A quantized tensor: uint8 codes and what they mean."""

    values: Tensor
    grid: Grid

    def dequantize(self) -> Tensor:
        """The float32 tensor these codes stand for."""
        x = self.values.float()
        if self.grid.zero_point:
            x -= self.grid.zero_point
        return x.mul_(self.grid.scale)


class QuantizedWeight(NamedTuple):
    """int8 codes with one scale per output channel (axis 0)."""

    codes: Tensor
    scale: Tensor
    sums: Tensor | None = None
    """Of the codes of each channel, in float32: exact up to 2**24. None where nobody made them."""

    def dequantize(self) -> Tensor:
        """The float32 weight these codes stand for."""
        return self.codes.float() * self.scale.view(-1, *[1] * (self.codes.ndim - 1))


def measure_scale(x: Tensor) -> Tensor:
    """``max|x| / 127`` as a scalar tensor: the finest signed grid that holds all of ``x``."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float() / SIGNED_LEVELS


def grid_for(scale: float, *, unsigned: bool = False, headroom: float = 1.0) -> Grid:
    """The grid that a measured scale asks for.

    A tensor without negative values (after ReLU) spends all 256 codes on its one side.

    >>> grid_for(0.1, headroom=2.0)
    Grid(scale=0.2, zero_point=128)
    """
    step = max(headroom * scale, _TINY)
    if unsigned:
        return Grid(step * SIGNED_LEVELS / LARGEST_CODE, 0)
    return Grid(step, MIDDLE)


def levels(x: Tensor, per_step: Tensor | float, low: Tensor | int, high: Tensor | int) -> Tensor:
    """``x`` in whole steps of its grid, halves to even; what the grid cannot hold saturates.

    The one place where rounding happens. ``per_step`` is 1 / scale.
    """
    return torch.mul(x, per_step).round_().clamp_(low, high)  # type: ignore[arg-type]


def quantize(x: Tensor, grid: Grid) -> Codes:
    """Round to the nearest code."""
    offset = grid.zero_point - MIDDLE
    rounded = levels(x, 1.0 / grid.scale, -grid.zero_point, LARGEST_CODE - grid.zero_point)
    if offset:
        rounded += offset
    # PyTorch casts float to int8 five times faster than to uint8; the top bit tells them apart.
    return Codes(rounded.to(torch.int8).view(torch.uint8).bitwise_xor_(MIDDLE), grid)


class StackedGrid(NamedTuple):
    """A grid per device, each a tensor that broadcasts against the values; 0 per step is no grid.

    Values held on it are not codes but the floats that codes stand for.
    """

    scale: Tensor
    per_step: Tensor
    low: Tensor
    high: Tensor


def stacked_grid(scale: Tensor, unsigned: Tensor, headroom: float = 1.0) -> StackedGrid:
    """What :func:`grid_for` gives, for one measured scale per device; NaN where there is no grid.

    Computed in float64, so that codes agree with those on a :class:`Grid` of Python floats.
    """
    step = (headroom * scale.double()).clamp_min(_TINY)
    step = torch.where(unsigned, step * SIGNED_LEVELS / LARGEST_CODE, step)
    low = torch.where(unsigned, 0.0, -float(MIDDLE))
    held = ~torch.isnan(scale)
    return StackedGrid(
        torch.where(held, step, 1.0).float(),
        torch.where(held, 1.0 / step, 0.0).float(),
        low.float(),
        (low + LARGEST_CODE).float(),
    )


def snap(x: Tensor, grid: StackedGrid) -> Tensor:
    """What codes on each device's grid stand for; ``x`` as it is where a device has no grid.

    >>> grid = stacked_grid(torch.tensor([0.5, torch.nan]), torch.tensor([False, False]))
    >>> snap(torch.tensor([[0.7], [0.7]]), grid).flatten().tolist()
    [0.5, 0.699999988079071]
    """
    scale, per_step, low, high = (t.view(-1, *[1] * (x.ndim - 1)) for t in grid)
    return torch.where(per_step > 0, levels(x, per_step, low, high) * scale, x)


def quantize_on_the_fly(x: Tensor, *, unsigned: bool = False) -> Codes:
    """Quantize with the scale of this very tensor: nothing saturates, no headroom is needed."""
    return quantize(x, grid_for(measure_scale(x).item(), unsigned=unsigned))


def as_float(x: Codes | Tensor) -> Tensor:
    """The float32 tensor behind codes; a float tensor as it is."""
    return x.dequantize() if isinstance(x, Codes) else x


def quantize_weight(weight: Tensor, bits: int = 8) -> QuantizedWeight:
    """Symmetric int8 codes with one scale per output channel (axis 0).

    Seven bits keep the sum of two products within int16, which x86 without VNNI needs.

    >>> quantize_weight(torch.tensor([[1.0, -0.5], [0.0, 4.0]])).codes.tolist()
    [[127, -64], [0, 127]]
    """
    return quantize_weights([weight], bits)[0]


def quantize_weights(weights: Sequence[Tensor], bits: int = 8) -> list[QuantizedWeight]:
    """The same for many: those whose channels are of one size take a few operations together."""
    largest = 2 ** (bits - 1) - 1
    flat = [weight.detach().float().flatten(1) for weight in weights]
    by_size: dict[int, list[int]] = {}
    for i, rows in enumerate(flat):
        by_size.setdefault(rows.shape[1], []).append(i)
    found: dict[int, QuantizedWeight] = {}
    for alike in by_size.values():
        rows = torch.cat([flat[i] for i in alike])  # a copy, which may be overwritten
        scales = rows.abs().amax(1).clamp_(min=_TINY).div_(largest)
        # The largest of a channel becomes the last code, so nothing is beyond.
        whole = rows.div_(scales[:, None]).round_()
        lengths = [len(flat[i]) for i in alike]
        parts = (x.split(lengths) for x in (whole.to(torch.int8), scales, whole.sum(1)))
        for i, codes, scale, sums in zip(alike, *parts, strict=True):
            found[i] = QuantizedWeight(codes.view(weights[i].shape), scale, sums)
    return [found[i] for i in range(len(flat))]
