"""Layers of many devices at once: each device's own weights on its own mini-batch.

A linear layer and a 1×1 convolution are batched matrix products, since images lie channels last;
other convolutions are grouped ones on the CPU, and on CUDA kernels of our own. Those that have
none (of several channels in groups, dilated, or of float64) run there one device after the other.

A device computes with its own weight where it trains, else with a folded one, of which there may
be two: int8 quantizes a weight per output channel forward and per input channel backward. The
gradient is that of the own weight in any case; the optimizer knows who trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.numerics import StackedGrid
from cocofl.vector.kernels.base import (
    Activation,
    Asked,
    Moments,
    Reading,
    from_rows,
    is_pointwise,
    rows_of,
)
from cocofl.vector.kernels.choice import KernelSet, LayerKernels, unfinishing

# Inputs of a convolution that is better a matrix product, where no gradient goes further back.
_FEW = 64
# Enough tiles of a matrix product to keep a large GPU busy; a sum over fewer rows is not split.
_TILES, _TILE, _ROWS = 264, 64, 512
# How many pieces of work beside the present stream may be unfinished; what they read is kept.
_UNFINISHED = 6


class Beside:
    """Work that nothing waits for until a step's end: gradients of weights.

    It fills the gaps that the chain of small kernels leaves on the present stream.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._unfinished: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, call: Callable[[], Tensor], *reads: Tensor) -> Tensor:
        """What ``call`` gives, ready after :meth:`join`; ``reads`` must not be overwritten."""
        present = torch.cuda.current_stream()
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            result = call()
        # Memory of what is read here must not be given to others before it has been read.
        self._unfinished.append((self._stream.record_event(), reads))
        if len(self._unfinished) > _UNFINISHED:
            event, _ = self._unfinished.popleft()
            present.wait_event(event)
        return result

    def join(self) -> None:
        """Let the present stream wait for all of it."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._unfinished.clear()


class Weights(NamedTuple):
    """Of one layer, (device, out, in, …): what learns, and what is computed with."""

    own: Tensor
    forward: Tensor
    backward: Tensor

    def flat(self) -> Weights:
        """Of a 1×1 convolution as that of a linear layer."""
        return Weights(*(w.flatten(2) for w in self))


def stacked_layer(
    x: Tensor,
    w: Weights,
    geometry: Geometry | None,
    asked: Asked,
    kernels: KernelSet,
    beside: Beside | None = None,
    *,
    reading: Reading | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """``x`` (device, sample, …) through each device's weight.

    Its gradient is computed ``beside`` that of ``x``, where that is given. ``reading`` is what is
    left to do to ``x``, for kernels that :func:`finishes_what_it_reads`. Where a kernel can, it
    takes moments of each device's first ``valid`` samples.
    """
    # Only what nothing is done with before the end of a step may come late.
    late = beside if w.own.is_leaf else None

    def product(rows: Tensor, w: Weights, beside: Beside | None = late) -> Tensor:
        return _weighted(rows, w, _PRODUCT, None, asked, beside)[0]

    if geometry is None:
        return from_rows(product(rows_of(x, image=False), w), x, image=False), None
    own = kernels.convolution(x, w.own.shape[1:], geometry)
    few = geometry.groups == 1 and w.own[0, 0].numel() <= _FEW and geometry.dilation == (1, 1)
    if is_pointwise(w.own.shape, geometry):
        vertical, horizontal = geometry.stride
        if (vertical, horizontal) != (1, 1):
            x = _apply(_EveryOther, x, vertical, horizontal)
            geometry = replace(geometry, stride=(1, 1))
        if own is None:
            return from_rows(product(rows_of(x), w.flat()), x), None
    elif x.is_cuda and few and reading is None and not x.requires_grad:
        columns = _unfolded(x, w.own.shape[3:], geometry)
        y = product(columns.flatten(1, 3), w.flat(), None)
        return y.view(*columns.shape[:4], -1).permute(0, 1, 4, 2, 3), None
    if own is not None:
        return _weighted(x, w, own, geometry, asked, late, reading, valid if own.reads else None)
    return _apply(_Convolve, x, *w, geometry), None


def finishes_what_it_reads(
    x: Tensor, shape: Sequence[int], geometry: Geometry, kernels: KernelSet
) -> bool:
    """Whether a layer with weights of this shape may be given what is not finished."""
    if geometry.stride != (1, 1) and is_pointwise(shape, geometry):
        return False
    own = kernels.convolution(x, shape, geometry)
    return own is not None and own.reads


def _weighted(
    x: Tensor,
    w: Weights,
    kernels: LayerKernels,
    geometry: Geometry | None,
    asked: Asked,
    beside: Beside | None,
    reading: Reading | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    y, *moments = _Weighted.apply(  # type: ignore[no-untyped-call]
        x, *w, kernels, geometry, asked, beside, reading, valid
    )
    return y, Moments(*moments) if moments else None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def linear_layers(
    x: Tensor,
    weights: Sequence[Weights],
    biases: Sequence[Tensor | None],
    activation: Activation,
    kernels: ModuleType,
    passed: Tensor | None,
    grids: Sequence[tuple[StackedGrid | None, StackedGrid | None]],
    asked: Asked,
) -> tuple[list[Tensor], Tensor | None]:
    """``x`` through several linear layers, by kernels that shift and activate, too.

    What comes back through the activation is left to who finishes the layers. ``passed`` is
    handed on as it is to others who read ``x``: what they send back is added to the gradient of
    ``x`` on the way, instead of in a pass of its own. ``grids`` are what each layer rounds
    its value and its gradient to.
    """
    ways = [tensor for way in zip(*weights, strict=True) for tensor in way]
    found = _Linears.apply(  # type: ignore[no-untyped-call]
        rows_of(x, image=False), passed, kernels, activation, grids, asked, *biases, *ways
    )
    rows = found[: len(weights)]
    handed_on = None if passed is None else found[-1]
    return [from_rows(y, x, image=False) for y in rows], handed_on


def _unfolded(x: Tensor, kernel: Sequence[int], g: Geometry) -> Tensor:
    """What a convolution of few inputs, such as a stem's, is a matrix product with."""
    vertical, horizontal = g.padding
    padded = F.pad(x, (horizontal, horizontal, vertical, vertical))
    windows = padded.unfold(3, kernel[0], g.stride[0]).unfold(4, kernel[1], g.stride[1])
    columns = windows.permute(0, 1, 3, 4, 2, 5, 6)  # (device, sample, h, w, channel, point, point)
    return columns.flatten(4)


