"""1×1 convolutions of many devices, as matrix products that finish what they read.

Rows are positions of images: (device, row, channel). What is read may be unfinished: a norm,
activation and rounding are then applied to it on the way to the matrix units, and the pass over
memory that would have done it disappears. Moments of what is made, which the next norm needs, are
taken while a tile of it is still at hand. On the way back the devices that nobody asked for cost
nothing.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels.base import Moments, Reading, from_rows, rows_of
from cocofl.vector.kernels.triton_depthwise import by_device
from cocofl.vector.kernels.triton_launch import wait_for_those_before
from cocofl.vector.kernels.triton_rows import (
    compiled_once,
    finished_on_grid,
    grid_of,
    reading_parts,
)

_FEW = 2048  # rows of a device up to which tiles are for many channels, not for many rows
_PROGRAMS = 528  # four for each multiprocessor; sums are cut into as many pieces
_PIECES = 32  # of a sum, at most: they are read again to be added up
_BLOCK = 1024  # sums that a program adds up


class Tile(NamedTuple):
    """How a program computes: rows and columns of its result, terms at a time, and resources."""

    rows: int
    columns: int
    terms: int
    warps: int = 4
    stages: int = 3

    def launch(self) -> dict[str, Any]:
        """What Triton takes of it at a launch."""
        return {
            "BM": self.rows, "BN": self.columns, "BK": self.terms,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


@compiled_once
def _product(
    X, W, Y, ASKED, VALID, FACTOR, OFFSET, SCALE, PER_STEP, LOW, HIGH, upper, MEAN, SQUARES, COUNT,
    stride, n, each, in_units, out_units, tiles,
    IN_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, BACK: tl.constexpr, READS: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr, SUMS: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of one device; ``BACK`` takes weights (in, out) as (out, in)."""
    wait_for_those_before()
    d = tl.program_id(1).to(tl.int64)
    piece, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    inputs, outputs = in_units * IN_UNIT, out_units * OUT_UNIT
    r, c = piece * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    down, right = r < n, c < outputs
    terms = inputs
    if ASKED is not None:
        terms *= (tl.load(ASKED + d) != 0).to(tl.int32)
    x_from = X + d * n * inputs + (r * inputs)[:, None]
    w_from = W + d * stride + (c if BACK else c * inputs)[None, :]
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    total = tl.zeros((BM, BN), tl.float32)
    # At least once, of nothing if need be: else products wait for one another.
    for first in range(0, tl.maximum(terms, 1), BK):
        k = first + tl.arange(0, BK)
        x_mask, w_mask = down[:, None], right[None, :]
        if not EVEN:
            x_mask, w_mask = x_mask & (k < inputs)[None, :], w_mask & (k < inputs)[:, None]
        x = tl.load(x_from + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_from + (k * outputs if BACK else k)[:, None], mask=w_mask, other=0.0)
        if READS:
            factor = tl.load(FACTOR + d * inputs + k, mask=k < inputs, other=0.0)[None, :]
            offset = tl.load(OFFSET + d * inputs + k, mask=k < inputs, other=0.0)[None, :]
            z = x.to(tl.float32) * factor + offset
            x = finished_on_grid(z, upper, grid, ACTIVATION, CAPPED, ROUNDS).to(x.dtype)
        total = tl.dot(x, w, total, input_precision="tf32")
    place = (d * n + r)[:, None] * outputs + c[None, :]
    mask = down[:, None] & right[None, :]
    if ASKED is not None:
        mask = mask & (terms > 0)
    tl.store(Y + place, total, mask=mask)
    if SUMS:
        rows = tl.load(VALID + d) * each
        count = tl.minimum(tl.maximum(rows - piece * BM, 0), BM)
        counts = (r < rows)[:, None]
        mean = tl.sum(tl.where(counts, total, 0.0), 0) / tl.maximum(count, 1).to(tl.float32)
        off = tl.where(counts, total - mean[None, :], 0.0)
        pieces = tl.num_programs(0) // tiles
        at = (d * pieces + piece) * outputs + c
        tl.store(MEAN + at, mean, mask=right)
        tl.store(SQUARES + at, tl.sum(off * off, 0), mask=right)
        tl.store(COUNT + d * pieces + piece, count.to(tl.float32))


