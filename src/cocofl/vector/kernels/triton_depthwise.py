"""3×3 convolutions of each channel by itself, images channels last: (device · sample, h, w, c).

Like :mod:`~cocofl.vector.kernels.triton_pointwise` they finish what they read, and take moments of
what they make.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels.base import Moments, Reading
from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before
from cocofl.vector.kernels.triton_rows import grid_of, read_finished, reading_parts

_TILE = 2048  # positions times channels that a program holds at a time
_SUMMED = 1024  # the same where nine taps are summed up at once
_ROLLED, _ROLLED_SUMS = 1024, 512  # columns times channels of a program that goes down images
_PROGRAMS, _TURNS = 2048, 16  # of them, at most; and tiles that each takes, at least

# Only channels, and what is divided by, gain from a kernel compiled for their size.
_SIZES = ("samples", "height", "width", "out_height", "out_width", "turns", "stride")
_OF_DEVICES = ("W", "ASKED", "OUT", "FACTOR", "OFFSET", "SCALE", "PER_STEP", "LOW", "HIGH")
_OF_DEVICES += ("VALID", "MEAN", "SQUARES", "COUNT")
_compiled_once = kernels(sizes=_SIZES, of_devices=_OF_DEVICES)


@triton.jit
def _coefficients(FACTOR, OFFSET, at, inside, READS: tl.constexpr):
    """What a norm does to channels, if something reads what is not finished."""
    factor, offset = 1.0, 0.0
    if READS:
        factor = tl.load(FACTOR + at, mask=inside, other=0.0)
        offset = tl.load(OFFSET + at, mask=inside, other=0.0)
    return factor, offset


@triton.jit
def _store_moments(MEAN, SQUARES, COUNT, piece, channels, c, mean, squares, count):
    """Of one piece of all channels' rows."""
    at = piece * channels + c
    tl.store(MEAN + at, mean, mask=c < channels)
    tl.store(SQUARES + at, squares, mask=c < channels)
    tl.store(COUNT + piece, count.to(tl.float32))


# Positions come first in a grid, images last: programs that run side by side read the same rows.


@_compiled_once
def _convolve(
    X, W, ASKED, Y, FACTOR, OFFSET, SCALE, PER_STEP, LOW, HIGH, upper, VALID, MEAN, SQUARES, COUNT,
    stride, samples, height, width, out_height, channels, OUT_WIDTH: tl.constexpr,
    BACK: tl.constexpr, READS: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr,
    ROUNDS: tl.constexpr, SUMS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Forward; or ``BACK`` from the gradient of the result to that of the images."""
    wait_for_those_before()
    image = tl.program_id(2).to(tl.int64)
    d = image // samples
    p = tl.program_id(0) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    h, w = p // OUT_WIDTH, p % OUT_WIDTH
    inside = (p < out_height * OUT_WIDTH) & (c < channels)
    if BACK:
        inside = inside & (tl.load(ASKED + d) != 0)
    factor, offset = _coefficients(FACTOR, OFFSET, d * channels + c, c < channels, READS)
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    total = tl.zeros((BP, BC), tl.float32)
    begin = X + image * height * width * channels
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            if BACK:
                down, right = h + PAD_H - i, w + PAD_W - j
                row, column = down // STRIDE_H, right // STRIDE_W
                there = inside & (down >= 0) & (right >= 0) & (row < height) & (column < width)
                there = there & (down % STRIDE_H == 0) & (right % STRIDE_W == 0)
            else:
                row, column = h * STRIDE_H + i - PAD_H, w * STRIDE_W + j - PAD_W
                there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            at = (row * width + column) * channels + c
            x = read_finished(
                begin + at, there, factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS
            )
            tap = tl.load(W + d * stride + c * 9 + i * 3 + j, mask=c < channels, other=0.0)
            total += x * tap
    tl.store(Y + (image * out_height * OUT_WIDTH + p) * channels + c, total, mask=inside)
    if SUMS:
        size = tl.minimum(out_height * OUT_WIDTH - tl.program_id(0) * BP, BP)
        count = tl.where(image % samples < tl.load(VALID + d), size, 0)
        mean = tl.sum(total, 0)[None, :] / tl.maximum(size, 1).to(tl.float32)
        off = tl.where(inside, total - mean, 0.0)
        piece = image * tl.num_programs(0) + tl.program_id(0)
        squares = tl.where(count > 0, tl.sum(off * off, 0)[None, :], 0.0)
        _store_moments(MEAN, SQUARES, COUNT, piece, channels, c, mean, squares, count)


@triton.jit
def _row_of_taps(
    sums, g, source, channels, first, second, third, factor, offset, upper, grid,
    READS: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Three taps side by side, each with whether there is something."""
    left, middle, right = sums
    left += g * read_finished(
        source, first, factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS
    )
    middle += g * read_finished(
        source + channels, second, factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS
    )
    right += g * read_finished(
        source + 2 * channels, third, factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS
    )
    return left, middle, right


@triton.jit
def _within(i, size):
    return i.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)  # negative is large


