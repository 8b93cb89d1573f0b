"""The elementwise chains around a layer, fused: each reads and writes its tensors once.

The same functions as in :mod:`~cocofl.vector.kernels.plain`, which defines the numbers. Training
with small batches is bound by memory, so what counts is how often a tensor is read: a norm costs
one pass for its statistics and one that normalises, adds, activates and rounds; on the way back
one for the sums and one for the gradient. Sums have a fixed order, so runs repeat to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.numerics import SIGNED_LEVELS, StackedGrid
from cocofl.vector.kernels.base import Activation, Coefficients, Gradients, Kept, Norm

_TILE = 2048  # float32 numbers that a program holds at a time
_PROGRAMS = 528  # that sum something up: enough to fill a large GPU, and each has much to read
_LINE = 32  # elements of a row that are worth reading at a time
_CHUNKS = 128  # partial sums per channel, at most

# Triton compiles a kernel anew for sizes and addresses that are multiples of 16, and each takes a
# third of a second. Only the channels and the large tensors gain from it: these do not.
_SIZES = ("n", "turns", "chunks", "per_chunk", "devices", "weight_stride", "bias_stride")
_SIZES += ("layer_stride", "mean_stride", "variance_stride", "offset_stride", "size")
_OF_DEVICES = ("ROWS", "CAP", "WITH_BATCH", "TRACKS", "MOMENTUM", "FLY", "UNSIGNED", "MEASURED")
_OF_DEVICES += ("SCALE", "PER_STEP", "LOW", "HIGH", "Z_SCALE", "Z_PER_STEP", "Z_LOW", "Z_HIGH")
_OF_DEVICES += ("WEIGHT", "BIAS", "LAYER_BIAS", "RUNNING_MEAN", "RUNNING_VARIANCE", "ASKED")
_compiled_once = partial(
    triton.jit, do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_DEVICES
)


def _blocks(x: Tensor) -> tuple[int, int]:
    """Rows and channels of a tile; few lanes of it should fall outside.

    But not by reading less than 128 bytes of a row at a time: what a lane outside costs is little
    next to a line that comes from memory twice.
    """
    _, n, channels = x.shape
    narrow, wide = (triton.cdiv(channels, across) * across for across in (_LINE, 2 * _LINE))
    across = 2 * _LINE if wide <= max(1.15 * channels, narrow) else _LINE
    room = _TILE * 4 // x.element_size()
    return max(1, min(room // across, triton.next_power_of_2(n))), across


def _chunks(devices: int, n: int, down: int, wide: int) -> tuple[int, int]:
    """How many tiles each program of a sum goes through, and how many programs there are."""
    tiles = triton.cdiv(n, down)
    turns = max(1, devices * wide * tiles // _PROGRAMS, triton.cdiv(tiles, _CHUNKS))
    return turns, triton.cdiv(tiles, turns)


def _room(chunks: int) -> int:
    """For partial sums: few sizes, so that few kernels are compiled."""
    return 16 if chunks <= 16 else _CHUNKS


@triton.jit
def _rounded(x, d, SCALE, PER_STEP, LOW, HIGH):
    """On the device's grid, halves to even; as it is where the device has no grid."""
    per_step = tl.load(PER_STEP + d)
    steps = tl.minimum(tl.maximum(x * per_step, tl.load(LOW + d)), tl.load(HIGH + d))
    # Adding 1.5 · 2^23 leaves no bits for a fraction, and rounds halves to even.
    steps = (steps + 12582912.0) - 12582912.0
    return tl.where(per_step > 0, steps * tl.load(SCALE + d), x)


@_compiled_once
def _largest(X, ROWS, OUT, size, channels, turns, BN: tl.constexpr):
    d, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    valid = tl.load(ROWS + d) * channels  # rows follow one another, so the valid ones are a prefix
    best = tl.zeros((BN,), tl.float32)
    for turn in range(turns):
        i = (chunk * turns + turn) * BN + tl.arange(0, BN)
        x = tl.load(X + d * size + i, mask=(i < valid) & (i < size), other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.abs(x))
    tl.store(OUT + d * tl.num_programs(1) + chunk, tl.max(best, 0))


