"""The elementwise chains around a layer, fused: each reads and writes its tensors once.

The same functions as in :mod:`~cocofl.vector.kernels.plain`, which defines the numbers. Training
with small batches is bound by memory, so what counts is how often a tensor is read. Norms are in
:mod:`~cocofl.vector.kernels.triton_norms`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.numerics import SIGNED_LEVELS, StackedGrid
from cocofl.vector.kernels.base import Activation, Kept, Reading
from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before

TILE = 2048  # float32 numbers that a program holds at a time
_PROGRAMS = 528  # that look for the largest number: enough to fill a large GPU
_LINE = 32  # elements of a row that are worth reading at a time
CHUNKS = 128  # such programs per device, at most

# What gains nothing from being a multiple of 16: see `triton_launch`.
_SIZES = ("n", "turns", "chunks", "devices", "weight_stride", "bias_stride", "layer_stride")
_SIZES += ("mean_stride", "variance_stride", "frozen_factor_stride", "frozen_offset_stride")
_SIZES += ("offset_stride", "size", "wide")
_SIZES += ("each", "pieces", "in_units", "out_units", "tiles", "samples", "height")
_OF_DEVICES = (
    "ROWS",
    "VALID",
    "COUNT",
    "WITH_BATCH",
    "TRACKS",
    "MOMENTUM",
    "FLY",
    "UNSIGNED",
    "MEASURED",
)
_OF_DEVICES += ("SCALE", "PER_STEP", "LOW", "HIGH", "Z_SCALE", "Z_PER_STEP", "Z_LOW", "Z_HIGH")
_OF_DEVICES += ("WEIGHT", "BIAS", "LAYER_BIAS", "RUNNING_MEAN", "RUNNING_VARIANCE", "ASKED")
_OF_DEVICES += ("FROZEN_FACTOR", "FROZEN_OFFSET", "COUNTERS", "MEAN", "SQUARES", "RSTD", "FACTOR")
_OF_DEVICES += ("OFFSET", "SUM_G", "SUM_GY", "SHIFT", "SLOPE")
compiled_once = kernels(sizes=_SIZES, of_devices=_OF_DEVICES)


def blocks(x: Tensor) -> tuple[int, int]:
    """Rows and channels of a tile; few lanes of it should fall outside.

    But not by reading less than 128 bytes of a row at a time: what a lane outside costs is little
    next to a line that comes from memory twice.
    """
    _, n, channels = x.shape
    narrow, wide = (triton.cdiv(channels, across) * across for across in (_LINE, 2 * _LINE))
    across = 2 * _LINE if wide <= max(1.15 * channels, narrow) else _LINE
    room = TILE * 4 // x.element_size()
    return max(1, min(room // across, triton.next_power_of_2(n))), across


def chunks_of(devices: int, n: int) -> tuple[int, int]:
    """How many tiles each program of a device goes through, and how many programs there are."""
    tiles = triton.cdiv(n, TILE)
    turns = max(1, devices * tiles // _PROGRAMS, triton.cdiv(tiles, CHUNKS))
    return turns, triton.cdiv(tiles, turns)


def _room(chunks: int) -> int:
    """For what each found: few sizes, so that few kernels are compiled."""
    return 16 if chunks <= 16 else CHUNKS


@triton.jit
def grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS: tl.constexpr):
    """A device's grid; nothing is read where nobody rounds."""
    grid = 0.0, 0.0, 0.0, 0.0
    if ROUNDS:
        grid = tl.load(SCALE + d), tl.load(PER_STEP + d), tl.load(LOW + d), tl.load(HIGH + d)
    return grid


@triton.jit
def on_grid(x, grid):
    """Halves to even; as it is where the device has no grid."""
    scale, per_step, low, high = grid
    steps = tl.minimum(tl.maximum(x * per_step, low), high)
    # Adding 1.5 · 2^23 leaves no bits for a fraction, and rounds halves to even.
    steps = (steps + 12582912.0) - 12582912.0
    return tl.where(per_step > 0, steps * scale, x)


@triton.jit
def rounded(x, d, SCALE, PER_STEP, LOW, HIGH):
    """On the device's grid."""
    return on_grid(x, grid_of(d, SCALE, PER_STEP, LOW, HIGH, True))


@compiled_once
def _largest(X, ROWS, OUT, size, channels, turns, BN: tl.constexpr):
    wait_for_those_before()
    d, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    valid = tl.load(ROWS + d) * channels  # rows follow one another, so the valid ones are a prefix
    best = tl.zeros((BN,), tl.float32)
    for turn in range(turns):
        i = (chunk * turns + turn) * BN + tl.arange(0, BN)
        x = tl.load(X + d * size + i, mask=(i < valid) & (i < size), other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.abs(x))
    tl.store(OUT + d * tl.num_programs(1) + chunk, tl.max(best, 0))


