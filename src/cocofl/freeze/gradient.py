"""The input gradient of a linear map, as linear maps again.

For stride 1 the gradient of a convolution is a convolution with the flipped, transposed kernel.
For stride s each of the s×s phases of the input has its own part of the kernel, so the gradient
is s×s small convolutions whose results interleave, and no product is wasted on inserted zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from cocofl.freeze.kernels import Geometry, LinearMap, Prepared
from cocofl.numerics import (
    MIDDLE,
    Codes,
    Grid,
    QuantizedWeight,
    as_float,
    quantize,
)

Prepare = Callable[[LinearMap], Prepared]


@dataclass(frozen=True)
class Phase:
    """How the gradient at input positions ``first::stride`` comes from the output's gradient.

    Along one axis: taps of the flipped kernel, how far to pad, and which results to keep.
    """

    first: int
    taps: tuple[int, ...]
    reach: int
    padding: int
    skip: int
    count: int


@cache
def phases(
    size: int, result: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[Phase, ...]:
    """The phases along one axis of an input of ``size`` and an output of ``result`` positions.

    Input position ``stride * t + first`` was read by output ``t + lag - j`` through tap
    ``offset + stride * j``, where that tap exists.
    """
    found = []
    for first in range(min(stride, size)):
        offset = (first + padding) % stride
        lag = (first + padding) // stride
        taps = tuple(range(offset, kernel, stride))[::-1]
        count = -(-(size - first) // stride)
        reach = dilation * (len(taps) - 1) if taps else 0
        pad = max(0, reach - lag, count + lag - result)
        found.append(Phase(first, taps, reach, pad, lag - reach + pad, count))
    return tuple(found)


class InputGradient:
    """Computes the gradient of a linear map's input from the gradient of its output."""

    def __init__(
        self,
        quantized: QuantizedWeight,
        geometry: Geometry | None,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
        prepare: Prepare,
    ) -> None:
        """``quantized`` is what :func:`transposed` makes of the folded float weight."""
        self.prepared: list[tuple[Prepared, tuple[slice, ...], tuple[slice, ...]]] = []
        if geometry is None:
            linear = LinearMap(quantized, None, None, False, MIDDLE, output_shape)
            self.prepared.append((prepare(linear), (), ()))
            self.direct = True
            return
        axes = [
            phases(*numbers)
            for numbers in zip(
                input_shape[2:], output_shape[2:], quantized.codes.shape[2:],
                geometry.stride, geometry.padding, geometry.dilation, strict=True,
            )
        ]  # fmt: skip
        for vertical, horizontal in product(*axes):
            if vertical.taps and horizontal.taps:
                part = quantized
                if quantized.codes.shape[2:] != (1, 1):
                    codes = quantized.codes[:, :, list(vertical.taps)]
                    codes = codes[:, :, :, list(horizontal.taps)].contiguous()
                    part = QuantizedWeight(codes, quantized.scale)
                padding = (vertical.padding, horizontal.padding)
                walk = replace(geometry, stride=(1, 1), padding=padding)
                linear = LinearMap(part, None, walk, False, MIDDLE, output_shape)
                both = (vertical, horizontal)
                keep = tuple(slice(p.skip, p.skip + p.count) for p in both)
                strides = zip(both, geometry.stride, strict=True)
                place = tuple(slice(p.first, None, stride) for p, stride in strides)
                self.prepared.append((prepare(linear), keep, place))
        self.direct = set(geometry.stride) == {1} and all(
            phase.skip == 0 and size + 2 * phase.padding - phase.reach == phase.count
            for (phase,), size in zip(axes, output_shape[2:], strict=True)
        )
        self.covers_all = all(phase.taps for axis in axes for phase in axis)
        self.input_shape = input_shape

    def __call__(
        self, gradient: Codes, out: Grid | None, addend: Codes | Tensor | None
    ) -> Codes | Tensor:
        """The input's gradient plus ``addend``, as codes on ``out`` or as float32."""
        if self.direct and (out is None or addend is None or isinstance(addend, Codes)):
            return self.prepared[0][0](gradient, out, addend)
        if addend is None:
            return self._interleave(gradient, out)
        total = as_float(addend).clone()
        for run, keep, place in self.prepared:
            part = run(gradient, None, None)
            assert isinstance(part, Tensor)
            total[:, :, *place] += part[:, :, *keep]
        return total if out is None else quantize(total, out)

    def _interleave(self, gradient: Codes, out: Grid | None) -> Codes | Tensor:
        whole = torch.empty(
            (len(gradient.values), *self.input_shape[1:]),
            dtype=torch.float32 if out is None else torch.uint8,
            device=gradient.values.device,
            memory_format=torch.channels_last,
        )
        if not self.covers_all:
            whole.fill_(0 if out is None else out.zero_point)
        for run, keep, place in self.prepared:
            part = run(gradient, out, None)
            values = part.values if isinstance(part, Codes) else part
            whole[:, :, *place] = values[:, :, *keep]
        return whole if out is None else Codes(whole, out)


def transposed(weight: Tensor, groups: int = 1) -> Tensor:
    """Swap input and output channels within each group: the weight of an input gradient."""
    out, per_group, *kernel = weight.shape
    if groups == out and per_group == 1:
        return weight
    if groups == 1:
        return weight.transpose(0, 1)
    grouped = weight.reshape(groups, out // groups, per_group, *kernel)
    return grouped.transpose(1, 2).reshape(groups * per_group, out // groups, *kernel)