@compiled_once
def _weight(
    G, X, OUT, ASKED, FACTOR, OFFSET, SCALE, PER_STEP, LOW, HIGH, upper,
    n, in_units, out_units, turns, pieces,
    IN_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, READS: tl.constexpr,
    ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile (out, in) of one device's gradient, over some rows; zeros where nobody needs it."""
    wait_for_those_before()
    d, piece = (tl.program_id(2) // pieces).to(tl.int64), tl.program_id(2) % pieces
    inputs, outputs = in_units * IN_UNIT, out_units * OUT_UNIT
    o, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    asked = tl.load(ASKED + d) != 0
    g_from, x_from = G + d * n * outputs + o[:, None], X + d * n * inputs + i[None, :]
    if READS:
        factor = tl.load(FACTOR + d * inputs + i, mask=i < inputs, other=0.0)[None, :]
        offset = tl.load(OFFSET + d * inputs + i, mask=i < inputs, other=0.0)[None, :]
    grid = grid_of(d, SCALE, PER_STEP, LOW, HIGH, ROUNDS)
    total = tl.zeros((BM, BN), tl.float32)
    # At least once, of nothing if need be: else products wait for one another.
    for turn in range(tl.maximum(turns * asked.to(tl.int32), 1)):
        r = (piece * turns + turn) * BK + tl.arange(0, BK)
        g_mask = (r < n)[None, :] & (o < outputs)[:, None] & asked
        g = tl.load(g_from + (r * outputs)[None, :], mask=g_mask, other=0.0)
        x_mask = (r < n)[:, None] & (i < inputs)[None, :]
        x = tl.load(x_from + (r * inputs)[:, None], mask=x_mask, other=0.0)
        if READS:
            # Rows past the end have no gradient, so it does not matter what is made of them.
            z = x.to(tl.float32) * factor + offset
            x = finished_on_grid(z, upper, grid, ACTIVATION, CAPPED, ROUNDS).to(x.dtype)
        total = tl.dot(g, x, total, input_precision="tf32")
    out = OUT + (d * pieces + piece) * outputs * inputs
    mask = (o < outputs)[:, None] & (i < inputs)[None, :]
    tl.store(out + o[:, None] * inputs + i[None, :], total, mask=mask)


@compiled_once
def _add_up(PARTS, OUT, size, pieces, BLOCK: tl.constexpr):
    wait_for_those_before()
    d, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(PARTS + (d * pieces + piece) * size + at, mask=at < size, other=0.0)
    tl.store(OUT + d * size + at, total, mask=at < size)


# The tiles were measured on an H200 with the sizes of MobileNet (bench/pointwise.py).


def product_tile(n: int, inputs: int, outputs: int) -> Tile:
    """For rows times weights."""
    if n > _FEW:
        return Tile(256, 16 if outputs <= 16 else 32, 16 if inputs < 128 else 32)
    if outputs > 2 * inputs:
        return Tile(128, 64, 16 if inputs < 128 else 32)
    narrow = triton.cdiv(outputs, 64) * 64 < 0.8 * triton.cdiv(outputs, 128) * 128
    return Tile(64, 64 if narrow else 128, 32)


def weight_tile(n: int) -> Tile:
    """For gradients times rows."""
    return Tile(32, 32, 64) if n > _FEW else Tile(64, 64, 32, 2)


def _units(channels: int) -> tuple[int, int]:
    unit = gcd(channels, 16)
    return channels // unit, unit


def multiply(
    x: Tensor,
    w: Tensor,
    outputs: int,
    *,
    back: bool,
    asked: Tensor | None = None,
    reading: Reading | None = None,
    valid: Tensor | None = None,
    samples: int = 1,
    tile: Tile | None = None,
) -> tuple[Tensor, Moments | None]:
    """``x`` (device, row, in) times weights; and moments, where ``valid`` is given."""
    x, w = x.contiguous(), by_device(w)
    d, n, inputs = x.shape
    y = torch.empty(d, n, outputs, dtype=x.dtype, device=x.device)
    tile = tile or product_tile(n, inputs, outputs)
    pieces, tiles = triton.cdiv(n, tile.rows), triton.cdiv(outputs, tile.columns)
    moments = None if valid is None else Moments.empty(d, pieces, outputs, x.device)
    in_units, in_unit = _units(inputs)
    out_units, out_unit = _units(outputs)
    read, flags = reading_parts(reading)
    _product[pieces * tiles, d](
        x, w, y, asked, valid, *read, *(moments or (None,) * 3),
        w.stride(0), n, n // samples, in_units, out_units, tiles,
        IN_UNIT=in_unit, OUT_UNIT=out_unit, BACK=back, SUMS=valid is not None,
        EVEN=inputs % tile.terms == 0, **flags, **tile.launch(),
    )  # fmt: skip
    return y, moments


def pointwise(
    x: Tensor,
    w: Tensor,
    geometry: Geometry,
    reading: Reading | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """``x`` (device, sample, channel, height, width), lying channels last, stride 1.

    What is read is finished by ``reading``; moments are over each device's first ``valid`` samples.
    """
    del geometry
    y, moments = multiply(
        rows_of(x), w.flatten(2).to(x.dtype), w.shape[1], back=False, reading=reading,
        valid=valid, samples=x.shape[1],
    )  # fmt: skip
    return from_rows(y, x), moments


def pointwise_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry, asked: Tensor) -> Tensor:
    """The gradient of what was read, from that of the result, for devices that asked."""
    del geometry
    g, w = rows_of(g), w.flatten(2).to(g.dtype)
    if g.shape[1] <= _FEW:
        # Late layers: nearly everybody asks, and PyTorch's own product is the faster one.
        return from_rows(torch.bmm(g, w), x)
    return from_rows(multiply(g, w, w.shape[2], back=True, asked=asked)[0], x)


def pointwise_weight(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    geometry: Geometry,
    asked: Tensor,
    reading: Reading | None = None,
) -> Tensor:
    """The gradient of the weight; zero for devices that did not ask."""
    del geometry
    return sum_of_products(rows_of(g), rows_of(x), asked, reading).view(w.shape)


def sum_of_products(
    g: Tensor,
    x: Tensor,
    asked: Tensor,
    reading: Reading | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Gradients (device, row, out) times what was read (device, row, in): (device, out, in)."""
    g, x = g.contiguous(), x.contiguous()
    (d, n, outputs), inputs = g.shape, x.shape[2]
    tile = tile or weight_tile(n)
    wide = triton.cdiv(outputs, tile.rows), triton.cdiv(inputs, tile.columns)
    steps = triton.cdiv(n, tile.terms)
    pieces = max(1, min(_PIECES, steps // 4, _PROGRAMS // (d * wide[0] * wide[1])))
    turns = triton.cdiv(steps, pieces)
    pieces = triton.cdiv(steps, turns)
    parts = torch.empty(d, pieces, outputs, inputs, device=g.device)
    in_units, in_unit = _units(inputs)
    out_units, out_unit = _units(outputs)
    read, flags = reading_parts(reading)
    _weight[*wide, d * pieces](
        g, x, parts, asked, *read, n, in_units, out_units, turns, pieces,
        IN_UNIT=in_unit, OUT_UNIT=out_unit, **flags, **tile.launch(),
    )  # fmt: skip
    if pieces == 1:
        return parts[:, 0]
    gw, size = torch.empty(d, outputs, inputs, device=g.device), outputs * inputs
    _add_up[triton.cdiv(size, _BLOCK), d](parts, gw, size, pieces, BLOCK=_BLOCK)
    return gw