@compiled_once
def _widest(PARTS, OUT, chunks, levels, BK: tl.constexpr):
    wait_for_those_before()
    d, k = tl.program_id(0), tl.arange(0, BK)
    parts = tl.load(PARTS + d * chunks + k, mask=k < chunks, other=0.0)
    tl.store(OUT + d, tl.max(parts, 0) / levels)


def largest(x: Tensor, rows: Tensor) -> Tensor:
    """max|x| / 127 of each device, over its valid rows."""
    x = x.detach().contiguous()
    d, n, channels = x.shape
    turns, chunks = chunks_of(d, n * channels)
    parts, scale = torch.empty(d, chunks, device=x.device), torch.empty(d, device=x.device)
    _largest[d, chunks](x, rows, parts, n * channels, channels, turns, BN=TILE)
    _widest[(d,)](parts, scale, chunks, float(SIGNED_LEVELS), BK=_room(chunks))
    return scale


def stride(x: Tensor | None) -> int:
    """From one device to the next."""
    return 0 if x is None else x.stride(0)


@triton.jit
def finished_on_grid(
    z, upper, grid, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr
):
    """Activated and rounded."""
    if ACTIVATION:
        z = tl.where(z > 0, z, z * 0.0)  # NaN stays NaN
    if CAPPED:
        z = tl.where(z > upper, upper, z)
    if ROUNDS:
        z = on_grid(z, grid)
    return z


