"""What the frozen layers of a cohort's devices compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from cocofl.vector.program.folded_weights import FoldedLayer, fold_layers
from cocofl.vector.program.instructions import Layer
from cocofl.vector.program.program import Program
from cocofl.vector.program.row_layout import Segment
from cocofl.vector.program.stacked_layers import Weights
from cocofl.vector.program.step_context import Roles
from cocofl.vector.training.cuda_graphs import Graphs
from cocofl.vector.training.rows import Rows


class FrozenWeights:
    """What the devices' frozen layers compute with, in tensors that stay where they are."""

    def __init__(self, program: Program, devices: int, on: torch.device) -> None:
        self._program, self._devices = program, devices
        layout = program.layout
        layers = [i for i in program.layers if isinstance(i, Layer) and i.weight is not None]
        users: dict[Segment, list[Layer]] = {}
        for layer in layers:
            assert layer.weight is not None
            users.setdefault(layer.weight, []).append(layer)
        self._layers = layers
        shape = devices, layout.parameters.size
        self._forward = torch.zeros(shape, dtype=layout.dtype, device=on)
        self._backward = torch.zeros(shape, dtype=layout.dtype, device=on)
        # A weight that several layers share is folded differently for each.
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        for segment, sharing in users.items():
            for layer in sharing[1:]:
                made = [
                    torch.zeros(devices, *segment.shape, dtype=layout.dtype, device=on)
                    for _ in "fb"
                ]
                self._shared[layer.name] = made[0], made[1]
        self._states: dict[int, Rows] = {}  # where captured folding finds them
        self._picks = torch.zeros(devices, dtype=torch.long, device=on)
        self.factors: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        for normed in program.layers:
            if normed.norm is not None:
                channels = _channels(normed.norm.mean, normed.norm.weight)
                self.factors[normed.name] = torch.ones(
                    devices, channels, dtype=layout.dtype, device=on
                )
                self.offsets[normed.name] = torch.zeros(
                    devices, channels, dtype=layout.dtype, device=on
                )

    def fill(self, states: Rows, devices: Sequence[tuple[int, bool]], graphs: Graphs) -> None:
        """Fold, quantize, and give each device its state's, quantized or not."""
        quantized = any(own for _, own in devices)
        n = len(states.parameters)
        if n not in self._states:
            self._states[n] = Rows(*(torch.empty_like(rows) for rows in states))
        own = self._states[n]
        own.parameters.copy_(states.parameters)
        own.statistics.copy_(states.statistics)
        picks = [state + n * own for state, own in devices]
        self._picks.copy_(torch.tensor(picks))
        graphs.run(("fold", n, quantized), partial(self._fold, own, quantized))

    def _fold(self, states: Rows, quantized: bool) -> None:
        folded = fold_layers(
            self._program.layers, states.parameters, states.statistics, quantized=quantized
        )
        index = self._picks
        self._fill_weights(folded, states, index)
        for name, own in self.factors.items():
            one = folded[name]
            if one.floats.factor is not None and one.codes.factor is not None:
                own.copy_(torch.cat([one.floats.factor, one.codes.factor])[index])
        for name, own in self.offsets.items():
            one = folded[name]
            if one.floats.offset is not None and one.codes.offset is not None:
                own.copy_(torch.cat([one.floats.offset, one.codes.offset])[index])

    def _fill_weights(self, folded: dict[str, FoldedLayer], states: Rows, index: Tensor) -> None:
        # All layers into one row per state and variant first: two gathers instead of two a layer.
        forward = states.parameters.repeat(2, 1)
        backward = forward.clone()
        n = len(states.parameters)
        for layer in self._layers:
            one = folded[layer.name]
            pairs = ((one.floats, slice(0, n)), (one.codes, slice(n, 2 * n)))
            if layer.name in self._shared:
                for own, way in zip(self._shared[layer.name], ("forward", "backward"), strict=True):
                    own.copy_(torch.cat([getattr(f, way) for f, _ in pairs])[index])
                continue
            assert layer.weight is not None
            for f, rows in pairs:
                assert f.forward is not None
                assert f.backward is not None
                layer.weight.of(forward)[rows] = f.forward
                layer.weight.of(backward)[rows] = f.backward
        self._forward.copy_(forward[index])
        self._backward.copy_(backward[index])

    def weights(
        self,
        parameters: Tensor,
        leaves: Mapping[Segment, Tensor],
        roles: Roles,
        own: Tensor | None,
    ) -> dict[str, Weights]:
        """Each layer's weights: a device's own where ``own``, else what was folded for it."""
        found = {}
        if own is not None:
            forward = torch.where(own, parameters, self._forward)
            backward = torch.where(own, parameters, self._backward)
        for layer in self._layers:
            assert layer.weight is not None
            leaf = leaves[layer.weight]
            if own is None:
                found[layer.name] = Weights(leaf, leaf.detach(), leaf.detach())
            elif layer.name in self._shared:
                mine = roles.with_batch[layer.block].view(-1, *[1] * (leaf.ndim - 1))
                used = [torch.where(mine, leaf.detach(), f) for f in self._shared[layer.name]]
                found[layer.name] = Weights(leaf, used[0], used[1])
            else:
                found[layer.name] = Weights(
                    leaf, layer.weight.of(forward), layer.weight.of(backward)
                )
        return found


def _channels(*layout: Segment | None) -> int:
    for segment in layout:
        if segment is not None:
            return segment.shape[0]
    return 1
