"""BatchNorms of many devices with what follows them.

The same functions as in :mod:`~cocofl.vector.kernels.plain`, which defines the numbers. A norm
reads its tensor twice, for sums over all rows of a channel and for its result. Where a channel has
few rows, one program does both, and its second look finds the cache. Where it has many, programs
share the sums, and whoever ends the last one makes the coefficients of all; the result is made by
another launch. It begins with what the sums read last, since a cache holds that still. A layer's
own kernel may have taken moments of what it made, and then nothing is read for them.

Sums have a fixed order, so runs repeat to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.numerics import StackedGrid
from cocofl.vector.kernels.base import (
    NO_ACTIVATION,
    Activation,
    Coefficients,
    Gradients,
    Kept,
    Moments,
    Norm,
)
from cocofl.vector.kernels.triton_launch import wait_for_those_before
from cocofl.vector.kernels.triton_rows import (
    before_activation,
    blocks,
    compiled_once,
    finished,
    grid_parts,
    stride,
)

_FEW = {"forward": 2048, "back": 512}  # rows that one program goes through
_PROGRAMS = 2112  # that share sums: enough to fill a large GPU, of which a part has nothing to do
_CHUNKS = 128  # partial sums per channel, at most
_AT_ONCE = tl.constexpr(16)  # of which so many are read
_MOMENTS_AT_ONCE, _ACROSS = 128, 16  # of a layer's pieces and channels


class _Plan(NamedTuple):
    """How a tensor (device, row, channel) is cut into tiles, and who takes them."""

    whole: bool
    """Whether a program has all rows of its channels."""
    down: int
    across: int
    wide: int
    """Tiles side by side."""
    turns: int
    """Tiles below each other of a program that sums up."""
    chunks: int
    """Such programs below each other."""
    warps: int = 4

    @classmethod
    def of(cls, y: Tensor, *, back: bool = False, whole: bool = True) -> _Plan:
        d, n, channels = y.shape
        if whole and n <= _FEW["back" if back else "forward"]:
            across = 32 if d * triton.cdiv(channels, 32) >= 264 else 16
            down = min((4096 if back else 8192) // across, max(16, triton.next_power_of_2(n)))
            return cls(True, down, across, triton.cdiv(channels, across),
                       triton.cdiv(n, down), 1, 8)  # fmt: skip
        down, across = blocks(y)
        wide, tiles = triton.cdiv(channels, across), triton.cdiv(n, down)
        turns = max(1, d * wide * tiles // _PROGRAMS, triton.cdiv(tiles, _CHUNKS))
        return cls(False, down, across, wide, turns, triton.cdiv(tiles, turns))

    def partial_sums(self, y: Tensor) -> tuple[Tensor | None, ...]:
        """Room for two numbers of each program and channel."""
        if self.whole:
            return None, None
        shape = len(y), self.chunks, self.wide * self.across
        return torch.empty(shape, device=y.device), torch.empty(shape, device=y.device)

    def launches(self, y: Tensor) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        """Grids, and what kernels take of a plan: for sums and then results, or both at once."""
        d, n, _ = y.shape
        same: dict[str, Any] = {"BN": self.down, "BC": self.across, "num_warps": self.warps}
        sums: dict[str, Any] = {"turns": self.turns, "chunks": self.chunks, "SUMS": True}
        grid = self.wide * self.chunks, d
        if self.whole:
            return [(grid, same | sums | {"RESULTS": True})]
        results = {"turns": 1, "chunks": self.chunks, "SUMS": False, "RESULTS": True}
        tiles = self.wide * triton.cdiv(n, self.down), d
        return [(grid, same | sums | {"RESULTS": False}), (tiles, same | results)]


@cache
def _counters(device: torch.device, size: int) -> Tensor:
    """Sums that are done, by device and channels; zero before and after every launch."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def _counters_for(y: Tensor, plan: _Plan) -> Tensor:
    # Few sizes, which stay: captured steps know where they are.
    return _counters(y.device, max(4096, triton.next_power_of_2(len(y) * plan.wide)))


@triton.jit
def _place(wide, SUMS: tl.constexpr, RESULTS: tl.constexpr):
    """The device, chunk and tile of this program; sums alone begin with the last device."""
    d = tl.program_id(1)
    if SUMS and not RESULTS:
        d = tl.num_programs(1) - 1 - d
    return d.to(tl.int64), tl.program_id(0) // wide, tl.program_id(0) % wide