@_compiled_once
def _widest(PARTS, OUT, chunks, levels, BK: tl.constexpr):
    d, k = tl.program_id(0), tl.arange(0, BK)
    parts = tl.load(PARTS + d * chunks + k, mask=k < chunks, other=0.0)
    tl.store(OUT + d, tl.max(parts, 0) / levels)


def largest(x: Tensor, rows: Tensor) -> Tensor:
    """max|x| / 127 of each device, over its valid rows."""
    x = x.detach().contiguous()
    d, n, channels = x.shape
    turns, chunks = _chunks(d, n * channels, _TILE, 1)
    parts, scale = torch.empty(d, chunks, device=x.device), torch.empty(d, device=x.device)
    _largest[d, chunks](x, rows, parts, n * channels, channels, turns, BN=_TILE)
    _widest[(d,)](parts, scale, chunks, float(SIGNED_LEVELS), BK=_room(chunks))
    return scale


@_compiled_once
def _moments(
    Y, ROWS, WITH_BATCH, MEAN, SQUARES, n, channels, turns, BN: tl.constexpr, BC: tl.constexpr
):
    """Mean and sum of squared deviations of one chunk of rows; zeros where nobody needs them."""
    d, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    needed = (tl.load(WITH_BATCH + d) != 0).to(tl.int32)
    rows = tl.minimum(tl.load(ROWS + d), n) * needed
    # Deviations from the chunk's first row: sums of squares of large numbers would cancel.
    first = chunk * turns * BN
    there = (c < channels) & (first < rows)
    origin = tl.load(Y + (d * n + first) * channels + c, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for turn in tl.range(turns * needed, num_stages=3):
        r = first + turn * BN + tl.arange(0, BN)[:, None]
        inside = (r < rows) & (c < channels)
        y = tl.load(Y + (d * n + r) * channels + c, mask=inside, other=0.0).to(tl.float32)
        off = tl.where(inside, y - origin, 0.0)
        total += off
        squares += off * off
    count = tl.minimum(tl.maximum(rows - first, 0), turns * BN).to(tl.float32)
    off = tl.sum(total, 0)[None, :] / tl.maximum(count, 1.0)
    squares_of_all = tl.sum(squares, 0)[None, :] - off * off * count
    at = (d * tl.num_programs(1) + chunk) * channels + c
    tl.store(MEAN + at, origin + off, mask=c < channels)
    tl.store(SQUARES + at, tl.maximum(squares_of_all, 0.0), mask=c < channels)


@_compiled_once
def _coefficients(
    MEAN, SQUARES, ROWS, WEIGHT, BIAS, LAYER_BIAS, RUNNING_MEAN, RUNNING_VARIANCE, MOMENTUM,
    WITH_BATCH, TRACKS, FROZEN_FACTOR, FROZEN_OFFSET,
    OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD,
    momentum, eps, n, channels, chunks, per_chunk,
    weight_stride, bias_stride, layer_stride, mean_stride, variance_stride,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LAYER_BIAS: tl.constexpr,
    HAS_RUNNING: tl.constexpr, OWN_MOMENTUM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    rows = tl.minimum(tl.load(ROWS + d), n)
    k = tl.arange(0, BK)[:, None]
    at = (d * chunks + k) * channels + c[None, :]
    there = (k < chunks) & inside[None, :]
    own = tl.minimum(tl.maximum(rows - k * per_chunk, 0), per_chunk).to(tl.float32)
    own = tl.where(k < chunks, own, 0.0)
    count = tl.maximum(rows, 1).to(tl.float32)
    means = tl.load(MEAN + at, mask=there, other=0.0)
    mean = tl.sum(means * own, 0) / count
    delta = means - mean[None, :]
    squares = tl.sum(tl.load(SQUARES + at, mask=there, other=0.0) + delta * delta * own, 0)
    variance = squares / count
    rstd = tl.rsqrt(variance + eps)
    factor = rstd
    if HAS_WEIGHT:
        factor = factor * tl.load(WEIGHT + d * weight_stride + c, mask=inside, other=0.0)
    offset = -mean * factor
    if HAS_BIAS:
        offset = offset + tl.load(BIAS + d * bias_stride + c, mask=inside, other=0.0)
    if HAS_RUNNING:
        if OWN_MOMENTUM:
            momentum = tl.load(MOMENTUM + d)
        seen = mean
        if HAS_LAYER_BIAS:
            seen = seen + tl.load(LAYER_BIAS + d * layer_stride + c, mask=inside, other=0.0)
        tracks = tl.load(TRACKS + d) != 0
        old = tl.load(RUNNING_MEAN + d * mean_stride + c, mask=inside, other=0.0)
        new = old + momentum * (seen - old)
        tl.store(RUNNING_MEAN + d * mean_stride + c, new, mask=inside & tracks)
        old = tl.load(RUNNING_VARIANCE + d * variance_stride + c, mask=inside, other=0.0)
        unbiased = squares / tl.maximum(count - 1.0, 1.0)
        new = old + momentum * (unbiased - old)
        tl.store(RUNNING_VARIANCE + d * variance_stride + c, new, mask=inside & tracks)
    with_batch = tl.load(WITH_BATCH + d) != 0
    at = d * channels + c
    frozen_factor = tl.load(FROZEN_FACTOR + at, mask=inside, other=0.0)
    frozen_offset = tl.load(FROZEN_OFFSET + at, mask=inside, other=0.0)
    tl.store(OUT_FACTOR + at, tl.where(with_batch, factor, frozen_factor), mask=inside)
    tl.store(OUT_OFFSET + at, tl.where(with_batch, offset, frozen_offset), mask=inside)
    tl.store(OUT_MEAN + at, mean, mask=inside)
    tl.store(OUT_RSTD + at, rstd, mask=inside)


def stride(x: Tensor | None) -> int:
    """From one device to the next."""
    return 0 if x is None else x.stride(0)


def coefficients(y: Tensor, rows: Tensor, norm: Norm) -> Coefficients:
    """Normalise with the batch where a device trains, else with what was folded."""
    y = y.contiguous()
    d, n, channels = y.shape
    down, across = _blocks(y)
    wide = triton.cdiv(channels, across)
    turns, chunks = _chunks(d, n, down, wide)
    mean = torch.empty(d, chunks, channels, device=y.device)
    squares = torch.empty_like(mean)
    _moments[d, chunks, wide](
        y, rows, norm.with_batch, mean, squares, n, channels, turns, BN=down, BC=across
    )
    out = Coefficients(*(torch.empty(d, channels, device=y.device) for _ in range(4)))
    own_momentum = isinstance(norm.momentum, Tensor)
    frozen_factor = norm.frozen_factor.expand(d, channels).contiguous()
    frozen_offset = norm.frozen_offset.expand(d, channels).contiguous()
    _coefficients[d, triton.cdiv(channels, 32)](
        mean, squares, rows, norm.weight, norm.bias, norm.layer_bias,
        norm.running_mean, norm.running_variance, norm.momentum if own_momentum else None,
        norm.with_batch, norm.tracks, frozen_factor, frozen_offset,
        *out, 0.0 if own_momentum else norm.momentum, norm.eps, n, channels, chunks,
        down * turns, stride(norm.weight), stride(norm.bias), stride(norm.layer_bias),
        stride(norm.running_mean), stride(norm.running_variance),
        HAS_WEIGHT=norm.weight is not None, HAS_BIAS=norm.bias is not None,
        HAS_LAYER_BIAS=norm.layer_bias is not None, HAS_RUNNING=norm.running_mean is not None,
        OWN_MOMENTUM=own_momentum, BC=32, BK=_room(chunks),
    )  # fmt: skip
    return out


@_compiled_once
def _finish(
    Y, FACTOR, OFFSET, ADDEND, Z, SCALE, PER_STEP, LOW, HIGH, upper, offset_stride, n, channels,
    HAS_FACTOR: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_ADDEND: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    inside = (r < n) & (c < channels)
    at = (d * n + r) * channels + c
    z = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        z = z * tl.load(FACTOR + d * channels + c, mask=c < channels, other=0.0)
    if HAS_OFFSET:
        z = z + tl.load(OFFSET + d * offset_stride + c, mask=c < channels, other=0.0)
    if HAS_ADDEND:
        z = z + tl.load(ADDEND + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION:
        z = tl.where(z > 0, z, z * 0.0)  # NaN stays NaN
    if CAPPED:
        z = tl.where(z > upper, upper, z)
    if ROUNDS:
        z = _rounded(z, d, SCALE, PER_STEP, LOW, HIGH)
    tl.store(Z + at, z, mask=inside)


def _grid(grid: StackedGrid | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if grid is None else tuple(grid)


def finish(
    y: Tensor,
    factor: Tensor | None,
    offset: Tensor | None,
    addend: Tensor | None,
    activation: Activation,
    grid: StackedGrid | None,
) -> Tensor:
    """``round(activation(factor · y + offset + addend))``."""
    y = y.contiguous()
    nothing = factor is None and offset is None and addend is None and grid is None
    if nothing and not activation.present:
        return y.view_as(y)
    d, n, channels = y.shape
    z = torch.empty_like(y)
    down, across = _blocks(y)
    _finish[d, triton.cdiv(n, down), triton.cdiv(channels, across)](
        y, factor, offset, None if addend is None else addend.contiguous(), z, *_grid(grid),
        activation.upper or 0.0, stride(offset), n, channels,
        HAS_FACTOR=factor is not None, HAS_OFFSET=offset is not None,
        HAS_ADDEND=addend is not None, ACTIVATION=activation.present,
        CAPPED=activation.upper is not None, ROUNDS=grid is not None, BN=down, BC=across,
    )  # fmt: skip
    return z


@triton.jit
def _before(
    G, Z, y, FACTOR, OFFSET, CAP, SCALE, PER_STEP, LOW, HIGH, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH,
    at, own, inside, across, d,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    AGAIN: tl.constexpr, Z_ROUNDS: tl.constexpr,
):  # fmt: skip
    """The gradient before rounding and activation; ``AGAIN`` computes z instead of reading it."""
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS:
        g = _rounded(g, d, SCALE, PER_STEP, LOW, HIGH)
    if ACTIVATION:
        if AGAIN:
            z = y * tl.load(FACTOR + own, mask=across, other=0.0)
            z = z + tl.load(OFFSET + own, mask=across, other=0.0)
            if Z_ROUNDS:
                z = _rounded(z, d, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH)
        else:
            z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
        passed = z > 0
        if CAPPED:
            passed = passed & (z < tl.load(CAP + d))
        g = tl.where(passed, g, 0.0)
    return g


@_compiled_once
def _back_sums(
    G, Z, Y, MEAN, FACTOR, OFFSET, ROWS, WITH_BATCH, CAP, SCALE, PER_STEP, LOW, HIGH,
    Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH, SUM_G, SUM_GY, n, channels, turns,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    AGAIN: tl.constexpr, Z_ROUNDS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    d, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    needed = (tl.load(WITH_BATCH + d) != 0).to(tl.int32)
    rows = tl.minimum(tl.load(ROWS + d), n)
    mean = tl.load(MEAN + d * channels + c, mask=c < channels, other=0.0)
    sum_g = tl.zeros((BN, BC), tl.float32)
    sum_gy = tl.zeros((BN, BC), tl.float32)
    for turn in range(turns * needed):
        r = (chunk * turns + turn) * BN + tl.arange(0, BN)[:, None]
        inside = (r < rows) & (c < channels)
        at = (d * n + r) * channels + c
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        g = _before(
            G, Z, y, FACTOR, OFFSET, CAP, SCALE, PER_STEP, LOW, HIGH,
            Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH, at, d * channels + c, inside, c < channels, d,
            ACTIVATION, CAPPED, ROUNDS, AGAIN, Z_ROUNDS,
        )  # fmt: skip
        sum_g += g
        sum_gy += tl.where(inside, g * (y - mean), 0.0)
    at = (d * tl.num_programs(1) + chunk) * channels + c
    tl.store(SUM_G + at, tl.sum(sum_g, 0)[None, :], mask=c < channels)
    tl.store(SUM_GY + at, tl.sum(sum_gy, 0)[None, :], mask=c < channels)


@_compiled_once
def _back_coefficients(
    SUM_G, SUM_GY, FACTOR, RSTD, WITH_BATCH, ROWS, SHIFT, SLOPE, WEIGHT, BIAS, n, channels, chunks,
    BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    k = tl.arange(0, BK)[:, None]
    at = (d * chunks + k) * channels + c[None, :]
    there = (k < chunks) & inside[None, :]
    sum_g = tl.sum(tl.load(SUM_G + at, mask=there, other=0.0), 0)
    sum_gy = tl.sum(tl.load(SUM_GY + at, mask=there, other=0.0), 0)
    at = d * channels + c
    count = tl.maximum(tl.minimum(tl.load(ROWS + d), n), 1).to(tl.float32)
    factor = tl.load(FACTOR + at, mask=inside, other=0.0)
    rstd = tl.load(RSTD + at, mask=inside, other=0.0)
    with_batch = tl.load(WITH_BATCH + d) != 0
    tl.store(SHIFT + at, tl.where(with_batch, factor * sum_g / count, 0.0), mask=inside)
    slope = factor * rstd * rstd * sum_gy / count
    tl.store(SLOPE + at, tl.where(with_batch, slope, 0.0), mask=inside)
    tl.store(WEIGHT + at, sum_gy * rstd, mask=inside)
    tl.store(BIAS + at, sum_g, mask=inside)


@_compiled_once
def _back(
    G, Z, Y, MEAN, FACTOR, OFFSET, SHIFT, SLOPE, ROWS, CAP, SCALE, PER_STEP, LOW, HIGH,
    Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH, ASKED, SHARE, OUT, n, channels,
    HAS_NORM: tl.constexpr, SHARES: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    AGAIN: tl.constexpr, Z_ROUNDS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    inside = (r < n) & (c < channels) & (tl.load(ASKED + d) != 0)
    at = (d * n + r) * channels + c
    own = d * channels + c
    across = c < channels
    y = tl.zeros((BN, BC), tl.float32)
    if HAS_NORM:
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    g = _before(
        G, Z, y, FACTOR, OFFSET, CAP, SCALE, PER_STEP, LOW, HIGH,
        Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH, at, own, inside, across, d,
        ACTIVATION, CAPPED, ROUNDS, AGAIN, Z_ROUNDS,
    )  # fmt: skip
    if SHARES:
        tl.store(SHARE + at, g, mask=inside)
    if HAS_NORM:
        y = y - tl.load(MEAN + own, mask=across, other=0.0)
        g = g * tl.load(FACTOR + own, mask=across, other=0.0)
        g = g - tl.load(SHIFT + own, mask=across, other=0.0)
        g = g - y * tl.load(SLOPE + own, mask=across, other=0.0)
        g = tl.where(r < tl.load(ROWS + d), g, 0.0)
    tl.store(OUT + at, g, mask=inside)


def back(g: Tensor, grid: StackedGrid | None, kept: Kept) -> Gradients:
    """The whole way back; the addend's gradient is undefined where nobody wants it."""
    z, y, activation, z_grid, rows, c, norm, asked, share = kept
    d, n, channels = g.shape
    down, across = _blocks(g)
    wide = triton.cdiv(channels, across)
    flags: dict[str, Any] = {
        "ACTIVATION": activation.present, "CAPPED": activation.cap is not None,
        "ROUNDS": grid is not None, "BN": down, "BC": across,
        "AGAIN": z is None, "Z_ROUNDS": z_grid is not None,
    }  # fmt: skip
    if norm is None and not activation.present and grid is None:
        return g, g, None, None
    out = torch.empty_like(g)
    if norm is None or c is None:
        _back[d, triton.cdiv(n, down), wide](
            g, z, *(None,) * 6, rows, activation.cap, *_grid(grid), *_grid(None),
            asked, None, out, n, channels, HAS_NORM=False, SHARES=False, **flags,
        )  # fmt: skip
        return out, out, None, None
    turns, chunks = _chunks(d, n, down, wide)
    sums = [torch.empty(d, chunks, channels, device=g.device) for _ in range(2)]
    _back_sums[d, chunks, wide](
        g, z, y, c.mean, c.factor, c.offset, rows, norm.with_batch, activation.cap,
        *_grid(grid), *_grid(z_grid), *sums, n, channels, turns, **flags,
    )  # fmt: skip
    shift, slope, weight, bias = (torch.empty(d, channels, device=g.device) for _ in range(4))
    _back_coefficients[d, triton.cdiv(channels, 32)](
        *sums, c.factor, c.rstd, norm.with_batch, rows, shift, slope, weight, bias,
        n, channels, chunks, BC=32, BK=_room(chunks),
    )  # fmt: skip
    shared = torch.empty_like(g) if share else g
    _back[d, triton.cdiv(n, down), wide](
        g, z, y, c.mean, c.factor, c.offset, shift, slope, rows, activation.cap,
        *_grid(grid), *_grid(z_grid), asked, shared if share else None, out, n, channels,
        HAS_NORM=True, SHARES=share, **flags,
    )  # fmt: skip
    return out, shared, weight, bias


def total(g: Tensor, rows: Tensor) -> Tensor:
    """The sum over valid rows, (device, channel); what does not count is zero already."""
    del rows
    return g.sum(1, dtype=torch.float32)


@_compiled_once
def _measured(MEASURED, FLY, UNSIGNED, SCALE, PER_STEP, LOW, HIGH, OUT, devices, BD: tl.constexpr):
    d = tl.arange(0, BD)
    inside = d < devices
    fly = tl.load(FLY + d, mask=inside, other=0) != 0
    unsigned = tl.load(UNSIGNED + d, mask=inside, other=0) != 0
    step = tl.maximum(tl.load(MEASURED + d, mask=inside, other=0.0), 1e-20)
    step = tl.where(unsigned, step * (127.0 / 255.0), step)
    low = tl.where(unsigned, 0.0, -128.0)
    scale = tl.where(fly, step, tl.load(SCALE + d, mask=inside, other=0.0))
    per_step = tl.where(fly, 1.0 / step, tl.load(PER_STEP + d, mask=inside, other=0.0))
    high = tl.where(fly, low + 255.0, tl.load(HIGH + d, mask=inside, other=0.0))
    low = tl.where(fly, low, tl.load(LOW + d, mask=inside, other=0.0))
    tl.store(OUT + d, scale, mask=inside)
    tl.store(OUT + devices + d, per_step, mask=inside)
    tl.store(OUT + 2 * devices + d, low, mask=inside)
    tl.store(OUT + 3 * devices + d, high, mask=inside)


def measured_grid(scale: Tensor, fly: Tensor, unsigned: Tensor, known: StackedGrid) -> StackedGrid:
    """The known grids, and those of the tensor's own scale where they are made on the fly."""
    devices = len(scale)
    out = torch.empty(4, devices, device=scale.device)
    size = triton.next_power_of_2(devices)
    _measured[(1,)](scale, fly, unsigned, *known, out, devices, BD=size)
    return StackedGrid(*out)


@triton.jit
def _sgd(P, G, LEARNS, VALID, LR, n, decay, BN: tl.constexpr):
    d = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    alive = tl.load(VALID + d) > 0
    learns = tl.load(LEARNS + d * n + i, mask=i < n, other=0) != 0
    p = tl.load(P + d * n + i, mask=i < n, other=0.0)
    g = tl.load(G + d * n + i, mask=i < n, other=0.0)
    moved = p - tl.load(LR + d) * (g + decay * p)
    tl.store(P + d * n + i, moved, mask=(i < n) & learns & alive)


def sgd(parameters: Tensor, gradients: Tensor, learns: Tensor, valid: Tensor, lr: Tensor,
        decay: float) -> None:  # fmt: skip
    """Plain descent in one pass: the places that learn, on the devices that have samples."""
    d, n = parameters.shape
    _sgd[d, triton.cdiv(n, 4096)](parameters, gradients, learns, valid, lr, n, decay, BN=4096)
