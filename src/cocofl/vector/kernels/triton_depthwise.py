"""3×3 convolutions of each channel by itself, images channels last: (device · sample, h, w, c)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.freeze.kernels import Geometry

_TILE = 2048  # positions times channels that a program holds at a time

# Positions come first in a grid, images last: programs that run side by side read the same rows.


@triton.jit
def _forward(
    X, W, Y, samples, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    d = image // samples
    p = tl.program_id(0) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    h, w = p // out_width, p % out_width
    inside = (p < out_height * out_width) & (c < channels)
    total = tl.zeros((BP, BC), tl.float32)
    begin = X + image * height * width * channels
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            row, column = h * STRIDE_H + i - PAD_H, w * STRIDE_W + j - PAD_W
            there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            at = (row * width + column) * channels + c
            x = tl.load(begin + at, mask=there, other=0.0).to(tl.float32)
            tap = tl.load(W + (d * 9 + i * 3 + j) * channels + c, mask=c < channels, other=0.0)
            total += x * tap
    tl.store(Y + (image * out_height * out_width + p) * channels + c, total, mask=inside)


@triton.jit
def _input(
    G, W, GX, samples, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    d = image // samples
    p = tl.program_id(0) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    h, w = p // width, p % width
    inside = (p < height * width) & (c < channels)
    total = tl.zeros((BP, BC), tl.float32)
    begin = G + image * out_height * out_width * channels
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            down, right = h + PAD_H - i, w + PAD_W - j
            row, column = down // STRIDE_H, right // STRIDE_W
            there = inside & (down >= 0) & (right >= 0) & (row < out_height) & (column < out_width)
            there = there & (down % STRIDE_H == 0) & (right % STRIDE_W == 0)
            at = (row * out_width + column) * channels + c
            g = tl.load(begin + at, mask=there, other=0.0).to(tl.float32)
            tap = tl.load(W + (d * 9 + i * 3 + j) * channels + c, mask=c < channels, other=0.0)
            total += g * tap
    tl.store(GX + (image * height * width + p) * channels + c, total, mask=inside)


@triton.jit
def _weight(
    G, X, OUT, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of one image and one row of taps; Triton has no arrays of tiles, so taps are by hand."""
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    i = tl.program_id(0)
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


def _tile(positions: int, channels: int) -> tuple[int, int]:
    """Positions and channels of a tile."""
    across = 64
    while across > 16 and triton.cdiv(channels, across) * across > 1.15 * channels:
        across //= 2
    return min(triton.next_power_of_2(positions), _TILE // across), across


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
    down, across = _tile(sizes[0] * sizes[1], channels)
    grid = triton.cdiv(sizes[0] * sizes[1], down), triton.cdiv(channels, across), d * b
    _forward[grid](
        x, _taps(w), y, b, height, width, *sizes, channels, **_walk(geometry), BP=down, BC=across
    )
    return y.permute(0, 1, 4, 2, 3)


def depthwise_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of ``x`` from that of the result."""
    d, b, channels, height, width = x.shape
    gx = torch.empty(d, b, height, width, channels, dtype=g.dtype, device=g.device)
    down, across = _tile(height * width, channels)
    grid = triton.cdiv(height * width, down), triton.cdiv(channels, across), d * b
    _input[grid](
        g, _taps(w), gx, b, height, width, *g.shape[3:], channels, **_walk(geometry),
        BP=down, BC=across,
    )  # fmt: skip
    return gx.permute(0, 1, 4, 2, 3)


def depthwise_weight(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the weight: a sum over each image, then over the images of a device."""
    d, b, channels, height, width = x.shape
    parts = torch.empty(d, b, 9, channels, device=g.device)
    across = _tile(1, channels)[1]
    down = min(triton.next_power_of_2(g.shape[4]), 32)
    _weight[3, triton.cdiv(channels, across), d * b](
        g, x, parts, height, width, *g.shape[3:], channels, **_walk(geometry), BP=down, BC=across
    )
    return parts.sum(1).transpose(1, 2).reshape(w.shape)
