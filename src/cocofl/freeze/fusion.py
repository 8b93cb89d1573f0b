"""Folding BatchNorm into the layer before it, or into an affine map of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Affine(NamedTuple):
    """What a BatchNorm with fixed statistics does to each channel: ``factor * x + offset``."""

    factor: Tensor
    offset: Tensor


def affine(norm: nn.modules.batchnorm._BatchNorm) -> Affine:
    """The per-channel factor and offset of a BatchNorm that uses its running statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        factor = factor * norm.weight
    offset = -norm.running_mean * factor
    if norm.bias is not None:
        offset = offset + norm.bias
    return Affine(factor.detach(), offset.detach())


def fold(
    layer: nn.Conv2d | nn.Linear, norm: nn.modules.batchnorm._BatchNorm | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of ``layer`` followed by ``norm`` (eq. 4 of the paper)."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if norm is None:
        return weight, bias
    factor, offset = affine(norm)
    folded = weight * factor.view(-1, *[1] * (weight.ndim - 1))
    return folded, offset if bias is None else offset + bias * factor
