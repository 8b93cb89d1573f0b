"""3×3 convolutions of each channel by itself, images channels last: (device · sample, h, w, c)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.freeze.kernels import Geometry

_POSITIONS, _CHANNELS = 32, 64


@triton.jit
def _forward(
    X, W, Y, samples, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    d = image // samples
    p = tl.program_id(1) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    h, w = p // out_width, p % out_width
    inside = (p < out_height * out_width) & (c < channels)
    total = tl.zeros((BP, BC), tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            row, column = h * STRIDE_H + i - PAD_H, w * STRIDE_W + j - PAD_W
            there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            at = ((image * height + row) * width + column) * channels + c
            x = tl.load(X + at, mask=there, other=0.0).to(tl.float32)
            tap = tl.load(W + (d * 9 + i * 3 + j) * channels + c, mask=c < channels, other=0.0)
            total += x * tap
    tl.store(Y + (image * out_height * out_width + p) * channels + c, total, mask=inside)


@triton.jit
def _input(
    G, W, GX, samples, height, width, out_height, out_width, channels,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    d = image // samples
    p = tl.program_id(1) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    h, w = p // width, p % width
    inside = (p < height * width) & (c < channels)
    total = tl.zeros((BP, BC), tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            down, right = h + PAD_H - i, w + PAD_W - j
            row, column = down // STRIDE_H, right // STRIDE_W
            there = inside & (down >= 0) & (right >= 0) & (row < out_height) & (column < out_width)
            there = there & (down % STRIDE_H == 0) & (right % STRIDE_W == 0)
            at = ((image * out_height + row) * out_width + column) * channels + c
            g = tl.load(G + at, mask=there, other=0.0).to(tl.float32)
            tap = tl.load(W + (d * 9 + i * 3 + j) * channels + c, mask=c < channels, other=0.0)
            total += g * tap
    tl.store(GX + (image * height * width + p) * channels + c, total, mask=inside)


@triton.jit
def _product(X, g, image, h, w, c, inside, height, width, channels, i, j,
             STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
             PAD_H: tl.constexpr, PAD_W: tl.constexpr):  # fmt: skip
    row, column = h * STRIDE_H + i - PAD_H, w * STRIDE_W + j - PAD_W
    there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    at = ((image * height + row) * width + column) * channels + c
    return tl.load(X + at, mask=there, other=0.0).to(tl.float32) * g


@triton.jit
def _weight(
    G, X, OUT, height, width, out_height, out_width, channels, turns,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of one image; taps are held apart by hand, since Triton has no arrays of tiles."""
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    a0 = tl.zeros((BP, BC), tl.float32)
    a1 = tl.zeros((BP, BC), tl.float32)
    a2 = tl.zeros((BP, BC), tl.float32)
    b0 = tl.zeros((BP, BC), tl.float32)
    b1 = tl.zeros((BP, BC), tl.float32)
    b2 = tl.zeros((BP, BC), tl.float32)
    c0 = tl.zeros((BP, BC), tl.float32)
    c1 = tl.zeros((BP, BC), tl.float32)
    c2 = tl.zeros((BP, BC), tl.float32)
    for turn in range(turns):
        p = turn * BP + tl.arange(0, BP)[:, None]
        h, w = p // out_width, p % out_width
        inside = (p < out_height * out_width) & (c < channels)
        at = (image * out_height * out_width + p) * channels + c
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        a0 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            0,
            0,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        a1 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            0,
            1,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        a2 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            0,
            2,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        b0 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            1,
            0,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        b1 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            1,
            1,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        b2 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            1,
            2,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        c0 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            2,
            0,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        c1 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            2,
            1,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
        c2 += _product(
            X,
            g,
            image,
            h,
            w,
            c,
            inside,
            height,
            width,
            channels,
            2,
            2,
            STRIDE_H,
            STRIDE_W,
            PAD_H,
            PAD_W,
        )
    out = OUT + image * 9 * channels + c
    across = c < channels
    tl.store(out, tl.sum(a0, 0)[None, :], mask=across)
    tl.store(out + channels, tl.sum(a1, 0)[None, :], mask=across)
    tl.store(out + 2 * channels, tl.sum(a2, 0)[None, :], mask=across)
    tl.store(out + 3 * channels, tl.sum(b0, 0)[None, :], mask=across)
    tl.store(out + 4 * channels, tl.sum(b1, 0)[None, :], mask=across)
    tl.store(out + 5 * channels, tl.sum(b2, 0)[None, :], mask=across)
    tl.store(out + 6 * channels, tl.sum(c0, 0)[None, :], mask=across)
    tl.store(out + 7 * channels, tl.sum(c1, 0)[None, :], mask=across)
    tl.store(out + 8 * channels, tl.sum(c2, 0)[None, :], mask=across)


def _walk(g: Geometry) -> dict[str, int]:
    return {
        "STRIDE_H": g.stride[0],
        "STRIDE_W": g.stride[1],
        "PAD_H": g.padding[0],
        "PAD_W": g.padding[1],
    }


def _tile(positions: int, channels: int) -> tuple[int, int]:
    return (
        min(triton.next_power_of_2(positions), _POSITIONS),
        min(triton.next_power_of_2(channels), _CHANNELS),
    )


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
    grid = d * b, triton.cdiv(sizes[0] * sizes[1], down), triton.cdiv(channels, across)
    _forward[grid](
        x, _taps(w), y, b, height, width, *sizes, channels, **_walk(geometry), BP=down, BC=across
    )
    return y.permute(0, 1, 4, 2, 3)


def depthwise_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of ``x`` from that of the result."""
    d, b, channels, height, width = x.shape
    gx = torch.empty(d, b, height, width, channels, dtype=g.dtype, device=g.device)
    down, across = _tile(height * width, channels)
    grid = d * b, triton.cdiv(height * width, down), triton.cdiv(channels, across)
    _input[grid](
        g, _taps(w), gx, b, height, width, *g.shape[3:], channels, **_walk(geometry),
        BP=down, BC=across,
    )  # fmt: skip
    return gx.permute(0, 1, 4, 2, 3)


def depthwise_weight(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the weight: a sum over each image, then over the images of a device."""
    d, b, channels, height, width = x.shape
    positions = g.shape[3] * g.shape[4]
    parts = torch.empty(d, b, 9, channels, device=g.device)
    down, across = (
        min(triton.next_power_of_2(positions), 32),
        min(triton.next_power_of_2(channels), 32),
    )
    _weight[d * b, triton.cdiv(channels, across)](
        g, x, parts, height, width, *g.shape[3:], channels, triton.cdiv(positions, down),
        **_walk(geometry), BP=down, BC=across,
    )  # fmt: skip
    return parts.sum(1).transpose(1, 2).reshape(w.shape)