@triton.jit
def read_finished(
    source, inside, factor, offset, upper, grid, READS: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """What lies in memory, and (``READS``) what is left to do to it; 0 outside."""
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if READS:
        x = finished_on_grid(x * factor + offset, upper, grid, ACTIVATION, CAPPED, ROUNDS)
        x = tl.where(inside, x, 0.0)
    return x


@triton.jit
def finished(
    z, ADDEND, place, there, upper, d, SCALE, PER_STEP, LOW, HIGH,
    HAS_ADDEND: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Added to, activated and rounded."""
    if HAS_ADDEND:
        z = z + tl.load(ADDEND + place, mask=there, other=0.0).to(tl.float32)
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    return finished_on_grid(z, upper, grid, ACTIVATION, CAPPED, ROUNDS)


@compiled_once
def _finish(
    Y, OFFSET, ADDEND, Z, SCALE, PER_STEP, LOW, HIGH, upper, offset_stride, n, channels,
    HAS_OFFSET: tl.constexpr, HAS_ADDEND: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    d = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    inside = (r < n) & (c < channels)
    at = (d * n + r) * channels + c
    z = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        z = z + tl.load(OFFSET + d * offset_stride + c, mask=c < channels, other=0.0)
    z = finished(
        z, ADDEND, at, inside, upper, d, SCALE, PER_STEP, LOW, HIGH,
        HAS_ADDEND, ACTIVATION, CAPPED, ROUNDS,
    )  # fmt: skip
    tl.store(Z + at, z, mask=inside)


def grid_parts(grid: StackedGrid | None) -> tuple[Tensor | None, ...]:
    """A grid as kernels take it."""
    return (None,) * 4 if grid is None else tuple(grid)


def reading_parts(
    reading: Reading | None,
) -> tuple[tuple[Tensor | float | None, ...], dict[str, bool]]:
    """What is left to do to a value, as kernels that read it take it."""
    names = "READS", "ACTIVATION", "CAPPED", "ROUNDS"
    if reading is None:
        return (*[None] * 6, 0.0), dict.fromkeys(names, False)
    c, act, grid = reading
    parts = c.factor, c.offset, *grid_parts(grid), act.upper or 0.0
    flags = True, act.present, act.upper is not None, grid is not None
    return parts, dict(zip(names, flags, strict=True))


def finish(
    y: Tensor,
    offset: Tensor | None,
    addend: Tensor | None,
    activation: Activation,
    grid: StackedGrid | None,
) -> Tensor:
    """``round(activation(y + offset + addend))``."""
    y = y.contiguous()
    if offset is None and addend is None and grid is None and not activation.present:
        return y.view_as(y)
    d, n, channels = y.shape
    z = torch.empty_like(y)
    down, across = blocks(y)
    _finish[d, triton.cdiv(n, down), triton.cdiv(channels, across)](
        y, offset, None if addend is None else addend.contiguous(), z, *grid_parts(grid),
        activation.upper or 0.0, stride(offset), n, channels,
        HAS_OFFSET=offset is not None, HAS_ADDEND=addend is not None,
        ACTIVATION=activation.present, CAPPED=activation.upper is not None,
        ROUNDS=grid is not None, BN=down, BC=across,
    )  # fmt: skip
    return z


@triton.jit
def before_activation(
    G, Z, y, factor, offset, upper, SCALE, PER_STEP, LOW, HIGH, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH,
    at, inside, d,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    AGAIN: tl.constexpr, Z_ROUNDS: tl.constexpr,
):  # fmt: skip
    """The gradient before rounding and activation.

    ``AGAIN`` computes z from ``factor · y + offset`` instead of reading it.
    """
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS:
        g = rounded(g, d, SCALE, PER_STEP, LOW, HIGH)
    if ACTIVATION:
        grid = grid_of(d, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH, Z_ROUNDS)
        if AGAIN:
            z = y * factor + offset
            if Z_ROUNDS:
                z = on_grid(z, grid)
        else:
            z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
        passed = z > 0
        if CAPPED:
            if Z_ROUNDS:
                upper = on_grid(upper, grid)
            passed = passed & (z < upper)
        g = tl.where(passed, g, 0.0)
    return g


@compiled_once
def _back(
    G, Z, SCALE, PER_STEP, LOW, HIGH, Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH, ASKED, OUT, upper,
    n, channels, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    Z_ROUNDS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    d = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    inside = (r < n) & (c < channels) & (tl.load(ASKED + d) != 0)
    at = (d * n + r) * channels + c
    g = before_activation(
        G, Z, None, None, None, upper, SCALE, PER_STEP, LOW, HIGH,
        Z_SCALE, Z_PER_STEP, Z_LOW, Z_HIGH,
        at, inside, d, ACTIVATION, CAPPED, ROUNDS, False, Z_ROUNDS,
    )  # fmt: skip
    tl.store(OUT + at, g, mask=inside)


def back(g: Tensor, grid: StackedGrid | None, kept: Kept) -> Tensor:
    """The way back through activation and rounding."""
    activation, z_grid = kept.activation, kept.z_grid
    if not activation.present and grid is None:
        return g
    d, n, channels = g.shape
    down, across = blocks(g)
    out = torch.empty_like(g)
    _back[d, triton.cdiv(n, down), triton.cdiv(channels, across)](
        g, kept.z, *grid_parts(grid), *grid_parts(z_grid), kept.asked, out,
        activation.upper or 0.0, n, channels,
        ACTIVATION=activation.present, CAPPED=activation.upper is not None,
        ROUNDS=grid is not None, Z_ROUNDS=z_grid is not None, BN=down, BC=across,
    )  # fmt: skip
    return out


def total(g: Tensor, rows: Tensor) -> Tensor:
    """The sum over valid rows, (device, channel); what does not count is zero already."""
    del rows
    return g.sum(1, dtype=torch.float32)


@compiled_once
def _measured(MEASURED, FLY, UNSIGNED, SCALE, PER_STEP, LOW, HIGH, OUT, devices, BD: tl.constexpr):
    wait_for_those_before()
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


@compiled_once
def _sgd(P, G, LEARNS, VALID, LR, COPY, OTHER, n, decay, COPIES: tl.constexpr, BN: tl.constexpr):
    wait_for_those_before()
    d = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    alive = tl.load(VALID + d) > 0
    learns = (tl.load(LEARNS + d * n + i, mask=i < n, other=0) != 0) & alive
    p = tl.load(P + d * n + i, mask=learns, other=0.0)
    g = tl.load(G + d * n + i, mask=learns, other=0.0)
    moved = p - tl.load(LR + d) * (g + decay * p)
    tl.store(P + d * n + i, moved, mask=learns)
    if COPIES:
        tl.store(COPY + d * n + i, moved, mask=learns)
        tl.store(OTHER + d * n + i, moved, mask=learns)


def sgd(parameters: Tensor, gradients: Tensor, learns: Tensor, valid: Tensor, lr: Tensor,
        decay: float, copies: Sequence[Tensor] = ()) -> None:  # fmt: skip
    """Plain descent in one pass: the places that learn, on the devices that have samples."""
    d, n = parameters.shape
    copy, other = copies or (None, None)
    _sgd[d, triton.cdiv(n, 4096)](
        parameters, gradients, learns, valid, lr, copy, other, n, decay,
        COPIES=copy is not None, BN=4096,
    )  # fmt: skip
