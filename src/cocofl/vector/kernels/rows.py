"""Values of many devices as rows of channels, as elementwise kernels take them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