@_compiled_once
def _weight(
    G, X, ASKED, OUT, FACTOR, OFFSET, SCALE, PER_STEP, LOW, HIGH, upper,
    samples, height, width, channels, turns,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, READS: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of some positions of one device's images; zeros where nobody needs it."""
    wait_for_those_before()
    piece, d = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    nothing = tl.zeros((BP, BC), tl.float32)
    top = (nothing, nothing, nothing)
    middle = (nothing, nothing, nothing)
    bottom = (nothing, nothing, nothing)
    needed = (tl.load(ASKED + d) != 0).to(tl.int32)
    positions = samples * OUT_HEIGHT * OUT_WIDTH
    factor, offset = _coefficients(FACTOR, OFFSET, d * channels + c, c < channels, READS)
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    # This kernel is bound by how many instructions it has: places are 32-bit numbers.
    own = X + d * samples * height * width * channels
    for turn in range(turns * needed):
        p = (piece * turns + turn) * BP + tl.arange(0, BP)[:, None]
        inside = (p < positions) & (c < channels)
        g = tl.load(G + d * positions * channels + (p * channels + c), mask=inside, other=0.0)
        g = g.to(tl.float32)
        line, column = p // OUT_WIDTH, p % OUT_WIDTH * STRIDE_W - PAD_W
        row = line % OUT_HEIGHT * STRIDE_H - PAD_H
        left = inside & _within(column, width)
        center = inside & _within(column + 1, width)
        right = inside & _within(column + 2, width)
        at = ((line // OUT_HEIGHT * height + row) * width + column) * channels + c
        there = _within(row, height)
        top = _row_of_taps(
            top, g, own + at, channels, left & there, center & there, right & there,
            factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
        there = _within(row + 1, height)
        at += width * channels
        middle = _row_of_taps(
            middle, g, own + at, channels, left & there, center & there, right & there,
            factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
        there = _within(row + 2, height)
        at += width * channels
        bottom = _row_of_taps(
            bottom, g, own + at, channels, left & there, center & there, right & there,
            factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
    out = OUT + ((d * tl.num_programs(0) + piece) * channels + c) * 9
    for j in tl.static_range(3):
        tl.store(out + j, tl.sum(top[j], 0)[None, :], mask=c < channels)
        tl.store(out + 3 + j, tl.sum(middle[j], 0)[None, :], mask=c < channels)
        tl.store(out + 6 + j, tl.sum(bottom[j], 0)[None, :], mask=c < channels)


@triton.jit
def _store_moments_of_columns(
    VALID, MEAN, SQUARES, COUNT, d, p, c, origin, total, squares, height, channels,
    WIDTH: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """From sums down columns, of deviations from ``origin``; images that count come first."""
    mean = origin + total / height
    squares = squares - total * total / height
    columns = tl.load(VALID + d) * WIDTH
    n = tl.minimum(tl.maximum(columns - tl.program_id(0) * BP, 0), BP)
    counts = p < columns
    middle = tl.sum(tl.where(counts, mean, 0.0), 0)[None, :] / tl.maximum(n, 1).to(tl.float32)
    apart = mean - middle
    squares = tl.sum(tl.where(counts, squares + apart * apart * height, 0.0), 0)[None, :]
    piece = d * tl.num_programs(0) + tl.program_id(0)
    _store_moments(MEAN, SQUARES, COUNT, piece, channels, c, middle, squares, n * height)


@_compiled_once
def _roll(
    X, W, ASKED, Y, FACTOR, OFFSET, SCALE, PER_STEP, LOW, HIGH, upper, VALID, MEAN, SQUARES, COUNT,
    stride, samples, height, channels, WIDTH: tl.constexpr, BACK: tl.constexpr,
    READS: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    SUMS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Stride 1 and a border of 1: columns of images from top to bottom.

    A row is read once and goes into three rows of the result. ``BACK`` turns the weights around.
    """
    wait_for_those_before()
    d = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    image, column = p // WIDTH, p % WIDTH
    inside = (p < samples * WIDTH) & (c < channels)
    if BACK:
        inside = inside & (tl.load(ASKED + d) != 0)
    tap, step = W + d * stride + c * 9 + (8 if BACK else 0), -1 if BACK else 1
    across = c < channels
    w0 = tl.load(tap, mask=across, other=0.0)
    w1 = tl.load(tap + step, mask=across, other=0.0)
    w2 = tl.load(tap + 2 * step, mask=across, other=0.0)
    w3 = tl.load(tap + 3 * step, mask=across, other=0.0)
    w4 = tl.load(tap + 4 * step, mask=across, other=0.0)
    w5 = tl.load(tap + 5 * step, mask=across, other=0.0)
    w6 = tl.load(tap + 6 * step, mask=across, other=0.0)
    w7 = tl.load(tap + 7 * step, mask=across, other=0.0)
    w8 = tl.load(tap + 8 * step, mask=across, other=0.0)
    first = d * samples * height * WIDTH * channels
    X, Y = X + first, Y + first
    at = (image * height * WIDTH + column) * channels + c
    left, right = inside & (column > 0), inside & (column < WIDTH - 1)
    factor, offset = _coefficients(FACTOR, OFFSET, d * channels + c, across, READS)
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    above = tl.zeros((BP, BC), tl.float32)  # what is known of the row above, and of this one
    here = tl.zeros((BP, BC), tl.float32)
    if SUMS:
        # Deviations from each column's first number: sums of squares of large numbers would cancel.
        origin = tl.zeros((BP, BC), tl.float32)
        total = tl.zeros((BP, BC), tl.float32)
        squares = tl.zeros((BP, BC), tl.float32)
    for row in range(height):
        x = read_finished(
            X + at - channels, left, factor, offset, upper, grid,
            READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
        y = read_finished(
            X + at, inside, factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS
        )
        z = read_finished(
            X + at + channels, right, factor, offset, upper, grid,
            READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
        above += x * w6 + y * w7 + z * w8
        tl.store(Y + at - WIDTH * channels, above, mask=inside & (row > 0))
        if SUMS:
            origin = tl.where(row <= 1, above, origin)
            off = tl.where(row > 0, above - origin, 0.0)
            total += off
            squares += off * off
        above = here + x * w3 + y * w4 + z * w5
        here = x * w0 + y * w1 + z * w2
        at += WIDTH * channels
    tl.store(Y + at - WIDTH * channels, above, mask=inside)
    if SUMS:
        origin = tl.where(height == 1, above, origin)
        off = above - origin
        _store_moments_of_columns(
            VALID, MEAN, SQUARES, COUNT, d, p, c, origin, total + off, squares + off * off,
            height, channels, WIDTH, BP,
        )  # fmt: skip


@_compiled_once
def _roll_weight(
    G, X, ASKED, OUT, FACTOR, OFFSET, SCALE, PER_STEP, LOW, HIGH, upper, samples, height, channels,
    WIDTH: tl.constexpr, READS: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr,
    ROUNDS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The same way down for the weight's gradient of some columns; zeros where nobody needs it."""
    wait_for_those_before()
    piece, d = tl.program_id(0), tl.program_id(2).to(tl.int64)
    p = piece * BP + tl.arange(0, BP)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    image, column = p // WIDTH, p % WIDTH
    inside = (p < samples * WIDTH) & (c < channels)
    left, right = inside & (column > 0), inside & (column < WIDTH - 1)
    first = d * samples * height * WIDTH * channels
    X, G = X + first, G + first
    at = (image * height * WIDTH + column) * channels + c
    nothing = tl.zeros((BP, BC), tl.float32)
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = (
        nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing
    )  # fmt: skip
    needed = tl.load(ASKED + d) != 0
    factor, offset = _coefficients(FACTOR, OFFSET, d * channels + c, c < channels, READS)
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    above, here = nothing, tl.load(G + at, mask=inside & needed, other=0.0).to(tl.float32)
    for row in range(height * needed.to(tl.int32)):
        below = tl.load(G + at + WIDTH * channels, mask=inside & (row + 1 < height), other=0.0)
        below = below.to(tl.float32)
        x = read_finished(
            X + at - channels, left, factor, offset, upper, grid,
            READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
        y = read_finished(
            X + at, inside, factor, offset, upper, grid, READS, ACTIVATION, CAPPED, ROUNDS
        )
        z = read_finished(
            X + at + channels, right, factor, offset, upper, grid,
            READS, ACTIVATION, CAPPED, ROUNDS,
        )  # fmt: skip
        w0 += x * below
        w1 += y * below
        w2 += z * below
        w3 += x * here
        w4 += y * here
        w5 += z * here
        w6 += x * above
        w7 += y * above
        w8 += z * above
        above, here = here, below
        at += WIDTH * channels
    out = OUT + ((d * tl.num_programs(0) + piece) * channels + c) * 9
    across = c < channels
    tl.store(out, tl.sum(w0, 0)[None, :], mask=across)
    tl.store(out + 1, tl.sum(w1, 0)[None, :], mask=across)
    tl.store(out + 2, tl.sum(w2, 0)[None, :], mask=across)
    tl.store(out + 3, tl.sum(w3, 0)[None, :], mask=across)
    tl.store(out + 4, tl.sum(w4, 0)[None, :], mask=across)
    tl.store(out + 5, tl.sum(w5, 0)[None, :], mask=across)
    tl.store(out + 6, tl.sum(w6, 0)[None, :], mask=across)
    tl.store(out + 7, tl.sum(w7, 0)[None, :], mask=across)
    tl.store(out + 8, tl.sum(w8, 0)[None, :], mask=across)


def _keeps_size(g: Geometry) -> bool:
    """Whether a 3×3 convolution makes images of the size that it takes."""
    return g.stride == (1, 1) and g.padding == (1, 1)


def _walk(g: Geometry) -> dict[str, int]:
    names = "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W"
    return dict(zip(names, (*g.stride, *g.padding), strict=True))


def _tile(positions: int, channels: int) -> tuple[int, int]:
    """Positions and channels of a tile."""
    across = 64
    while across > 16 and triton.cdiv(channels, across) * across > 1.15 * channels:
        across //= 2
    return min(triton.next_power_of_2(positions), _TILE // across), across


def by_device(w: Tensor) -> Tensor:
    """Weights, each device's in one piece."""
    return w if w[0].is_contiguous() else w.contiguous()


def room_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """For images like these, (device, sample, height, width, channel)."""
    d, b, channels, height, width = x.shape
    return torch.empty(d, b, height, width, channels, dtype=dtype, device=x.device)


def room_for_result(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """For the images that a convolution makes, (device, sample, height, width, channel)."""
    each = zip(x.shape[3:], w.shape[3:], geometry.padding, geometry.stride, strict=True)
    sizes = [(size + 2 * pad - taps) // stride + 1 for size, taps, pad, stride in each]
    return torch.empty(*x.shape[:2], *sizes, w.shape[1], dtype=x.dtype, device=x.device)


def _through(
    x: Tensor,
    w: Tensor,
    asked: Tensor | None,
    y: Tensor,
    geometry: Geometry,
    *,
    back: bool,
    reading: Reading | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """``x``, lying channels last, into ``y`` (device, sample, height, width, channel)."""
    w, (d, b, height, width, channels) = by_device(w), y.shape
    rolls = _keeps_size(geometry)
    down, across = _tile(height * width, channels)
    if rolls:
        across = _tile(1, channels)[1]
        down = _ROLLED // across
    columns = b * width if rolls else height * width
    tiles, wide = triton.cdiv(columns, down), triton.cdiv(channels, across)
    pieces = tiles if rolls else b * tiles
    moments = None if valid is None else Moments.empty(d, pieces, channels, x.device)
    read, flags = reading_parts(reading)
    given = x, w, asked, y, *read, valid, *(moments or (None,) * 3), w.stride(0), b
    more = flags | {"BACK": back, "SUMS": valid is not None, "BP": down, "BC": across}
    if rolls:
        _roll[tiles, wide, d](*given, height, channels, WIDTH=width, **more)
    else:
        _convolve[tiles, wide, d * b](
            *given, *x.shape[3:], height, channels, width, **_walk(geometry), **more
        )
    return y.permute(0, 1, 4, 2, 3), moments


def depthwise(
    x: Tensor,
    w: Tensor,
    geometry: Geometry,
    reading: Reading | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """``x`` (device, sample, channel, height, width), lying channels last.

    What is read is finished by ``reading``; moments are over each device's first ``valid`` samples.
    """
    y = room_for_result(x, w, geometry)
    return _through(x, w, None, y, geometry, back=False, reading=reading, valid=valid)


def depthwise_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry, asked: Tensor) -> Tensor:
    """The gradient of what was read, from that of the result, for devices that asked."""
    return _through(g, w, asked, room_like(x, g.dtype), geometry, back=True)[0]


def depthwise_weight(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    geometry: Geometry,
    asked: Tensor,
    reading: Reading | None = None,
) -> Tensor:
    """The gradient of the weight: sums over pieces of a device's images, then their sum.

    Zero for devices that did not ask.
    """
    d, b, channels, height, width = x.shape
    out_height, out_width = g.shape[3:]
    across = _tile(1, channels)[1]
    wide = triton.cdiv(channels, across)
    read, flags = reading_parts(reading)
    if _keeps_size(geometry):
        down = _ROLLED_SUMS // across
        pieces = triton.cdiv(b * width, down)
        parts = torch.empty(d, pieces, *w.shape[1:], device=g.device)
        _roll_weight[pieces, wide, d](
            g, x, asked, parts, *read, b, height, channels, WIDTH=width, **flags, BP=down, BC=across
        )
        return parts.sum(1) if pieces > 1 else parts[:, 0]
    down = _SUMMED // across
    tiles = triton.cdiv(b * out_height * out_width, down)
    turns = max(_TURNS, d * wide * tiles // _PROGRAMS)
    pieces = triton.cdiv(tiles, turns)
    parts = torch.empty(d, pieces, *w.shape[1:], device=g.device)
    _weight[pieces, wide, d](
        g, x, asked, parts, *read, b, height, width, channels, turns, out_height, out_width,
        **flags, **_walk(geometry), BP=down, BC=across,
    )  # fmt: skip
    return parts.sum(1) if pieces > 1 else parts[:, 0]