@triton.jit
def _is_last(COUNTERS, at, chunks):
    """Whether all others have stored their sums, too; leaves the counter as it was found."""
    tl.debug_barrier()
    is_last = tl.atomic_add(COUNTERS + at, 1) == chunks - 1
    if is_last:
        tl.store(COUNTERS + at, 0)
    return is_last


@triton.jit
def _moments(Y, d, first, c, rows, n, channels, turns, BN: tl.constexpr, BC: tl.constexpr):
    """Mean and sum of squared deviations of some rows."""
    # Deviations from the first of them: sums of squares of large numbers would cancel.
    there = (c < channels) & (first < rows)
    origin = tl.load(Y + (d * n + first) * channels + c, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros((BN, BC), tl.float32)
    squares = tl.zeros((BN, BC), tl.float32)
    for turn in range(turns):
        r = first + turn * BN + tl.arange(0, BN)[:, None]
        inside = (r < rows) & (c < channels)[None, :]
        y = tl.load(Y + (d * n + r) * channels + c[None, :], mask=inside, other=0.0)
        off = tl.where(inside, y.to(tl.float32) - origin[None, :], 0.0)
        total += off
        squares += off * off
    count = tl.minimum(tl.maximum(rows - first, 0), turns * BN).to(tl.float32)
    off = tl.sum(total, 0) / tl.maximum(count, 1.0)
    return origin + off, tl.maximum(tl.sum(squares, 0) - off * off * count, 0.0)


@triton.jit
def _moments_of_all(MEAN, SQUARES, at, rows, chunks, per_chunk, row, BC: tl.constexpr):
    """The same of all rows of some channels."""
    count = tl.maximum(rows, 1).to(tl.float32)
    total = tl.zeros((_AT_ONCE, BC), tl.float32)
    # Past a multiprocessor's own cache, which does not know what others have stored.
    for first in range(0, chunks, _AT_ONCE):
        k = first + tl.arange(0, _AT_ONCE)[:, None]
        own = tl.minimum(tl.maximum(rows - k * per_chunk, 0), per_chunk).to(tl.float32)
        there = MEAN + k * row + at[None, :]
        total += tl.load(there, mask=k < chunks, other=0.0, cache_modifier=".cg") * own
    mean = tl.sum(total, 0) / count
    total = tl.zeros((_AT_ONCE, BC), tl.float32)
    for first in range(0, chunks, _AT_ONCE):
        k = first + tl.arange(0, _AT_ONCE)[:, None]
        own = tl.minimum(tl.maximum(rows - k * per_chunk, 0), per_chunk).to(tl.float32)
        there = k * row + at[None, :]
        off = tl.load(MEAN + there, mask=k < chunks, other=0.0, cache_modifier=".cg") - mean
        squares = tl.load(SQUARES + there, mask=k < chunks, other=0.0, cache_modifier=".cg")
        total += tl.where(k < chunks, squares + off * off * own, 0.0)
    return mean, tl.sum(total, 0)


@triton.jit
def _given(OWN, at, inside, otherwise: tl.constexpr):
    """What a norm has of a kind, or else what changes nothing."""
    found = otherwise
    if OWN is not None:
        found = tl.load(OWN + at, inside, other=0.0)
    return found


@triton.jit
def _track(RUNNING, seen, momentum, inside, tracks):
    old = tl.load(RUNNING, mask=inside, other=0.0)
    tl.store(RUNNING, old + momentum * (seen - old), mask=inside & tracks)


@triton.jit
def _store_four(A, B, C, D, at, a, b, c, d, inside):
    """Numbers of each channel."""
    tl.store(A + at, a, mask=inside)
    tl.store(B + at, b, mask=inside)
    tl.store(C + at, c, mask=inside)
    tl.store(D + at, d, mask=inside)


@triton.jit
def _make_coefficients(
    d, c, at, inside, mean, squares, rows, TRACKS, WEIGHT, BIAS, LAYER_BIAS, RUNNING_MEAN,
    RUNNING_VARIANCE, MOMENTUM, OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD, momentum, eps,
    weight_stride, bias_stride, layer_stride, mean_stride, variance_stride,
    HAS_RUNNING: tl.constexpr, OWN_MOMENTUM: tl.constexpr,
):  # fmt: skip
    """From the moments of some channels; running statistics move."""
    rstd = tl.rsqrt(squares / tl.maximum(rows, 1).to(tl.float32) + eps)
    factor = rstd * _given(WEIGHT, d * weight_stride + c, inside, 1.0)
    offset = _given(BIAS, d * bias_stride + c, inside, 0.0) - mean * factor
    _store_four(OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD, at, factor, offset, mean, rstd, inside)
    if HAS_RUNNING:
        rate = tl.load(MOMENTUM + d) if OWN_MOMENTUM else momentum
        seen = mean + _given(LAYER_BIAS, d * layer_stride + c, inside, 0.0)
        unbiased = squares / tl.maximum(rows - 1, 1).to(tl.float32)
        tracks = tl.load(TRACKS + d) != 0
        _track(RUNNING_MEAN + d * mean_stride + c, seen, rate, inside, tracks)
        _track(RUNNING_VARIANCE + d * variance_stride + c, unbiased, rate, inside, tracks)


@triton.jit
def _take_frozen(
    d, c, at, inside, FROZEN_FACTOR, FROZEN_OFFSET, OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD,
    frozen_factor_stride, frozen_offset_stride,
):  # fmt: skip
    """What was folded, for a device that has the norm frozen."""
    factor = tl.load(FROZEN_FACTOR + d * frozen_factor_stride + c, inside, other=0.0)
    offset = tl.load(FROZEN_OFFSET + d * frozen_offset_stride + c, inside, other=0.0)
    none = factor * 0.0
    _store_four(OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD, at, factor, offset, none, none, inside)


@compiled_once
def _settle(
    MEAN, SQUARES, COUNT, ROWS, WITH_BATCH, TRACKS, WEIGHT, BIAS, LAYER_BIAS, RUNNING_MEAN,
    RUNNING_VARIANCE, MOMENTUM, FROZEN_FACTOR, FROZEN_OFFSET,
    OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD, momentum, eps, pieces, channels,
    weight_stride, bias_stride, layer_stride, mean_stride, variance_stride,
    frozen_factor_stride, frozen_offset_stride,
    HAS_RUNNING: tl.constexpr, OWN_MOMENTUM: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From the moments of all pieces to what the norm does to some channels."""
    wait_for_those_before()
    d = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside, at = c < channels, d * channels + c
    if tl.load(WITH_BATCH + d) != 0:
        # Deviations from the first piece's mean, as everywhere.
        origin = tl.load(MEAN + d * pieces * channels + c, mask=inside, other=0.0)
        total = tl.zeros((BK, BC), tl.float32)
        squares = tl.zeros((BK, BC), tl.float32)
        for first in range(0, pieces, BK):
            k = first + tl.arange(0, BK)
            count = tl.load(COUNT + d * pieces + k, mask=k < pieces, other=0.0)[:, None]
            place = (d * pieces + k)[:, None] * channels + c[None, :]
            there = (k < pieces)[:, None] & inside[None, :] & (count > 0)
            off = tl.load(MEAN + place, mask=there, other=0.0) - origin[None, :]
            off = tl.where(there, off, 0.0)
            total += off * count
            squares += tl.load(SQUARES + place, mask=there, other=0.0) + off * off * count
        rows = tl.maximum(tl.load(ROWS + d), 1)
        shift = tl.sum(total, 0)
        off = shift / rows.to(tl.float32)
        _make_coefficients(
            d, c, at, inside, origin + off, tl.maximum(tl.sum(squares, 0) - shift * off, 0.0), rows,
            TRACKS, WEIGHT, BIAS, LAYER_BIAS, RUNNING_MEAN, RUNNING_VARIANCE, MOMENTUM,
            OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD, momentum, eps,
            weight_stride, bias_stride, layer_stride, mean_stride, variance_stride,
            HAS_RUNNING, OWN_MOMENTUM,
        )  # fmt: skip
    else:
        _take_frozen(
            d, c, at, inside, FROZEN_FACTOR, FROZEN_OFFSET,
            OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD, frozen_factor_stride, frozen_offset_stride,
        )  # fmt: skip


@compiled_once
def _normalise(
    Y, ADDEND, Z, ROWS, MEAN, SQUARES, COUNTERS, WITH_BATCH, TRACKS,
    WEIGHT, BIAS, LAYER_BIAS, RUNNING_MEAN, RUNNING_VARIANCE, MOMENTUM,
    FROZEN_FACTOR, FROZEN_OFFSET, OUT_FACTOR, OUT_OFFSET, OUT_MEAN, OUT_RSTD,
    SCALE, PER_STEP, LOW, HIGH, upper, momentum, eps, n, channels, wide,
    weight_stride, bias_stride, layer_stride, mean_stride, variance_stride,
    frozen_factor_stride, frozen_offset_stride, turns, chunks,
    HAS_RUNNING: tl.constexpr, OWN_MOMENTUM: tl.constexpr, HAS_ADDEND: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    SUMS: tl.constexpr, RESULTS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    d, chunk, tile = _place(wide, SUMS, RESULTS)
    c = tile * BC + tl.arange(0, BC)
    inside, at = c < channels, d * channels + c
    if SUMS:
        rows = tl.minimum(tl.load(ROWS + d), n)
        settles = tl.load(WITH_BATCH + d) != 0
        if settles:
            mean, squares = _moments(Y, d, chunk * turns * BN, c, rows, n, channels, turns, BN, BC)
            if not RESULTS:
                row = wide * BC
                tl.store(MEAN + (d * chunks + chunk) * row + c, mean)
                tl.store(SQUARES + (d * chunks + chunk) * row + c, squares)
                settles = _is_last(COUNTERS, d * wide + tile, chunks)
                if settles:
                    mean, squares = _moments_of_all(
                        MEAN, SQUARES, d * chunks * row + c, rows, chunks, turns * BN, row, BC
                    )
            if settles:
                _make_coefficients(
                    d, c, at, inside, mean, squares, rows, TRACKS, WEIGHT, BIAS, LAYER_BIAS,
                    RUNNING_MEAN, RUNNING_VARIANCE, MOMENTUM, OUT_FACTOR, OUT_OFFSET, OUT_MEAN,
                    OUT_RSTD, momentum, eps, weight_stride, bias_stride, layer_stride, mean_stride,
                    variance_stride, HAS_RUNNING, OWN_MOMENTUM,
                )  # fmt: skip
        elif chunk == 0:
            _take_frozen(
                d, c, at, inside, FROZEN_FACTOR, FROZEN_OFFSET, OUT_FACTOR, OUT_OFFSET, OUT_MEAN,
                OUT_RSTD, frozen_factor_stride, frozen_offset_stride,
            )  # fmt: skip
    if RESULTS:
        if SUMS:
            tl.debug_barrier()
        factor = tl.load(OUT_FACTOR + at, mask=inside, other=0.0)[None, :]
        offset = tl.load(OUT_OFFSET + at, mask=inside, other=0.0)[None, :]
        for turn in range(turns):
            r = (chunk * turns + turn) * BN + tl.arange(0, BN)[:, None]
            there = (r < n) & inside[None, :]
            place = (d * n + r) * channels + c[None, :]
            z = tl.load(Y + place, mask=there, other=0.0).to(tl.float32) * factor + offset
            z = finished(
                z, ADDEND, place, there, upper, d, SCALE, PER_STEP, LOW, HIGH,
                HAS_ADDEND, ACTIVATION, CAPPED, ROUNDS,
            )  # fmt: skip
            tl.store(Z + place, z, mask=there)


def _norm_tensors(norm: Norm, devices: int, channels: int) -> tuple[Tensor | None, ...]:
    """What kernels take of a norm, in their order."""
    frozen = [t.expand(devices, channels) for t in (norm.frozen_factor, norm.frozen_offset)]
    return (
        norm.with_batch, norm.tracks, norm.weight, norm.bias, norm.layer_bias, norm.running_mean,
        norm.running_variance, norm.momentum if isinstance(norm.momentum, Tensor) else None,
        *(t if t.stride(1) == 1 else t.contiguous() for t in frozen),
    )  # fmt: skip


def _norm_numbers(norm: Norm) -> tuple[float, float]:
    return 0.0 if isinstance(norm.momentum, Tensor) else norm.momentum, norm.eps


def _norm_flags(norm: Norm) -> dict[str, bool]:
    own_momentum = isinstance(norm.momentum, Tensor)
    return {"HAS_RUNNING": norm.running_mean is not None, "OWN_MOMENTUM": own_momentum}


def _strides(tensors: tuple[Tensor | None, ...]) -> list[int]:
    """Of what :func:`_norm_tensors` gives, those that lie by device: not who trains, nor rates."""
    return [stride(t) for t in (*tensors[2:7], *tensors[8:])]


def _room(devices: int, channels: int, on: torch.device) -> Coefficients:
    return Coefficients(*(torch.empty(devices, channels, device=on) for _ in range(4)))


def coefficients(
    y: Tensor, rows: Tensor, norm: Norm, moments: Moments | None = None
) -> Coefficients:
    """What the norm does to each channel; ``y`` is read only where nobody took its moments."""
    d, _, channels = y.shape
    if moments is None:
        out = _room(d, channels, y.device)
        plan = _Plan.of(y, whole=False)
        _launch(plan.launches(y)[:1], plan, y.contiguous(), None, rows, norm, out)
        return out
    out, tensors = _room(d, channels, y.device), _norm_tensors(norm, d, channels)
    pieces = moments.mean.shape[1]
    at_once = min(_MOMENTS_AT_ONCE, triton.next_power_of_2(pieces))
    _settle[triton.cdiv(channels, _ACROSS), d](
        *moments, rows, *tensors, *out, *_norm_numbers(norm), pieces, channels,
        *_strides(tensors), **_norm_flags(norm), BK=max(16, at_once), BC=_ACROSS,
    )  # fmt: skip
    return out


def normalise(
    y: Tensor,
    rows: Tensor,
    norm: Norm,
    addend: Tensor | None,
    activation: Activation,
    grid: StackedGrid | None,
    moments: Moments | None = None,
) -> tuple[Tensor, Coefficients]:
    """``round(activation(factor · y + offset + addend))``, and the coefficients."""
    y, z = y.contiguous(), torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if moments is None:
        plan, out = _Plan.of(y), _room(len(y), y.shape[2], y.device)
        launches = plan.launches(y)
    else:
        plan, out = _Plan.of(y, whole=False), coefficients(y, rows, norm, moments)
        launches = plan.launches(y)[1:]
    _launch(launches, plan, y, z, rows, norm, out, addend, activation, grid)
    return z, out


def _launch(
    launches: Sequence[tuple[tuple[int, int], dict[str, Any]]],
    plan: _Plan,
    y: Tensor,
    z: Tensor | None,
    rows: Tensor,
    norm: Norm,
    out: Coefficients,
    addend: Tensor | None = None,
    activation: Activation = NO_ACTIVATION,
    grid: StackedGrid | None = None,
) -> None:
    """Sums, results, or both, as the launches say."""
    d, n, channels = y.shape
    addend = None if addend is None else addend.contiguous()
    tensors, sums = _norm_tensors(norm, d, channels), launches[0][1]["SUMS"]
    parts = plan.partial_sums(y) if sums else (None, None)
    for programs, plan_of_launch in launches:
        _normalise[programs](
            y, addend, z, rows, *parts, _counters_for(y, plan), *tensors, *out, *grid_parts(grid),
            activation.upper or 0.0, *_norm_numbers(norm), n, channels, plan.wide,
            *_strides(tensors), **_norm_flags(norm), HAS_ADDEND=addend is not None,
            ACTIVATION=activation.present, CAPPED=activation.upper is not None,
            ROUNDS=grid is not None, **plan_of_launch,
        )  # fmt: skip


@triton.jit
def _total(PARTS, at, chunks, row, BC: tl.constexpr):
    """The sum over the chunks of some channels."""
    total = tl.zeros((_AT_ONCE, BC), tl.float32)
    for first in range(0, chunks, _AT_ONCE):
        k = first + tl.arange(0, _AT_ONCE)[:, None]
        there = PARTS + k * row + at[None, :]
        total += tl.load(there, mask=k < chunks, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@compiled_once
def _back(
    G, Z, Y, MEAN, RSTD, FACTOR, OFFSET, ROWS, WITH_BATCH, ASKED, COUNTERS,
    SCALE, PER_STEP, LOW, HIGH, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH,
    SUM_G, SUM_GY, SHIFT, SLOPE, WEIGHT, BIAS, SHARE, OUT, upper, n, channels, wide, turns, chunks,
    SHARES: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    AGAIN: tl.constexpr, Z_ROUNDS: tl.constexpr, SUMS: tl.constexpr, RESULTS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    d, chunk, tile = _place(wide, SUMS, RESULTS)
    c = tile * BC + tl.arange(0, BC)
    across, own = c < channels, d * channels + c
    asked = tl.load(ASKED + d) != 0
    rows = tl.minimum(tl.load(ROWS + d), n)
    mean = tl.load(MEAN + own, mask=across, other=0.0)[None, :]
    factor = tl.load(FACTOR + own, mask=across, other=0.0)[None, :]
    offset = tl.load(OFFSET + own, mask=across, other=0.0)[None, :]
    if SUMS:
        total_g, total_gy = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
        settles = chunk == 0  # where there are no sums, somebody says so
        if asked & (tl.load(WITH_BATCH + d) != 0):
            sum_g, sum_gy = tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32)
            for turn in range(turns):
                r = (chunk * turns + turn) * BN + tl.arange(0, BN)[:, None]
                inside = (r < rows) & across[None, :]
                at = (d * n + r) * channels + c[None, :]
                y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
                g = before_activation(
                    G, Z, y, factor, offset, upper,
                    SCALE, PER_STEP, LOW, HIGH, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH,
                    at, inside, d, ACTIVATION, CAPPED, ROUNDS, AGAIN, Z_ROUNDS,
                )  # fmt: skip
                sum_g += g
                sum_gy += tl.where(inside, g * (y - mean), 0.0)
            total_g, total_gy = tl.sum(sum_g, 0), tl.sum(sum_gy, 0)
            if not RESULTS:
                row = wide * BC
                tl.store(SUM_G + (d * chunks + chunk) * row + c, total_g)
                tl.store(SUM_GY + (d * chunks + chunk) * row + c, total_gy)
                settles = _is_last(COUNTERS, d * wide + tile, chunks)
                if settles:
                    total_g = _total(SUM_G, d * chunks * row + c, chunks, row, BC)
                    total_gy = _total(SUM_GY, d * chunks * row + c, chunks, row, BC)
        if settles:
            rstd = tl.load(RSTD + own, mask=across, other=0.0)
            scale = tl.load(FACTOR + own, mask=across, other=0.0)
            scale = scale / tl.maximum(rows, 1).to(tl.float32)
            shift, slope = scale * total_g, scale * rstd * rstd * total_gy
            _store_four(
                SHIFT, SLOPE, WEIGHT, BIAS, own, shift, slope, total_gy * rstd, total_g, across
            )
    if RESULTS:
        if SUMS:
            tl.debug_barrier()
        shift = tl.load(SHIFT + own, mask=across, other=0.0)[None, :]
        slope = tl.load(SLOPE + own, mask=across, other=0.0)[None, :]
        for turn in range(turns * asked.to(tl.int32)):
            r = (chunk * turns + turn) * BN + tl.arange(0, BN)[:, None]
            inside = (r < n) & across[None, :]
            at = (d * n + r) * channels + c[None, :]
            y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
            g = before_activation(
                G, Z, y, factor, offset, upper,
                SCALE, PER_STEP, LOW, HIGH, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH,
                at, inside, d, ACTIVATION, CAPPED, ROUNDS, AGAIN, Z_ROUNDS,
            )  # fmt: skip
            if SHARES:
                tl.store(SHARE + at, g, mask=inside)
            g = g * factor - shift - (y - mean) * slope
            tl.store(OUT + at, tl.where(r < rows, g, 0.0), mask=inside)


def back_through_norm(g: Tensor, grid: StackedGrid | None, kept: Kept) -> Gradients:
    """The whole way back; the addend's gradient is undefined where nobody wants it."""
    z, y, activation, z_grid, rows, c, norm, asked, share = kept
    assert norm is not None
    assert c is not None
    d, n, channels = g.shape
    plan, out = _Plan.of(g, back=True), torch.empty_like(g)
    parts, counters = plan.partial_sums(g), _counters_for(g, plan)
    made = [torch.empty(d, channels, device=g.device) for _ in range(4)]
    shared = torch.empty_like(g) if share else g
    for programs, plan_of_launch in plan.launches(g):
        _back[programs](
            g, z, y, c.mean, c.rstd, c.factor, c.offset, rows, norm.with_batch, asked,
            counters, *grid_parts(grid), *grid_parts(z_grid), *parts, *made,
            shared if share else None, out, activation.upper or 0.0, n, channels, plan.wide,
            SHARES=share, ACTIVATION=activation.present, CAPPED=activation.upper is not None,
            ROUNDS=grid is not None, AGAIN=z is None, Z_ROUNDS=z_grid is not None,
            **plan_of_launch,
        )  # fmt: skip
    return out, shared, made[2], made[3]
