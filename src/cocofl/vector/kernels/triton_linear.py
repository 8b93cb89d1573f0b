"""Linear layers that read the same rows, with bias and ReLU, in one pass each way.

Small layers are bound by memory: what counts is that the rows are read once for all layers, that
bias and activation cost no pass of their own, and that the rows' gradient is summed over the
layers before it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.numerics import StackedGrid
from cocofl.vector.kernels.base import Activation
from cocofl.vector.kernels.triton_halves import power_of_two
from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before
from cocofl.vector.kernels.triton_rows import rounded


class Tiles(NamedTuple):
    """Rows, results and terms of a tile (of a weight: its inputs), and how it runs."""

    rows: int
    results: int
    terms: int
    warps: int
    stages: int


# Measured on an H200 with 128 channels.
_FORWARD = _BACK = Tiles(128, 128, 32, 8, 3)
_SUM = Tiles(32, 128, 128, 8, 3)
_PROGRAMS = 132  # that share the rows of a sum

# What gains nothing from being a multiple of 16: see `triton_launch`.
_compiled_once = kernels(sizes=("n", "devices", "across", "turns"), of_devices=("GRID", "ASKED"))


@triton.jit
def _on_grid(x, GRID, layer, d, devices, ROUNDS: tl.constexpr):
    """A layer's value or gradient, rounded where its device does that.

    ``GRID`` (layer, part, device).
    """
    if ROUNDS:
        own = GRID + layer * 4 * devices
        low, high = own + 2 * devices, own + 3 * devices
        x = rounded(x.to(tl.float32), d, own, own + devices, low, high).to(x.dtype)
    return x


@_compiled_once
def _forward(
    X, W, BIAS, GRID, Y, n, devices, ins, outs, across, upper,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, CAPPED: tl.constexpr, ROUNDS: tl.constexpr,
    BR: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """``Y`` (layer, device, row, out); programs side by side read the same rows."""
    wait_for_those_before()
    tile, d = tl.program_id(0) // across, tl.program_id(1).to(tl.int64)
    wide = tl.cdiv(outs, BO)
    layer = (tl.program_id(0) % across) // wide
    own = layer * devices + d
    r = tile * BR + tl.arange(0, BR)
    o = (tl.program_id(0) % across) % wide * BO + tl.arange(0, BO)
    X += d * n * ins
    W += own * outs * ins
    y = tl.zeros((BR, BO), tl.float32)
    for first in range(0, ins, BI):
        i = first + tl.arange(0, BI)
        at = r[:, None] * ins + i[None, :]
        x = tl.load(X + at, mask=(r < n)[:, None] & (i < ins)[None, :], other=0.0)
        at = o[:, None] * ins + i[None, :]
        w = tl.load(W + at, mask=(o < outs)[:, None] & (i < ins)[None, :], other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision="tf32")
    if HAS_BIAS:
        y = y + tl.load(BIAS + own * outs + o, mask=o < outs, other=0.0)[None, :]
    if ACTIVATION:
        y = tl.where(y > 0, y, y * 0.0)  # NaN stays NaN
    if CAPPED:
        y = tl.where(y > upper, upper, y)
    y = _on_grid(y, GRID, layer, d, devices, ROUNDS)
    at = r[:, None] * outs + o[None, :]
    tl.store(Y + own * n * outs + at, y, mask=(r < n)[:, None] & (o < outs)[None, :])


@triton.jit
def _add_product(
    y, G, W, GRID, layer, d, n, devices, ins, outs, r, i, ROUNDS: tl.constexpr, BO: tl.constexpr
):
    """Of one layer."""
    W += layer * devices * ins * outs
    G += d * n * outs
    W += d * outs * ins
    for first in range(0, outs, BO):
        o = first + tl.arange(0, BO)
        at = r[:, None] * outs + o[None, :]
        g = tl.load(G + at, mask=(r < n)[:, None] & (o < outs)[None, :], other=0.0)
        g = _on_grid(g, GRID, layer, d, devices, ROUNDS)
        at = i[:, None] * outs + o[None, :]
        w = tl.load(W + at, mask=(i < ins)[:, None] & (o < outs)[None, :], other=0.0)
        y = tl.dot(g, tl.trans(w), y, input_precision="tf32")
    return y


@_compiled_once
def _input(
    G, H, K, W, GRID, ADDEND, ASKED, GX, n, devices, ins, outs, across,
    LAYERS: tl.constexpr, ROUNDS: tl.constexpr, ADDS: tl.constexpr,
    BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """From the gradients of up to three layers; ``W`` (layer, device, in, out)."""
    wait_for_those_before()
    tile, d = tl.program_id(0) // across, tl.program_id(1).to(tl.int64)
    if tl.load(ASKED + d) == 0:
        return
    r = tile * BR + tl.arange(0, BR)
    i = tl.program_id(0) % across * BI + tl.arange(0, BI)
    y = tl.zeros((BR, BI), tl.float32)
    y = _add_product(y, G, W, GRID, 0, d, n, devices, ins, outs, r, i, ROUNDS, BO)
    if LAYERS > 1:
        y = _add_product(y, H, W, GRID, 1, d, n, devices, ins, outs, r, i, ROUNDS, BO)
    if LAYERS > 2:
        y = _add_product(y, K, W, GRID, 2, d, n, devices, ins, outs, r, i, ROUNDS, BO)
    at = d * n * ins + r[:, None] * ins + i[None, :]
    inside = (r < n)[:, None] & (i < ins)[None, :]
    if ADDS:
        y = y + tl.load(ADDEND + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(GX + at, y, mask=inside)


@triton.jit
def _held(x, HELD: tl.constexpr, SCALES: tl.constexpr):
    """A tile in the type it is multiplied in, and the power of two it was divided by."""
    down = 1.0
    if SCALES:
        down, up = power_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
        x = x * up
    return x.to(HELD), down


@_compiled_once
def _weight(
    G, X, GRID, ASKED, OUT, n, devices, ins, outs, turns, across,
    HELD: tl.constexpr, SCALES: tl.constexpr, ROUNDS: tl.constexpr,
    BR: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Of one chunk of rows: (device, chunk, out · in), and behind it for the bias, (out).

    Zeros where nobody needs it.
    """
    wait_for_those_before()
    d, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) // across
    tile, wide = tl.program_id(0) % across, tl.cdiv(ins, BI)
    o = tile // wide * BO + tl.arange(0, BO)
    i = tile % wide * BI + tl.arange(0, BI)
    G += d * n * outs
    X += d * n * ins
    turns *= (tl.load(ASKED + d) != 0).to(tl.int32)
    gw = tl.zeros((BO, BI), tl.float32)
    gb = tl.zeros((BR, BO), tl.float32)
    for turn in range(turns):
        r = (chunk * turns + turn) * BR + tl.arange(0, BR)
        at = r[:, None] * outs + o[None, :]
        g = tl.load(G + at, mask=(r < n)[:, None] & (o < outs)[None, :], other=0.0)
        at = r[:, None] * ins + i[None, :]
        x = tl.load(X + at, mask=(r < n)[:, None] & (i < ins)[None, :], other=0.0)
        g = _on_grid(g, GRID, 0, d, devices, ROUNDS)
        gb += g.to(tl.float32)
        g, g_down = _held(g, HELD, SCALES)
        x, x_down = _held(x, HELD, SCALES)
        gw += tl.dot(tl.trans(g), x) * (g_down * x_down)
    OUT += (d * (tl.num_programs(0) // across) + chunk) * outs * (ins + 1)
    at = o[:, None] * ins + i[None, :]
    tl.store(OUT + at, gw, mask=(o < outs)[:, None] & (i < ins)[None, :])
    tl.store(OUT + outs * ins + o, tl.sum(gb, 0), mask=(o < outs) & (tile % wide == 0))


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: Activation,
    grid: Tensor | None = None,
) -> list[Tensor]:
    """activation(x · wᵀ + bias) of each layer, from rows (device, row, in).

    It is rounded to ``grid``, of all layers (see :func:`stacked`).
    """
    x, tiles = x.contiguous(), _FORWARD
    d, n, ins = x.shape
    outs, w = weights[0].shape[1], torch.stack([w.to(x.dtype) for w in weights])
    bias = None
    if any(b is not None for b in biases):
        none = torch.zeros(d, outs, device=x.device)
        bias = torch.stack([none if b is None else b.float() for b in biases])
    y = torch.empty(len(weights), d, n, outs, dtype=x.dtype, device=x.device)
    across = len(weights) * triton.cdiv(outs, _fit(tiles.results, outs))
    _forward[triton.cdiv(n, tiles.rows) * across, d](
        x, w, bias, grid, y, n, d, ins, outs, across, activation.upper or 0.0,
        HAS_BIAS=bias is not None, ACTIVATION=activation.present, ROUNDS=grid is not None,
        CAPPED=activation.upper is not None, BR=tiles.rows, BO=_fit(tiles.results, outs),
        BI=_fit(tiles.terms, ins), **_launch(tiles),
    )  # fmt: skip
    return list(y)


def linear_input(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    asked: Tensor,
    addend: Tensor | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """The gradient of the rows: the sum over the layers of g · w, and ``addend``.

    Undefined for devices that did not ask. Gradients are rounded to ``grid`` first, of all layers
    (see :func:`stacked`).
    """
    tiles = _BACK
    gs = [g.contiguous() for g in gradients]
    d, n, outs = gs[0].shape
    ins = weights[0].shape[2]
    w = torch.stack([w.to(gs[0].dtype).transpose(1, 2) for w in weights])
    gx = torch.empty(d, n, ins, dtype=gs[0].dtype, device=w.device)
    across = triton.cdiv(ins, _fit(tiles.results, ins))
    _input[triton.cdiv(n, tiles.rows) * across, d](
        *gs, *[None] * (3 - len(gs)), w, grid, None if addend is None else addend.contiguous(),
        asked, gx, n, d, ins, outs, across,
        LAYERS=len(gs), ROUNDS=grid is not None, ADDS=addend is not None,
        BR=tiles.rows, BI=_fit(tiles.results, ins), BO=_fit(tiles.terms, outs), **_launch(tiles),
    )  # fmt: skip
    return gx


def stacked(grids: Sequence[StackedGrid | None]) -> Tensor | None:
    """Several layers' grids, (layer, part, device); None if nobody rounds."""
    known = next((grid for grid in grids if grid is not None), None)
    if known is None:
        return None
    none = torch.zeros_like(known[0])
    parts = [part for grid in grids for part in (grid or (none,) * 4)]
    return torch.stack(parts).view(len(grids), 4, -1)


def linear_weight(
    g: Tensor, x: Tensor, asked: Tensor, grid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of one layer's weight and bias; ``g`` is rounded to ``grid`` first.

    Zero for devices that did not ask. Both tiles are read across, which tf32 cannot: they are held
    as float16, divided by a power of two so that its range is enough (see `triton_halves`).
    """
    g, x, tiles = g.contiguous(), x.contiguous(), _SUM
    (d, n, outs), ins = g.shape, x.shape[2]
    down, across = _fit(tiles.results, outs), _fit(tiles.terms, ins)
    parts = triton.cdiv(outs, down) * triton.cdiv(ins, across)
    chunks = max(1, min(_PROGRAMS // (d * parts), triton.cdiv(n, tiles.rows)))
    turns = triton.cdiv(triton.cdiv(n, tiles.rows), chunks)
    out = torch.empty(d, chunks, outs * (ins + 1), device=g.device)
    floats = g.dtype == torch.float32
    _weight[chunks * parts, d](
        g, x, grid, asked, out, n, d, ins, outs, turns, parts,
        HELD=tl.float16 if floats else tl.bfloat16, SCALES=floats, ROUNDS=grid is not None,
        BR=tiles.rows, BO=down, BI=across, **_launch(tiles),
    )  # fmt: skip
    gw, gb = out.sum(1).split([outs * ins, outs], 1)
    return gw.unflatten(1, (outs, ins)), gb


def _fit(size: int, n: int) -> int:
    """No more than there is, but a size that can be multiplied."""
    return max(16, min(size, triton.next_power_of_2(n)))


def _launch(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