class _EveryOther(torch.autograd.Function):
    """Some rows and columns of images; their gradient lies channels last, as the images do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vertical: int, horizontal: int) -> Tensor:
        ctx.shape, ctx.steps = x.shape, (vertical, horizontal)
        return x[..., ::vertical, ::horizontal]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        d, b, channels, height, width = ctx.shape
        vertical, horizontal = ctx.steps
        gx = g.new_zeros(d, b, height, width, channels).permute(0, 1, 4, 2, 3)
        gx[..., ::vertical, ::horizontal] = g
        return gx, None, None


class _Weighted(torch.autograd.Function):
    """Each device's weight on its own input, and the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor,
        w: Tensor,
        w_back: Tensor,
        kernels: LayerKernels,
        geometry: Geometry | None,
        asked: Asked,
        beside: Beside | None,
        reading: Reading | None,
        valid: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x = _as_channels_last(x)
        ctx.save_for_backward(x, w_back)
        ctx.kernels, ctx.geometry, ctx.asked = kernels, geometry, asked
        ctx.weight_dtype, ctx.beside, ctx.reading = own.dtype, beside, reading
        # Kernels that read what is finished know nothing of what else there may be to do.
        more = (reading, valid) if kernels.reads else ()
        y, moments = kernels.forward(x, w, geometry, *more)
        if moments is None:
            return (y,)
        ctx.mark_non_differentiable(*moments)
        ctx.set_materialize_grads(False)  # nobody makes zeros for moments
        return y, *moments

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x, w_back = ctx.saved_tensors
        g, geometry, asked = _as_channels_last(g), ctx.geometry, ctx.asked
        more = (ctx.reading,) if ctx.kernels.reads else ()

        def weight() -> Tensor:
            found: Tensor = ctx.kernels.weight(g, x, w_back, geometry, asked.weight, *more)
            return found.to(ctx.weight_dtype)

        gx = gw = None
        if ctx.needs_input_grad[1]:
            gw = weight() if ctx.beside is None else ctx.beside.run(weight, g, x)
        if ctx.needs_input_grad[0]:
            gx = ctx.kernels.input(g, w_back, x, geometry, asked.value)
        return gx, gw, *[None] * 8


