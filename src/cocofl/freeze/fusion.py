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
    return affine_of(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)


def affine_of(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Affine:
    """The same from a norm's tensors."""
    factor = torch.rsqrt(variance + eps)
    if weight is not None:
        factor = factor * weight
    offset = -mean * factor
    if bias is not None:
        offset = offset + bias
    return Affine(factor.detach(), offset.detach())


def fold(
    layer: nn.Module, norm: nn.modules.batchnorm._BatchNorm | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of ``layer`` followed by ``norm`` (eq. 4 of the paper)."""
    assert isinstance(layer.weight, Tensor)
    assert layer.bias is None or isinstance(layer.bias, Tensor)
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    return (weight, bias) if norm is None else fold_affine(weight, bias, affine(norm))


def fold_affine(weight: Tensor, bias: Tensor | None, norm: Affine) -> tuple[Tensor, Tensor]:
    """A layer's weight and bias with the affine map after it folded in."""
    factor, offset = norm
    folded = weight * factor.view(-1, *[1] * (weight.ndim - 1))
    return folded, offset if bias is None else offset + bias * factor
