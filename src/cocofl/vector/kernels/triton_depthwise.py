"""3×3 convolutions of each channel by itself, images channels last: (device · sample, h, w, c)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.freeze.kernels import Geometry

_TILE = 1024  # columns times channels that a program holds at a time


@triton.jit
def _forward(
    X, W, Y, samples, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    d = image // samples
    w = tl.program_id(1) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    across = c < channels
    for h in range(out_height):
        total = tl.zeros((BP, BC), tl.float32)
        for i in tl.static_range(3):
            row = h * STRIDE_H + i - PAD_H
            if (row >= 0) & (row < height):
                begin = X + (image * height + row) * width * channels
                for j in tl.static_range(3):
                    column = w * STRIDE_W + j - PAD_W
                    there = (column >= 0) & (column < width) & across
                    x = tl.load(begin + column * channels + c, mask=there, other=0.0)
                    tap = tl.load(W + (d * 9 + i * 3 + j) * channels + c, mask=across, other=0.0)
                    total += x.to(tl.float32) * tap
        at = ((image * out_height + h) * out_width + w) * channels + c
        tl.store(Y + at, total, mask=(w < out_width) & across)


@triton.jit
def _input(
    G, W, GX, samples, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    d = image // samples
    w = tl.program_id(1) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    across = c < channels
    for h in range(height):
        total = tl.zeros((BP, BC), tl.float32)
        for i in tl.static_range(3):
            down = h + PAD_H - i
            row = down // STRIDE_H
            if (down >= 0) & (down % STRIDE_H == 0) & (row < out_height):
                begin = G + (image * out_height + row) * out_width * channels
                for j in tl.static_range(3):
                    right = w + PAD_W - j
                    column = right // STRIDE_W
                    there = (right >= 0) & (column < out_width) & (right % STRIDE_W == 0) & across
                    g = tl.load(begin + column * channels + c, mask=there, other=0.0)
                    tap = tl.load(W + (d * 9 + i * 3 + j) * channels + c, mask=across, other=0.0)
                    total += g.to(tl.float32) * tap
        at = ((image * height + h) * width + w) * channels + c
        tl.store(GX + at, total, mask=(w < width) & across)


@triton.jit
def _weight(
    G, X, OUT, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of one image and one row of taps; Triton has no arrays of tiles, so taps are by hand."""
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    i = tl.program_id(2)
    across = c < channels
    left = tl.zeros((BP, BC), tl.float32)
    middle = tl.zeros((BP, BC), tl.float32)
    right = tl.zeros((BP, BC), tl.float32)
    for h in range(out_height):
        row = h * STRIDE_H + i - PAD_H
        if (row >= 0) & (row < height):
            source = X + (image * height + row) * width * channels
            for first in range(0, out_width, BP):
                w = first + tl.arange(0, BP)[:, None]
                inside = (w < out_width) & across
                at = ((image * out_height + h) * out_width + w) * channels + c
                g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
                column = w * STRIDE_W - PAD_W
                there = inside & (column >= 0) & (column < width)
                x = tl.load(source + column * channels + c, mask=there, other=0.0)
                left += x.to(tl.float32) * g
                column += 1
                there = inside & (column >= 0) & (column < width)
                x = tl.load(source + column * channels + c, mask=there, other=0.0)
                middle += x.to(tl.float32) * g
                column += 1
                there = inside & (column >= 0) & (column < width)
                x = tl.load(source + column * channels + c, mask=there, other=0.0)
                right += x.to(tl.float32) * g
    out = OUT + (image * 9 + i * 3) * channels + c
    tl.store(out, tl.sum(left, 0)[None, :], mask=across)
    tl.store(out + channels, tl.sum(middle, 0)[None, :], mask=across)
    tl.store(out + 2 * channels, tl.sum(right, 0)[None, :], mask=across)


def _walk(g: Geometry) -> dict[str, int]:
    return {
        "STRIDE_H": g.stride[0],
        "STRIDE_W": g.stride[1],
        "PAD_H": g.padding[0],
        "PAD_W": g.padding[1],
    }


def _tile(columns: int, channels: int) -> tuple[int, int]:
    """Columns and channels of a tile."""
    down = min(triton.next_power_of_2(columns), 32)
    across = min(_TILE // down, 128)
    while across > 16 and triton.cdiv(channels, across) * across > 1.15 * channels:
        across //= 2
    return down, across


def _taps(w: Tensor) -> Tensor:
    """(device, channel, 1, 3, 3) to (device, tap, channel)."""
    return w.flatten(2).transpose(1, 2).float().contiguous()


def depthwise(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """``x`` (device, sample, channel, height, width), lying channels last."""
    d, b, channels, height, width = x.shape
    sizes = [
        (size + 2 * pad - 3) // stride + 1
        for size, pad, stride in zip(
            (height, width), geometry.padding, geometry.stride, strict=True
        )
    ]
    y = torch.empty(d, b, *sizes, channels, dtype=x.dtype, device=x.device)
    down, across = _tile(sizes[1], channels)
    grid = d * b, triton.cdiv(sizes[1], down), triton.cdiv(channels, across)
    _forward[grid](
        x, _taps(w), y, b, height, width, *sizes, channels, **_walk(geometry), BP=down, BC=across
    )
    return y.permute(0, 1, 4, 2, 3)


def depthwise_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of ``x`` from that of the result."""
    d, b, channels, height, width = x.shape
    gx = torch.empty(d, b, height, width, channels, dtype=g.dtype, device=g.device)
    down, across = _tile(width, channels)
    grid = d * b, triton.cdiv(width, down), triton.cdiv(channels, across)
    _input[grid](
        g, _taps(w), gx, b, height, width, *g.shape[3:], channels, **_walk(geometry),
        BP=down, BC=across,
    )  # fmt: skip
    return gx.permute(0, 1, 4, 2, 3)


def depthwise_weight(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the weight: a sum over each image, then over the images of a device."""
    d, b, channels, height, width = x.shape
    parts = torch.empty(d, b, 9, channels, device=g.device)
    down, across = _tile(g.shape[4], channels)
    _weight[d * b, triton.cdiv(channels, across), 3](
        g, x, parts, height, width, *g.shape[3:], channels, **_walk(geometry), BP=down, BC=across
    )
    return parts.sum(1).transpose(1, 2).reshape(w.shape)