class _Linears(torch.autograd.Function):
    """Several layers: all biases, all weights that learn, then those forward and those back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        passed: Tensor | None,
        kernels: ModuleType,
        activation: Activation,
        grids: Sequence[tuple[StackedGrid | None, StackedGrid | None]],
        asked: Asked,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        n = len(tensors) // 4
        biases, own, forward, back = (tensors[i * n : (i + 1) * n] for i in range(4))
        of_values, ctx.grids = (kernels.stacked(kind) for kind in zip(*grids, strict=True))
        ctx.kernels, ctx.asked, ctx.dtypes = kernels, asked, [w.dtype for w in own]
        ctx.save_for_backward(x, *back)
        found = kernels.linear(x, forward, biases, activation, of_values)
        return (*found,) if passed is None else (*found, passed.view_as(passed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *back = ctx.saved_tensors
        n = len(back)
        own, others = gradients[:n], gradients[n:]
        grid, asked, gx = ctx.grids, ctx.asked, None
        if ctx.needs_input_grad[0]:
            sent = others[0].reshape(x.shape) if others else None
            gx = ctx.kernels.linear_input(own, back, asked.value, sent, grid)
        found = [
            ctx.kernels.linear_weight(g, x, asked.weight, None if grid is None else grid[i])
            for i, g in enumerate(own)
        ]
        shifts = [
            gb if needed else None
            for (_, gb), needed in zip(found, ctx.needs_input_grad[6 : 6 + n], strict=True)
        ]
        weights = [gw.to(dtype) for (gw, _), dtype in zip(found, ctx.dtypes, strict=True)]
        return gx, *[None] * 5, *shifts, *weights, *[None] * 2 * n


def _sum_of_products(g: Tensor, x: Tensor) -> Tensor:
    """gᵀ · x over many rows: cut into pieces where the result alone is too small for a GPU."""
    d, n, out = g.shape
    tiles = d * -(-out // _TILE) * -(-x.shape[2] // _TILE)
    pieces = 1
    while x.is_cuda and tiles * pieces < _TILES and n % (2 * pieces) == 0:
        if n // (2 * pieces) < _ROWS:
            break
        pieces *= 2
    if pieces == 1:
        return torch.bmm(g.transpose(1, 2), x)
    g = g.reshape(d * pieces, n // pieces, out)
    x = x.reshape(d * pieces, n // pieces, -1)
    parts = torch.bmm(g.transpose(1, 2), x).view(d, pieces, out, -1)
    return parts.sum(1, dtype=torch.float32)


# (device, row, in) · (device, out, in)ᵀ
_PRODUCT = LayerKernels(
    unfinishing(lambda x, w, _: torch.bmm(x, w.to(x.dtype).transpose(1, 2))),
    lambda g, w, *_: torch.bmm(g, w.to(g.dtype)),
    lambda g, x, *_: _sum_of_products(g, x),
)


class _Convolve(torch.autograd.Function):
    """Any convolution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, w: Tensor, w_back: Tensor, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, w_back)
        ctx.geometry, ctx.weight_dtype = geometry, own.dtype
        g, w = geometry, w.to(x.dtype)
        if x.is_cuda:
            return _stack_images(
                [
                    F.conv2d(one, own, None, g.stride, g.padding, g.dilation, g.groups)
                    for one, own in zip(x, _channels_last(w), strict=True)
                ]
            )
        groups = len(x) * g.groups
        y = F.conv2d(_in_groups(x), w.flatten(0, 1), None, g.stride, g.padding, g.dilation, groups)
        return _apart(y, len(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_back = ctx.saved_tensors
        g, w_back = ctx.geometry, w_back.to(x.dtype)
        mask = [*ctx.needs_input_grad[:2], False]

        def back(grad: Tensor, x: Tensor, w: Tensor, groups: int) -> tuple[Tensor, Tensor]:
            found = torch.ops.aten.convolution_backward(
                grad, x, w, None, g.stride, g.padding, g.dilation, False, [0, 0], groups, mask
            )
            return found[0], found[1]

        if x.is_cuda:
            grad = _as_channels_last(grad)
            parts = [
                back(*each, g.groups) for each in zip(grad, x, _channels_last(w_back), strict=True)
            ]
            gx = _stack_images([p[0] for p in parts]) if mask[0] else None
            gw = torch.stack([p[1] for p in parts]) if mask[1] else None
        else:
            wide = len(x) * g.groups
            gx, gw = back(_in_groups(grad), _in_groups(x), w_back.flatten(0, 1), wide)
            gx = _apart(gx, len(x)) if mask[0] else None
            gw = gw.view(w_back.shape) if mask[1] else None
        return gx, None if gw is None else gw.to(ctx.weight_dtype), None, None, None


def _channels_last(w: Tensor) -> list[Tensor]:
    return [own.contiguous(memory_format=torch.channels_last) for own in w]


def _as_channels_last(x: Tensor) -> Tensor:
    """Images of many devices, as fast convolutions want them; rows stay as they are."""
    return x if x.ndim == 3 else x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _stack_images(each: list[Tensor]) -> Tensor:
    return torch.stack([one.permute(0, 2, 3, 1) for one in each]).permute(0, 1, 4, 2, 3)


def _in_groups(x: Tensor) -> Tensor:
    """(device, sample, channel, …) to (sample, device · channel, …)."""
    return x.transpose(0, 1).flatten(1, 2)


def _apart(y: Tensor, devices: int) -> Tensor:
    return _as_channels_last(y.unflatten(1, (devices, -1)).transpose(0, 1))
