"""Float16 as a stand-in for tf32 in products.

It has the 11 significant bits of tf32, half its size and twice its speed, and matrix units can
read it across, which they cannot with tf32. Its range is smaller. What may be tiny, such as
gradients, is multiplied by a power of two before and divided by it after; that is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cocofl.vector.kernels.triton_launch import kernels, wait_for_those_before
from cocofl.vector.kernels.triton_rows import CHUNKS, TILE, chunks_of

_ROOM = tl.constexpr(CHUNKS)  # for the pieces of a device, of which there are no more

_compiled_once = kernels(sizes=("stride", "size", "turns"), of_devices=("ASKED",))


@triton.jit
def power_of_two(largest):
    """The power of two just below, and 1 over it; 2^-96 stands for all that is smaller."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x0F800000)
    down = exponent.to(tl.float32, bitcast=True)
    return down, (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(PEAKS, d, chunks):
    """What a device's numbers are divided by, so that the largest is from 2^13 to 2^14; 1 over it.

    1 and 1 where nobody looked for the largest.
    """
    down, up = 1.0, 1.0
    if PEAKS is not None:
        k = tl.arange(0, _ROOM)
        peaks = tl.load(PEAKS + d * chunks + k, mask=k < chunks, other=0.0)
        down, up = power_of_two(tl.max(peaks, 0))
        down, up = down * (1.0 / 8192), up * 8192.0
    return down, up


@_compiled_once
def _peaks(X, ASKED, OUT, stride, size, turns, BN: tl.constexpr):
    wait_for_those_before()
    d, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    turns *= (tl.load(ASKED + d) != 0).to(tl.int32)
    best = tl.zeros((BN,), tl.float32)
    for turn in range(turns):
        i = (chunk * turns + turn) * BN + tl.arange(0, BN)
        best = tl.maximum(best, tl.abs(tl.load(X + d * stride + i, mask=i < size, other=0.0)))
    tl.store(OUT + d * tl.num_programs(1) + chunk, tl.max(best, 0))


def peaks(x: Tensor, asked: Tensor) -> Tensor:
    """max|x| of pieces of each device, (device, piece), for :func:`scale_of`.

    Each device's lie densely, in whatever order; of devices that did not ask it is 0.
    """
    d, size = len(x), x[0].numel()
    turns, chunks = chunks_of(d, size)
    out = torch.empty(d, chunks, device=x.device)
    _peaks[d, chunks](x, asked, out, x.stride(0), size, turns, BN=TILE)
    return out


def pieces_of(found: Tensor | None) -> int:
    """Of what :func:`peaks` found, if anybody looked."""
    return 0 if found is None else found.shape[1]
