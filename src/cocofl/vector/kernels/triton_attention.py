"""Attention without its matrix of weights: tiles of it are made, used, and made again backward.

After FlashAttention-2 (Dao, 2023): a program goes through the keys of its queries and keeps the
softmax's largest exponent and sum; the way back needs their logarithm only. Gradients of queries
and those of keys and values come from two kernels, so no two programs add to one number, and
runs repeat to the bit.

This is for ``tf32``; other precisions are PyTorch's. Tiles are held as float16 (see
`triton_halves`). Queries, keys and values are taken as they are, so one above 65504 is infinite
here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.vector.kernels.triton_halves import power_of_two
from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before

_LOG2_E = 1.4426950408889634
_HELD = tl.constexpr(tl.float16)

# What gains nothing from being a multiple of 16: see `triton_launch`.
_SIZES = ("heads", "queries", "keys", "tiles", "parts", "each")
_SIZES += ("mask_sample", "mask_head", "mask_key")
_compiled_once = kernels(sizes=_SIZES, of_devices=("MASK", "ASKED", "LSE", "DELTA", "LARGEST"))


class Tiles(NamedTuple):
    """How a kernel is cut, and how it runs."""

    queries: int
    keys: int
    warps: int
    stages: int

    def launch(self) -> dict[str, int]:
        """What Triton takes of it at a launch."""
        names = "BQ", "BK", "num_warps", "num_stages"
        return dict(zip(names, self, strict=True))


class Plan(NamedTuple):
    """The tiles of each kernel."""

    forward: Tiles
    queries: Tiles
    keys: Tiles


# Measured on an H200, 512 rows of 64 channels; wider heads need smaller tiles.
_NARROW = Plan(Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 2))
_WIDE = Plan(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2))


@triton.jit
def _place(tiles, heads, ROWS: tl.constexpr):
    """The first row of a program's tile; its head among all, and the sample and head of that."""
    x = (tl.program_id(0) // tiles).to(tl.int64)
    return (tl.program_id(0) % tiles) * ROWS, x, x // heads, x % heads


@triton.jit
def _rows(X, first, stride, n, ROWS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):
    """A tile of rows, zero outside."""
    r = first + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BC)[None, :]
    return tl.load(X + r * stride + c, mask=(r < n) & (c < C), other=0.0)


@triton.jit
def _keep_rows(X, x, first, stride, n, ROWS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):
    r = first + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BC)[None, :]
    tl.store(X + r * stride + c, x, mask=(r < n) & (c < C))


@triton.jit
def _there(MASK, first, k, keys, mask_key, MASKED: tl.constexpr):
    """Which of some keys count."""
    there = k < keys
    if MASKED:
        there = tl.load(MASK + first + k * mask_key, mask=there, other=0) != 0
    return there


@triton.jit
def _kept_of_forward(LSE, DELTA, x, r, queries, up):
    """Of some queries: the logarithm of their sums, and what their weights must give back."""
    lse = tl.load(LSE + x * queries + r, mask=r < queries, other=float("inf"))
    return lse, tl.load(DELTA + x * queries + r, mask=r < queries, other=0.0) * up


@triton.jit
def _power_of_two(LARGEST, x, tiles, BT: tl.constexpr):
    """What a head's gradient is divided by, so that its largest is from 1 to 2; and 1 over it."""
    t = tl.arange(0, BT)
    return power_of_two(tl.max(tl.load(LARGEST + x * tiles + t, mask=t < tiles, other=0.0), 0))


