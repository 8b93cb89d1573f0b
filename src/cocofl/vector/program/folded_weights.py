"""What frozen layers compute with: weights with their norms folded in, quantized for ``qff``.

All of it depends on the server's state only, so it is made once per round and state, whatever
the devices freeze.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cocofl.freeze.fusion import Affine, affine_of, fold_affine
from cocofl.freeze.gradient import transposed
from cocofl.numerics import QuantizedWeight, quantize_weight
from cocofl.vector.program.instructions import Layer, Normalise
from cocofl.vector.program.step_context import NormSpec


class Folded(NamedTuple):
    """A layer under one variant, (state, …): forward and backward weight, factor and offset."""

    forward: Tensor | None
    backward: Tensor | None
    factor: Tensor | None
    """Of a norm by itself; a layer's is 1."""
    offset: Tensor | None
    """Only of a layer with a norm; a mere bias stays with the layer."""


@dataclass(frozen=True)
class FoldedLayer:
    """A layer under both variants that fold."""

    floats: Folded
    codes: Folded


def fold_layers(
    layers: Sequence[Layer | Normalise], parameters: Tensor, statistics: Tensor, *, quantized: bool
) -> dict[str, FoldedLayer]:
    """Every layer, folded with the states' rows of parameters and statistics."""
    return {layer.name: _fold(layer, parameters, statistics, quantized) for layer in layers}


def _fold(
    layer: Layer | Normalise, parameters: Tensor, statistics: Tensor, quantized: bool
) -> FoldedLayer:
    norm = None if layer.norm is None else _affine(layer.norm, parameters, statistics)
    if not isinstance(layer, Layer):
        floats = Folded(None, None, *(norm or (None, None)))
        return FoldedLayer(floats, floats)
    if layer.weight is None:
        assert norm is not None
        floats = Folded(None, None, *norm)
        if not quantized:
            return FoldedLayer(floats, floats)
        # A norm by itself is a depthwise 1×1 convolution.
        codes = quantize_weight(norm.factor.reshape(-1, 1)).dequantize().view_as(norm.factor)
        return FoldedLayer(floats, Folded(None, None, codes, norm.offset))
    weight = layer.weight.of(parameters)
    bias = None if layer.bias is None else layer.bias.of(parameters)
    states, out = weight.shape[:2]
    flat, offset = weight.flatten(0, 1), None
    if norm is not None:
        own = None if bias is None else bias.flatten()
        flat, offset = fold_affine(flat, own, Affine(*(t.flatten() for t in norm)))
        offset = offset.view(states, out)
    floats = Folded(flat.view_as(weight), flat.view_as(weight), None, offset)
    if not quantized:
        return FoldedLayer(floats, floats)
    forward = quantize_weight(flat).dequantize().view_as(weight)
    groups = 1 if layer.op.geometry is None else layer.op.geometry.groups
    backward = _quantized_per_input(flat, states * groups).view_as(weight)
    return FoldedLayer(floats, Folded(forward, backward, None, offset))


def _quantized_per_input(flat: Tensor, groups: int) -> Tensor:
    codes, scale = quantize_weight(transposed(flat, groups))
    return transposed(QuantizedWeight(codes, scale).dequantize(), groups)


def _affine(norm: NormSpec, parameters: Tensor, statistics: Tensor) -> Affine | None:
    if norm.mean is None or norm.variance is None:
        return None
    return affine_of(
        norm.mean.of(statistics),
        norm.variance.of(statistics),
        None if norm.weight is None else norm.weight.of(parameters),
        None if norm.bias is None else norm.bias.of(parameters),
        norm.eps,
    )
