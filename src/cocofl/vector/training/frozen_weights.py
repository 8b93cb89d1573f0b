"""What the layers of a cohort's devices compute with.

Where a layer is frozen, weights with their norms folded in, quantized for ``qff``. All of it
depends on the server's state only, so it is made once per round and state, whatever the devices
freeze. Where a layer learns, its own weights, which are put beside the others when a round begins;
whoever moves parameters moves them there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cocofl.freeze.fusion import Affine, affine_of, fold_affine
from cocofl.freeze.gradient import transposed
from cocofl.numerics import quantize_weight
from cocofl.vector.program.instructions import Layer, Normalise
from cocofl.vector.program.program import Program
from cocofl.vector.program.row_layout import Rows, Segment
from cocofl.vector.program.stacked_layers import Weights
from cocofl.vector.program.step_context import NormSpec, Roles
from cocofl.vector.training.execution import Graphs


class FrozenWeights:
    """What the devices' frozen layers compute with, in tensors that stay where they are."""

    def __init__(
        self, program: Program, devices: int, on: torch.device, narrow: torch.dtype | None = None
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = program.layout.dtype) -> Tensor:
            return torch.zeros(devices, *shape, dtype=dtype, device=on)

        self._all_layers = program.layers
        self._weighted: list[tuple[Layer, Segment]] = []
        # A weight that several layers share is folded differently for each.
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        self.norms: dict[str, tuple[Tensor, Tensor]] = {}
        """What layers multiply with and add, by the value they make."""
        seen: set[Segment] = set()
        for layer in program.layers:
            if isinstance(layer, Layer) and layer.weight is not None:
                weight = layer.weight
                self._weighted.append((layer, weight))
                if weight in seen:
                    self._shared[layer.name] = zeros(*weight.shape), zeros(*weight.shape)
                seen.add(weight)
            if layer.norm is not None:
                known = layer.norm.mean or layer.norm.weight
                channels = 1 if known is None else known.shape[0]
                self.norms[layer.name] = zeros(channels).fill_(1.0), zeros(channels)
        size = program.layout.parameters.size
        held = program.layout.dtype if narrow is None else narrow
        self.is_narrow = held != program.layout.dtype
        """Whether layers compute with other numbers than learn."""
        self.used = zeros(size, dtype=held), zeros(size, dtype=held)
        """What all layers compute with, forward and backward: rows of parameters."""
        self._states: dict[int, Rows] = {}  # where captured folding finds them
        self._picks = torch.zeros(devices, dtype=torch.long, device=on)

    def fill(self, states: Rows, devices: Sequence[tuple[int, bool]], graphs: Graphs) -> None:
        """Fold, quantize, and give each device its state's, quantized or not."""
        n, quantized = len(states.parameters), any(own for _, own in devices)
        if n not in self._states:
            self._states[n] = Rows(*(torch.empty_like(rows) for rows in states))
        own = self._states[n]
        own.parameters.copy_(states.parameters)
        own.statistics.copy_(states.statistics)
        self._picks.copy_(torch.tensor([state + n * codes for state, codes in devices]))
        graphs.run(("fold", n, quantized), partial(self._fold, own, quantized))

    def _fold(self, states: Rows, quantized: bool) -> None:
        folded = {layer.name: _folded(layer, states, quantized) for layer in self._all_layers}
        index = self._picks
        # All layers into one row per state and variant first: two gathers instead of two a layer.
        forward = states.parameters.repeat(2, 1)
        backward = forward.clone()
        for layer, weight in self._weighted:
            ways = folded[layer.name].weights
            if layer.name in self._shared:
                for own, made in zip(self._shared[layer.name], ways, strict=True):
                    own.copy_(made[index])
            else:
                for row, made in zip((forward, backward), ways, strict=True):
                    weight.of(row).copy_(made)
        for used, made in zip(self.used, (forward, backward), strict=True):
            used.copy_(made[index])
        for name, norm in self.norms.items():
            for own, now in zip(norm, folded[name][1:], strict=True):
                if now is not None:
                    own.copy_(now[index])

    def take(self, parameters: Tensor, own: Tensor) -> None:
        """Put the parameters among what is computed with, where ``own``."""
        for used in self.used:
            used.copy_(torch.where(own, parameters.to(used.dtype), used))

    def weights(
        self,
        leaves: Mapping[Segment, Tensor],
        roles: Roles,
        used: Sequence[Tensor] | None,
    ) -> dict[str, Weights]:
        """Each layer's weights: of the rows ``used``; where there are none, of what learns."""
        found = {}
        for layer, weight in self._weighted:
            leaf = leaves[weight]
            if used is None:
                ways = [leaf.detach()] * 2
            elif layer.name in self._shared:
                mine = roles.with_batch[layer.block].view(-1, *[1] * (leaf.ndim - 1))
                ways = [torch.where(mine, leaf.detach(), f) for f in self._shared[layer.name]]
            else:
                ways = [weight.of(row) for row in used]
            found[layer.name] = Weights(leaf, *ways)
        return found


class _Folded(NamedTuple):
    """A layer, frozen in float and below that in int8: (variant · state, …)."""

    weights: tuple[Tensor, ...] = ()
    """Forward and backward."""
    factor: Tensor | None = None
    """Of a norm by itself; a layer's is 1."""
    offset: Tensor | None = None
    """Only of a layer with a norm; a mere bias stays with the layer."""


def _folded(layer: Layer | Normalise, states: Rows, quantized: bool) -> _Folded:
    norm = None if layer.norm is None else _affine(layer.norm, states)
    offset = None if norm is None else norm.offset.repeat(2, 1)
    if layer.weight is None:
        if norm is None:
            return _Folded()
        codes = norm.factor
        if quantized and isinstance(layer, Layer):
            # A norm by itself is a depthwise 1×1 convolution.
            codes = quantize_weight(codes.reshape(-1, 1)).dequantize().view_as(codes)
        return _Folded(factor=torch.cat([norm.factor, codes]), offset=offset)
    assert isinstance(layer, Layer)
    weight = layer.weight.of(states.parameters)
    flat = weight.flatten(0, 1)
    if norm is not None:
        bias = None if layer.bias is None else layer.bias.of(states.parameters).flatten()
        flat, shift = fold_affine(flat, bias, Affine(*(t.flatten() for t in norm)))
        offset = shift.view(weight.shape[:2]).repeat(2, 1)
    forward = backward = flat
    if quantized:
        groups = 1 if layer.op.geometry is None else layer.op.geometry.groups
        groups *= len(weight)
        forward = quantize_weight(flat).dequantize()
        backward = transposed(quantize_weight(transposed(flat, groups)).dequantize(), groups)
    both = (torch.cat([flat, w]).view(-1, *weight.shape[1:]) for w in (forward, backward))
    return _Folded(tuple(both), offset=offset)


def _affine(norm: NormSpec, states: Rows) -> Affine | None:
    if norm.mean is None or norm.variance is None:
        return None
    return affine_of(
        norm.mean.of(states.statistics),
        norm.variance.of(states.statistics),
        None if norm.weight is None else norm.weight.of(states.parameters),
        None if norm.bias is None else norm.bias.of(states.parameters),
        norm.eps,
    )