@_compiled_once
def _forward(
    Q, K, V, MASK, OUT, LSE, scale, heads, queries, keys, tiles,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    mask_sample, mask_head, mask_key,
    MASKED: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    first, x, sample, head = _place(tiles, heads, BQ)
    K += sample * k_sample + head * k_head
    V += sample * v_sample + head * v_head
    masked = sample * mask_sample + head * mask_head
    q = _rows(Q + sample * q_sample + head * q_head, first, q_row, queries, BQ, C, BC)
    largest = tl.full((BQ,), -float("inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    y = tl.zeros((BQ, BC), tl.float32)
    for begin in range(0, keys, BK):
        k = _rows(K, begin, k_row, keys, BK, C, BC)
        there = _there(MASK, masked, begin + tl.arange(0, BK), keys, mask_key, MASKED)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(there[None, :], s, -float("inf"))
        now = tl.maximum(largest, tl.max(s, 1))
        # Nothing but masked keys so far: any finite number makes their weights zero.
        level = tl.where(now == -float("inf"), 0.0, now)
        p = tl.exp2(s - level[:, None])
        shrink = tl.exp2(largest - level)
        total = total * shrink + tl.sum(p, 1)
        v = _rows(V, begin, v_row, keys, BK, C, BC)
        y = tl.dot(p.to(_HELD), v, y * shrink[:, None])
        largest = now
    y = y / tl.where(total == 0.0, 1.0, total)[:, None]
    row = heads * C
    _keep_rows(OUT + sample * queries * row + head * C, y, first, row, queries, BQ, C, BC)
    # Queries that see no key have the weight zero backward, too.
    lse = tl.where(total == 0.0, float("inf"), largest + tl.log2(total))
    r = first + tl.arange(0, BQ)
    tl.store(LSE + x * queries + r, lse, mask=r < queries)


@_compiled_once
def _prepare(
    G, OUT, ASKED, DELTA, LARGEST, heads, queries, tiles, each, g_sample, g_head, g_row,
    C: tl.constexpr, BC: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """How much each query's weights must give back, and the largest entry of the gradient."""
    wait_for_those_before()
    first, x, sample, head = _place(tiles, heads, BQ)
    if tl.load(ASKED + sample // each) == 0:
        return
    row = heads * C
    g = _rows(G + sample * g_sample + head * g_head, first, g_row, queries, BQ, C, BC)
    y = _rows(OUT + sample * queries * row + head * C, first, row, queries, BQ, C, BC)
    g = g.to(tl.float32)
    r = first + tl.arange(0, BQ)
    tl.store(DELTA + x * queries + r, tl.sum(g * y.to(tl.float32), 1), mask=r < queries)
    tl.store(LARGEST + x * tiles + first // BQ, tl.max(tl.max(tl.abs(g), 1), 0))


@_compiled_once
def _back_queries(
    Q, K, V, G, MASK, ASKED, LSE, DELTA, LARGEST, GQ, scale, to_gradient, heads, queries, keys,
    tiles, parts, each,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    g_sample, g_head, g_row, mask_sample, mask_head, mask_key,
    MASKED: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    first, x, sample, head = _place(tiles, heads, BQ)
    if tl.load(ASKED + sample // each) == 0:
        return
    K += sample * k_sample + head * k_head
    V += sample * v_sample + head * v_head
    masked = sample * mask_sample + head * mask_head
    down, up = _power_of_two(LARGEST, x, parts, BT)
    q = _rows(Q + sample * q_sample + head * q_head, first, q_row, queries, BQ, C, BC)
    g = _rows(G + sample * g_sample + head * g_head, first, g_row, queries, BQ, C, BC)
    g = (g.to(tl.float32) * up).to(_HELD)
    r = first + tl.arange(0, BQ)
    lse, delta = _kept_of_forward(LSE, DELTA, x, r, queries, up)
    gq = tl.zeros((BQ, BC), tl.float32)
    for begin in range(0, keys, BK):
        k = _rows(K, begin, k_row, keys, BK, C, BC)
        v = _rows(V, begin, v_row, keys, BK, C, BC)
        there = _there(MASK, masked, begin + tl.arange(0, BK), keys, mask_key, MASKED)
        s = tl.dot(q, tl.trans(k)) * scale
        p = tl.where(there[None, :], tl.exp2(s - lse[:, None]), 0.0)
        gp = tl.dot(g, tl.trans(v))
        gs = p * (gp - delta[:, None])
        gq = tl.dot(gs.to(_HELD), k, gq)
    gq = gq * (down * to_gradient)
    row = heads * C
    _keep_rows(GQ + sample * queries * row + head * C, gq, first, row, queries, BQ, C, BC)


@_compiled_once
def _back_keys(
    Q, K, V, G, MASK, ASKED, LSE, DELTA, LARGEST, GK, GV, scale, to_gradient, heads, queries, keys,
    tiles, parts, each,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    g_sample, g_head, g_row, mask_sample, mask_head, mask_key,
    MASKED: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    wait_for_those_before()
    first, x, sample, head = _place(tiles, heads, BK)
    if tl.load(ASKED + sample // each) == 0:
        return
    Q += sample * q_sample + head * q_head
    G += sample * g_sample + head * g_head
    masked = sample * mask_sample + head * mask_head
    down, up = _power_of_two(LARGEST, x, parts, BT)
    k = _rows(K + sample * k_sample + head * k_head, first, k_row, keys, BK, C, BC)
    v = _rows(V + sample * v_sample + head * v_head, first, v_row, keys, BK, C, BC)
    there = _there(MASK, masked, first + tl.arange(0, BK), keys, mask_key, MASKED)
    gk = tl.zeros((BK, BC), tl.float32)
    gv = tl.zeros((BK, BC), tl.float32)
    for begin in range(0, queries, BQ):
        q = _rows(Q, begin, q_row, queries, BQ, C, BC)
        g = _rows(G, begin, g_row, queries, BQ, C, BC)
        g = (g.to(tl.float32) * up).to(_HELD)
        r = begin + tl.arange(0, BQ)
        lse, delta = _kept_of_forward(LSE, DELTA, x, r, queries, up)
        s = tl.dot(k, tl.trans(q)) * scale  # (key, query)
        p = tl.where(there[:, None], tl.exp2(s - lse[None, :]), 0.0)
        gv = tl.dot(p.to(_HELD), g, gv)
        gp = tl.dot(v, tl.trans(g))
        gs = p * (gp - delta[None, :])
        gk = tl.dot(gs.to(_HELD), q, gk)
    row = heads * C
    at = sample * keys * row + head * C
    _keep_rows(GK + at, gk * (down * to_gradient), first, row, keys, BK, C, BC)
    _keep_rows(GV + at, gv * down, first, row, keys, BK, C, BC)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, asked: Tensor
) -> Tensor:
    """softmax(query · keyᵀ · scale) · value, each (sample, head, row, channel).

    ``mask`` is true for keys that count, (sample or 1, head or 1, 1, row). The result lies with
    its heads side by side: ``y.transpose(1, 2).flatten(2)`` is a view. Samples are those of the
    devices that ``asked`` names one after the other; gradients of the others are undefined.
    """
    return _Attention.apply(query, key, value, mask, scale, asked)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        asked: Tensor,
    ) -> Tensor:
        # Once, and not again by every program that reads them.
        q, k, v = (_lying(x).to(torch.float16) for x in (q, k, v))
        n, heads, queries, channels = q.shape
        plan = _NARROW if channels <= 64 else _WIDE
        y = _side_by_side(q)
        lse = torch.empty(n, heads, queries, device=q.device)
        tiles = triton.cdiv(queries, plan.forward.queries)
        _forward[(n * heads * tiles,)](
            q, k, v, mask, y, lse, scale * _LOG2_E, heads, queries, k.shape[2], tiles,
            *_strides(q), *_strides(k), *_strides(v), *_mask_strides(mask),
            **_flags(mask, channels), **plan.forward.launch(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, mask, y, lse)
        ctx.scale, ctx.plan, ctx.asked = scale, plan, asked
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, y, lse = ctx.saved_tensors
        plan, scale, asked, g = ctx.plan, ctx.scale, ctx.asked, _lying(g)
        (n, heads, queries, channels), keys = q.shape, k.shape[2]
        parts, each = triton.cdiv(queries, _PART), n // len(asked)
        delta, largest = torch.empty_like(lse), torch.empty(n, heads, parts, device=q.device)
        _prepare[(n * heads * parts,)](
            g, y, asked, delta, largest, heads, queries, parts, each, *_strides(g),
            C=channels, BC=_wide(channels), BQ=_PART,
        )  # fmt: skip
        strides = [*_strides(q), *_strides(k), *_strides(v), *_strides(g), *_mask_strides(mask)]
        flags = _flags(mask, channels) | {"BT": triton.next_power_of_2(parts)}
        sizes = scale * _LOG2_E, scale, heads, queries, keys
        gq, gk, gv = (_side_by_side(x) for x in (q, k, v))
        tiles = triton.cdiv(queries, plan.queries.queries)
        _back_queries[(n * heads * tiles,)](
            q, k, v, g, mask, asked, lse, delta, largest, gq, *sizes, tiles, parts, each, *strides,
            **flags, **plan.queries.launch(),
        )  # fmt: skip
        tiles = triton.cdiv(keys, plan.keys.keys)
        _back_keys[(n * heads * tiles,)](
            q, k, v, g, mask, asked, lse, delta, largest, gk, gv, *sizes, tiles, parts, each,
            *strides, **flags, **plan.keys.launch(),
        )  # fmt: skip
        return gq, gk, gv, None, None, None


_PART = 64  # queries that are looked through at a time before the way back


def _wide(channels: int) -> int:
    """The channels of a tile: matrix products want a power of two, and not too small a one."""
    return max(16, triton.next_power_of_2(channels))


def _flags(mask: Tensor | None, channels: int) -> dict[str, Any]:
    return {"MASKED": mask is not None, "C": channels, "BC": _wide(channels)}


def _lying(x: Tensor) -> Tensor:
    """With neighbouring channels side by side, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _side_by_side(like: Tensor) -> Tensor:
    """Room for a float32 result whose heads lie side by side."""
    n, heads, rows, channels = like.shape
    room = torch.empty(n, rows, heads, channels, device=like.device)
    return room.transpose(1, 2)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _mask_strides(mask: Tensor | None) -> tuple[int, int, int]:
    """By sample, head and key; an axis of one entry stands for all."""
    if mask is None:
        return 0, 0, 0
    sample, head, _, key = (
        0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)
    )
    return sample, head, key
