"""Dropout, the addition after it and LayerNorm, in one pass over their tensors each way.

Rows (device, row, channel) lie one after the other, and a program holds whole rows. What was
dropped is not kept: it follows from the number that the step drew and the place, so the way back
makes it again. Sums over rows have a fixed order, so runs repeat to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.numerics import StackedGrid
from cocofl.vector.kernels.base import Dropping
from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before
from cocofl.vector.kernels.triton_rows import grid_parts, rounded, stride

_TILE = 4096  # elements that a program holds at a time
_PROGRAMS = 2048  # that share the rows of a sum, at most
_WARPS = 8  # of a program that holds a tile of several tensors

# What gains nothing from being a multiple of 16: see `triton_launch`.
_compiled_once = kernels(
    sizes=("n", "turns", "weight_stride", "bias_stride", "threshold"),
    of_devices=(
        "ACTIVE",
        "ASKED",
        "SEED",
        "WEIGHT",
        "BIAS",
        "LEADING",
        "SCALE",
        "PER_STEP",
        "LOW",
        "HIGH",
    ),
)


def _seed(like: Tensor) -> Tensor:
    """Drawn on the GPU, so that a captured step draws anew each time."""
    return torch.randint(2**62, (1,), device=like.device)


@triton.jit
def _mixed(h):
    """MurmurHash3's last step: every bit of the result depends on every bit."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _kept(at, d, SEED, ACTIVE, threshold, keep_factor):
    """What to multiply the elements at these places with: 0, or what makes up for the zeros."""
    seed = tl.load(SEED)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    h = _mixed(_mixed(at.to(tl.uint32) ^ low) + high)
    factor = tl.where(h >= threshold.to(tl.uint32), keep_factor, 0.0)
    return tl.where(tl.load(ACTIVE + d) != 0, factor, 1.0)


@_compiled_once
def _drop(X, Y, SEED, ACTIVE, ASKED, size, threshold, keep_factor, BN: tl.constexpr):
    wait_for_those_before()
    d = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    at, inside = d * size + i, i < size
    if ASKED is not None:
        inside = inside & (tl.load(ASKED + d) != 0)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, x * _kept(at, d, SEED, ACTIVE, threshold, keep_factor), mask=inside)


@triton.jit
def _leading(LEADING, d, channels, COUNTED: tl.constexpr):
    """How many channels a device's rows have."""
    if COUNTED:
        channels = tl.load(LEADING + d)
    return channels


@triton.jit
def _standard(x, c, channels, eps):
    """Rows with mean 0 and variance 1, and what they were multiplied with; 0 after ``channels``."""
    x = tl.where(c < channels, x, 0.0)
    x = x - (tl.sum(x, 1) / channels)[:, None]
    x = tl.where(c < channels, x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / channels + eps)
    return x * rstd[:, None], rstd[:, None]


