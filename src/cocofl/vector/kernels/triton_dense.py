"""Dense convolutions of many devices at once, as matrix products that find their operands.

Images lie channels last: (device, sample, h, w, c). A tile of results is a sum over taps and
channels of a tile of images times a tile of weights; nothing is unfolded in memory.

Matrix units take float32 only where a product's inner index is the one that lies densely. Hence
weights are laid out (device, result channel, tap, summed channel) before they are used, once for
each direction; that costs one pass over them. Gradients of weights read both sides across: in
``tf32`` they hold them as float16 (see `triton_halves`), if there are many channels. Images are
taken as they are, so a value above 65504 is infinite there.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels.triton_depthwise import by_device, room_for_result, room_like
from cocofl.vector.kernels.triton_halves import peaks, pieces_of, scale_of
from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before

_PROGRAMS = 528  # four for each multiprocessor of a large GPU; sums are cut into as many pieces
_SIDE = 32  # of the tiles in which weights are laid out anew
_BLOCK = 1024  # weights that a program lays out or sums up
_MANY = 64  # output channels, with which matrix units are what weight gradients wait for
_FEW = 4096  # positions, for which large tiles would leave multiprocessors idle
_NOWHERE = tl.constexpr(-(1 << 30))  # a row that no image has, whatever is added to it

# What a kernel gains nothing from knowing when it is compiled; see triton_rows.
_SIZES = ("images", "height", "width", "out_height", "out_width", "tall", "wide", "units")
_SIZES += ("step_h", "step_w", "spread_h", "spread_w", "direction", "pad_h", "pad_w")
_SIZES += ("turns", "pieces", "patch_h", "patch_w", "taps", "stride", "inputs", "filters")
_SIZES += ("row", "size", "zero", "chunks")
_compiled_once = kernels(sizes=_SIZES, of_devices=("OWN", "ASKED", "PEAKS"))


class Tile(NamedTuple):
    """How a program computes: rows and columns of its results, terms at a time, and resources."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int
    cached: bool = False
    """Images go through a multiprocessor's own cache: taps read nearly the same."""
    registers: int | None = None
    """Of a thread, at most, so that more programs run at a time."""

    def part(self, x: Tensor) -> int:
        """Elements that are copied at a time: a copy of 16 bytes goes past the cache, of 8 not."""
        return 8 // x.element_size() if self.cached else 16

    def launch(self) -> dict[str, Any]:
        """What Triton takes of it at a launch."""
        found = {
            "BM": self.rows, "BN": self.columns, "BK": self.terms,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip
        return found if self.registers is None else found | {"maxnreg": self.registers}


@triton.jit
def _within(at, size):
    """``0 <= at < size`` in one comparison."""
    return at.to(tl.uint32) < size.to(tl.uint32)


@_compiled_once
def _convolve(
    X, W, Y, ASKED, images, height, width, out_height, out_width, units, outputs, tall, wide,
    step_h, step_w, spread_h, spread_w, direction, pad_h, pad_w, zero,
    UNIT: tl.constexpr, EVEN: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of one device: positions of all its images by output channels.

    Forward, position ``u`` reads row ``u · step - pad + i`` at tap ``i``. On the way back a row
    ``spread · u + r`` of the result gets something only from every ``spread``-th tap, and that
    from row ``u + (r + pad - i) / spread``: each ``r`` is a convolution of its own, with fewer
    taps. The same formula with ``step`` or ``spread`` 1 and ``direction`` 1 or -1.
    """
    wait_for_those_before()
    d = tl.program_id(2).to(tl.int64)
    r, s = tl.program_id(1) // spread_w, tl.program_id(1) % spread_w
    i, j = (r + pad_h) % spread_h, (s + pad_w) % spread_w
    taps_down, taps_across = tl.cdiv(tall - i, spread_h), tl.cdiv(wide - j, spread_w)
    rows = tl.maximum(tl.cdiv(out_height - r, spread_h), 1)
    columns = tl.maximum(tl.cdiv(out_width - s, spread_w), 1)
    tiles = tl.cdiv(outputs, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)

    image, u, v = m // (rows * columns), m // columns % rows, m % columns
    y_row, y_column = u * spread_h + r, v * spread_w + s
    inside = (image < images) & (y_row < out_height) & (y_column < out_width)
    taps = taps_down * taps_across
    if ASKED is not None:
        taps *= (tl.load(ASKED + d) != 0).to(tl.int32)
    some = taps > 0  # a stride larger than the kernel steps over places
    row = u * step_h - direction * ((r + pad_h - i) // spread_h)
    row = tl.where(inside & some, row, _NOWHERE)
    column = v * step_w - direction * ((s + pad_w - j) // spread_w)
    channels = units * UNIT
    x_at = ((image * height + row) * width + column) * channels
    # What Triton knows of where images begin decides how much it copies at a time; see Tile.
    x_from = X + zero * PART + d * images * height * width * channels
    w_at = n * tall * wide * channels
    w_from = W + d * outputs * tall * wide * channels

    total = tl.zeros((BM, BN), tl.float32)
    first, down, across = 0, 0, 0  # channel and tap
    steps = taps * tl.cdiv(channels, BK)
    # At least one, of nothing if need be: else products wait for one another.
    for _ in range(tl.maximum(steps, 1)):
        k = tl.multiple_of(first, BK) + tl.arange(0, BK)
        there = _within(row + direction * down, height)
        there = there & _within(column + direction * across, width)
        x_mask, w_mask = there[:, None], ((n < outputs) & some)[None, :]
        if not EVEN:
            x_mask, w_mask = x_mask & (k < channels)[None, :], w_mask & (k < channels)[:, None]
        shift = direction * (down * width + across) * channels
        x = tl.load(x_from + x_at[:, None] + (shift + k)[None, :], x_mask, other=0.0)
        tap = (i + down * spread_h) * wide + j + across * spread_w
        w = tl.load(w_from + w_at[None, :] + (tap * channels + k)[:, None], w_mask, other=0.0)
        total = tl.dot(x, w, total, input_precision="tf32")
        # Taps before channels: what the next tap reads was, for the most part, just read.
        across += 1
        done = across >= taps_across
        across, down = tl.where(done, 0, across), tl.where(done, down + 1, down)
        done = down >= taps_down
        down = tl.where(done, 0, down)
        first = tl.where(done, first + BK, first)

    y_at = ((image * out_height + y_row) * out_width + y_column) * outputs
    y_from = Y + d * images * out_height * out_width * outputs
    mask = inside[:, None] & (n < outputs)[None, :]
    tl.store(y_from + y_at[:, None] + n[None, :], total, mask)


@_compiled_once
def _weight(
    X, G, OUT, ASKED, PEAKS, images, height, width, out_height, out_width, units, outputs, tall,
    wide, step_h, step_w, pad_h, pad_w, turns, pieces, patch_h, patch_w, chunks,
    UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of one device's gradient, over one piece of its positions.

    Zeros where nobody needs it. Columns of the result are taps and channels together, so that few
    channels still fill a tile. Positions come in patches of the images, so that what differs
    within a patch stays the same from one to the next. Where the gradients' ``PEAKS`` are given,
    tiles are held as float16.
    """
    wait_for_those_before()
    d, piece = (tl.program_id(2) // pieces).to(tl.int64), tl.program_id(2) % pieces
    channels = units * UNIT
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tall * wide * channels  # of the result
    tap = n // channels
    i, j = tap // wide - pad_h, tap % wide - pad_w
    n_at = (i * width + j) * channels + n % channels
    i = tl.where(n < row, i, _NOWHERE)

    k = tl.arange(0, BK)
    image, u, v = k // (patch_h * patch_w), k // patch_w % patch_h, k % patch_w
    patch_images = BK // (patch_h * patch_w)
    x_at = ((image * height + u * step_h) * width + v * step_w) * channels
    g_at = ((image * out_height + u) * out_width + v) * outputs
    x_from = X + d * images * height * width * channels
    g_from = G + d * images * out_height * out_width * outputs

    high, broad = tl.cdiv(out_height, patch_h), tl.cdiv(out_width, patch_w)  # in patches
    patch = piece * turns
    from_image = patch // (high * broad) * patch_images
    from_u, from_v = patch // broad % high * patch_h, patch % broad * patch_w
    down, up = scale_of(PEAKS, d, chunks)
    total = tl.zeros((BM, BN), tl.float32)
    asked = tl.load(ASKED + d) != 0
    # At least one, of nothing if need be: else products wait for one another.
    for _ in range(tl.maximum(turns * asked.to(tl.int32), 1)):
        present = (image + from_image < images) & asked
        there = _within((u * step_h)[:, None] + i[None, :] + from_u * step_h, height)
        there = there & _within((v * step_w)[:, None] + j[None, :] + from_v * step_w, width)
        there = there & present[:, None]
        shift = ((from_image * height + from_u * step_h) * width + from_v * step_w) * channels
        x = tl.load(x_from + shift + (x_at[:, None] + n_at[None, :]), there, other=0.0)
        present = present & (u + from_u < out_height) & (v + from_v < out_width)
        shift = ((from_image * out_height + from_u) * out_width + from_v) * outputs
        g_mask = present[None, :] & (m < outputs)[:, None]
        g = tl.load(g_from + shift + (g_at[None, :] + m[:, None]), g_mask, other=0.0)
        if PEAKS is not None:
            g, x = (g * up).to(tl.float16), x.to(tl.float16)
        total = tl.dot(g, x, total, input_precision="tf32")
        from_v += patch_w
        done = from_v >= out_width
        from_v = tl.where(done, 0, from_v)
        from_u = tl.where(done, from_u + patch_h, from_u)
        done = from_u >= out_height
        from_u = tl.where(done, 0, from_u)
        from_image = tl.where(done, from_image + patch_images, from_image)

    out_from = OUT + (d * pieces + piece) * outputs * row
    mask = (m < outputs)[:, None] & (n < row)[None, :]
    tl.store(out_from + m[:, None] * row + n[None, :], total * down, mask)


@_compiled_once
def _lay(OWN, OUT, stride, inputs, taps, row, size, BLOCK: tl.constexpr):
    """(filter, in, tap) to (filter, tap, in)."""
    wait_for_those_before()
    d = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o, f = at // row, at % row
    w = tl.load(OWN + d * stride + at, at < size, other=0.0)
    tl.store(OUT + d * size + o * row + f % taps * inputs + f // taps, w, at < size)


@_compiled_once
def _lay_back(OWN, OUT, stride, row, filters, SIDE: tl.constexpr):
    """(filter, in · tap) to (in · tap, filter)."""
    wait_for_those_before()
    d = tl.program_id(2).to(tl.int64)
    f = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    o = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (f < row) & (o < filters)
    w = tl.load(OWN + d * stride + o * row + f, inside, other=0.0)
    tl.store(OUT + d * filters * row + f * filters + o, w, inside)


@_compiled_once
def _gather(PARTS, OUT, pieces, inputs, taps, row, size, BLOCK: tl.constexpr):
    """The sum of pieces (filter, tap, in), in their order, as (filter, in, tap)."""
    wait_for_those_before()
    d = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o, f = at // row, at % row
    source = o * row + f % taps * inputs + f // taps
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(PARTS + (d * pieces + piece) * size + source, at < size, other=0.0)
    tl.store(OUT + d * size + at, total, at < size)


def _side(size: int, most: int) -> int:
    """Of a tile: a matrix unit takes at least 16."""
    return max(16, min(most, triton.next_power_of_2(size)))


# The tiles were measured on an H200 with the sizes of ResNet18 and DenseNet40.


def product_tile(x: Tensor, channels: int, outputs: int, positions: int) -> Tile:
    """For images times weights; ``positions`` of one device."""
    single = x.dtype == torch.float32
    terms = 32 if single else 64
    while terms > 16 and channels % terms:
        terms //= 2
    columns = _side(outputs, 128)
    if columns == 128 and positions <= _FEW:
        return Tile(64, columns, terms, 4, 3)
    if columns == 128:
        return Tile(128, columns, terms, 8, 3, registers=128)  # so that two run at a time
    return Tile(128, columns, terms, 4, 3, cached=single and columns == 64 and terms == 16)


def weight_tile(x: Tensor, row: int, outputs: int) -> Tile:
    """For gradients times images; ``row`` is how many weights an output channel has."""
    single, rows = x.dtype == torch.float32, _side(outputs, 128)
    if rows < _MANY:
        return Tile(rows, _side(row, 128), 32 if single else 64, 4, 3)
    return Tile(rows, _side(row, 128), 32, 4, 3) if single else Tile(64, _side(row, 64), 64, 4, 4)


def laid(w: Tensor, dtype: torch.dtype, *, back: bool) -> Tensor:
    """Weights (device, filter, in, …) as the product takes them, forward or on the way back."""
    w = by_device(w)
    d, filters, inputs = w.shape[:3]
    taps = w.shape[3] * w.shape[4]
    row = inputs * taps
    out = torch.empty(d, filters * row, dtype=dtype, device=w.device)
    if back:
        grid = triton.cdiv(row, _SIDE), triton.cdiv(filters, _SIDE), d
        _lay_back[grid](w, out, w.stride(0), row, filters, SIDE=_SIDE)
    else:
        grid = triton.cdiv(filters * row, _BLOCK), d
        _lay[grid](w, out, w.stride(0), inputs, taps, row, filters * row, BLOCK=_BLOCK)
    return out


def _product(
    x: Tensor, w: Tensor, y: Tensor, asked: Tensor | None, geometry: Geometry, *, back: bool
) -> Tensor:
    """``x`` (device, sample, channel, h, w), lying channels last, into ``y`` (…, h, w, channel)."""
    d, images, channels, height, width = x.shape
    weights = laid(w, x.dtype, back=back)
    out_height, out_width, outputs = y.shape[2:]
    (down, right), one = geometry.stride, (1, 1)
    classes = down * right if back else 1
    positions = images * triton.cdiv(out_height, down if back else 1)
    positions *= triton.cdiv(out_width, right if back else 1)
    tile = product_tile(x, channels, outputs, positions)
    unit = gcd(channels, 16)
    step, spread = (one, geometry.stride) if back else (geometry.stride, one)
    grid = triton.cdiv(positions, tile.rows) * triton.cdiv(outputs, tile.columns), classes, d
    _convolve[grid](
        x, weights, y, asked, images, height, width, out_height, out_width, channels // unit,
        outputs, *w.shape[3:], *step, *spread, -1 if back else 1, *geometry.padding, 0,
        UNIT=unit, EVEN=channels % tile.terms == 0, PART=tile.part(x), **tile.launch(),
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def dense(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """``x`` (device, sample, channel, height, width), lying channels last."""
    return _product(x, w, room_for_result(x, w, geometry), None, geometry, back=False)


def dense_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry, asked: Tensor) -> Tensor:
    """The gradient of ``x`` from that of the result, for devices that asked."""
    return _product(g, w, room_like(x, g.dtype), asked, geometry, back=True)


def dense_weight(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, asked: Tensor) -> Tensor:
    """The gradient of the weight: of pieces of a device's positions, then their sum.

    Zero for devices that did not ask.
    """
    d, b, channels, height, width = x.shape
    outputs, taps = w.shape[1], w.shape[3] * w.shape[4]
    row, (out_height, out_width) = taps * channels, g.shape[3:]
    tile = weight_tile(x, row, outputs)
    grid = triton.cdiv(outputs, tile.rows), triton.cdiv(row, tile.columns)
    patch_w = min(tile.terms, triton.next_power_of_2(out_width))
    patch_h = min(tile.terms // patch_w, triton.next_power_of_2(out_height))
    patches = triton.cdiv(b, tile.terms // (patch_h * patch_w))
    patches *= triton.cdiv(out_height, patch_h) * triton.cdiv(out_width, patch_w)
    pieces = min(patches, max(1, round(_PROGRAMS / (d * grid[0] * grid[1]))))
    turns = triton.cdiv(patches, pieces)
    pieces = triton.cdiv(patches, turns)
    parts = torch.empty(d, pieces, outputs, row, device=g.device)
    found = peaks(g, asked) if g.dtype == torch.float32 and tile.rows >= _MANY else None
    unit = gcd(channels, 16)
    _weight[*grid, d * pieces](
        x, g, parts, asked, found, b, height, width, *g.shape[3:], channels // unit, outputs,
        *w.shape[3:], *geometry.stride, *geometry.padding, turns, pieces, patch_h, patch_w,
        pieces_of(found), UNIT=unit, **tile.launch(),
    )  # fmt: skip
    gw, size = torch.empty(w.shape, device=g.device), outputs * row
    blocks = triton.cdiv(size, _BLOCK)
    _gather[blocks, d](parts, gw, pieces, channels, taps, row, size, BLOCK=_BLOCK)
    return gw