@_compiled_once
def _normalise(
    X, ADDEND, SUM, Y, WEIGHT, BIAS, SEED, ACTIVE, LEADING, SCALE, PER_STEP, LOW, HIGH,
    n, channels, weight_stride, bias_stride, eps, threshold, keep_factor,
    ADDS: tl.constexpr, DROPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    COUNTED: tl.constexpr, ROUNDS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    d = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    c = tl.arange(0, BC)[None, :]
    inside = (r < n) & (c < channels)
    at = (d * n + r) * channels + c
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        x = x * _kept(at, d, SEED, ACTIVE, threshold, keep_factor)
    if ADDS:
        x = x + tl.load(ADDEND + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS or DROPS:
        tl.store(SUM + at, x, mask=inside)
    y, _ = _standard(x, c, _leading(LEADING, d, channels, COUNTED), eps)
    if HAS_WEIGHT:
        y = y * tl.load(WEIGHT + d * weight_stride + c, mask=c < channels, other=0.0)
    if HAS_BIAS:
        y = y + tl.load(BIAS + d * bias_stride + c, mask=c < channels, other=0.0)
    if ROUNDS:
        y = rounded(y, d, SCALE, PER_STEP, LOW, HIGH)
    tl.store(Y + at, y, mask=inside)


@_compiled_once
def _normalise_back(
    G, SUM, WEIGHT, SEED, ACTIVE, ASKED, LEADING, GSUM, GX, OUT, n, channels, turns, weight_stride,
    eps, threshold, keep_factor,
    DROPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, COUNTED: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    d, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BC)[None, :]
    leading = _leading(LEADING, d, channels, COUNTED)
    gw = tl.zeros((BN, BC), tl.float32)
    gb = tl.zeros((BN, BC), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(WEIGHT + d * weight_stride + c, mask=c < channels, other=0.0)
    for turn in range(turns * (tl.load(ASKED + d) != 0).to(tl.int32)):
        r = (chunk * turns + turn) * BN + tl.arange(0, BN)[:, None]
        inside = (r < n) & (c < channels)
        at = (d * n + r) * channels + c
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(SUM + at, mask=inside, other=0.0).to(tl.float32)
        x, rstd = _standard(x, c, leading, eps)
        gw += g * x
        gb += g
        if HAS_WEIGHT:
            g = g * weight
        g = tl.where(c < leading, g, 0.0)
        shift = (tl.sum(g, 1) / leading)[:, None]
        slope = (tl.sum(g * x, 1) / leading)[:, None]
        g = tl.where(c < leading, (g - shift - x * slope) * rstd, 0.0)
        tl.store(GSUM + at, g, mask=inside)
        if DROPS:
            g = g * _kept(at, d, SEED, ACTIVE, threshold, keep_factor)
            tl.store(GX + at, g, mask=inside)
    OUT += (d * tl.num_programs(1) + chunk) * 2 * channels
    tl.store(OUT + c, tl.sum(gw, 0)[None, :], mask=c < channels)
    tl.store(OUT + channels + c, tl.sum(gb, 0)[None, :], mask=c < channels)


def drop(x: Tensor, dropping: Dropping, asked: Tensor) -> Tensor:
    """``x`` (device, sample, …) with elements set to zero, on the devices where that is active.

    Its gradient is undefined on devices that did not ask.
    """
    return _Drop.apply(x, _seed(x), dropping, asked)


def normalise(
    x: Tensor,
    addend: Tensor | None,
    dropping: Dropping | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    asked: Tensor,
    channels: Tensor | None = None,
    grid: StackedGrid | None = None,
) -> Tensor:
    """LayerNorm over the last axis of ``drop(x) + addend``, with each device's own factors.

    Of the leading ``channels`` only, (device), where they are given. The result is rounded to
    ``grid``. The gradients of ``x`` and ``addend`` are undefined on devices that did not ask,
    those of the factors zero.
    """
    seed = None if dropping is None else _seed(x)
    return _Normalise.apply(x, addend, weight, bias, seed, dropping, eps, asked, channels, grid)


def _random(dropping: Dropping | None) -> tuple[int, float]:
    """Which of 2^32 numbers drop, and what makes up for it."""
    p = 0.0 if dropping is None else dropping.p
    return min(round(p * 2**32), 2**32 - 1), 1.0 / (1.0 - p)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, dropping: Dropping, asked: Tensor) -> Tensor:
        ctx.seed, ctx.dropping, ctx.asked = seed, dropping, asked
        return _dropped(x, seed, dropping)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(g, ctx.seed, ctx.dropping, ctx.asked), None, None, None


def _dropped(x: Tensor, seed: Tensor, dropping: Dropping, asked: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    y, size = torch.empty_like(x), x[0].numel()
    _drop[len(x), triton.cdiv(size, _TILE)](
        x, y, seed, dropping.active, asked, size, *_random(dropping), BN=_TILE
    )
    return y


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        dropping: Dropping | None,
        eps: float,
        asked: Tensor,
        leading: Tensor | None,
        grid: StackedGrid | None,
    ) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d, n, channels = len(x), x[0].numel() // x.shape[-1], x.shape[-1]
        down, across = _blocks(n, channels)
        total = x if addend is None and dropping is None else torch.empty_like(x)
        _normalise[d, triton.cdiv(n, down)](
            x, None if addend is None else addend.contiguous(), total, y, weight, bias, seed,
            None if dropping is None else dropping.active, leading, *grid_parts(grid), n, channels,
            stride(weight), stride(bias), eps, *_random(dropping), ADDS=addend is not None,
            DROPS=dropping is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            COUNTED=leading is not None, ROUNDS=grid is not None, BN=down, BC=across,
            num_warps=_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.seed, ctx.dropping, ctx.eps, ctx.leading = seed, dropping, eps, leading
        ctx.asked = asked
        ctx.has_addend, ctx.has_bias = addend is not None, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        dropping, leading, g = ctx.dropping, ctx.leading, g.contiguous()
        d, n, channels = len(g), g[0].numel() // g.shape[-1], g.shape[-1]
        down, across = _blocks(n, channels)
        tiles = triton.cdiv(n, down)
        turns = max(1, d * tiles // _PROGRAMS)
        chunks = triton.cdiv(tiles, turns)
        sums = torch.empty(d, chunks, 2 * channels, device=g.device)
        shared = torch.empty_like(total)
        gx = shared if dropping is None else torch.empty_like(total)
        _normalise_back[d, chunks](
            g, total, weight, ctx.seed, None if dropping is None else dropping.active, ctx.asked,
            leading, shared, gx, sums, n, channels, turns, stride(weight), ctx.eps,
            *_random(dropping), DROPS=dropping is not None,
            HAS_WEIGHT=weight is not None, COUNTED=leading is not None, BN=down, BC=across,
            num_warps=_WARPS,
        )  # fmt: skip
        addend = shared if ctx.has_addend else None
        gw, gb = sums.sum(1).split(channels, 1)
        learned = None if weight is None else gw, gb if ctx.has_bias else None
        return gx, addend, *learned, *[None] * 6


def _blocks(n: int, channels: int) -> tuple[int, int]:
    """Rows and channels of a tile."""
    across = triton.next_power_of_2(channels)
    return max(1, min(_TILE // across, triton.next_power_of_2(n))), across
