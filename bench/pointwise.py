"""Our own 1×1 convolutions beside PyTorch's batched products, with the sizes of MobileNet.

    python bench/pointwise.py                      # on a GPU; microseconds, as in a captured step
    python bench/pointwise.py --precision bf16

Ten devices, mini-batches of 32. ``plain`` is the product alone; ``fused`` also finishes what it
reads (where the layer makes fewer channels than it takes: it follows a norm) and takes moments;
``input`` and ``weight`` are the gradients. Both sides take turns; a ratio below 1 is a gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cocofl.freeze.kernels import Geometry
from cocofl.vector.kernels import triton_pointwise as own
from cocofl.vector.kernels.base import Activation, Coefficients, Reading, rows_of
from cocofl.vector.program.stacked_layers import _sum_of_products

DEVICES, SAMPLES, TURNS = 10, 32, 3
# Height (and width), channels in, channels out.
SIZES = [
    (32, 32, 32), (32, 32, 16), (32, 16, 96), (32, 96, 24), (32, 24, 144), (32, 144, 24),
    (16, 144, 32), (16, 32, 192), (16, 192, 32), (8, 192, 64), (8, 64, 384), (8, 384, 64),
    (8, 384, 96), (8, 96, 576), (8, 576, 96), (4, 576, 160), (4, 160, 960), (4, 960, 160),
    (4, 960, 320), (4, 320, 1280),
]  # fmt: skip


def ways(
    side: int, inputs: int, outputs: int, dtype: torch.dtype
) -> dict[str, list[Callable[[], object]]]:
    """By what is computed, how we do it and how PyTorch does."""

    def images(channels: int) -> Tensor:
        shape = DEVICES, SAMPLES, side, side, channels
        return torch.randn(shape, device="cuda", dtype=dtype).permute(0, 1, 4, 2, 3)

    x, g = images(inputs), images(outputs)
    w = torch.randn(DEVICES, outputs, inputs, 1, 1, device="cuda", dtype=dtype)
    rows, g_rows, flat = rows_of(x), rows_of(g), w.flatten(2)
    everyone = torch.ones(DEVICES, dtype=torch.bool, device="cuda")
    valid = torch.full((DEVICES,), SAMPLES, dtype=torch.int32, device="cuda")
    c = Coefficients(*torch.rand(4, DEVICES, inputs, device="cuda"))
    reading = Reading(c, Activation(True), None) if outputs < inputs else None
    one = Geometry()

    def product() -> Tensor:
        return torch.bmm(rows, flat.transpose(1, 2))

    return {
        "plain": [lambda: own.pointwise(x, w, one), product],
        "fused": [lambda: own.pointwise(x, w, one, reading, valid), product],
        "input": [
            lambda: own.pointwise_input(g, w, x, one, everyone),
            lambda: torch.bmm(g_rows, flat),
        ],
        "weight": [
            lambda: own.pointwise_weight(g, x, w, one, everyone, reading),
            lambda: _sum_of_products(g_rows, rows),
        ],
    }


def microseconds(call: Callable[[], object]) -> float:
    call()
    found: float = triton.testing.do_bench_cudagraph(call, rep=5, return_mode="median")
    return 1e3 * found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", choices=["tf32", "bf16"], default="tf32")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/pointwise.py measures kernels of a GPU, and there is none here")
    torch.set_float32_matmul_precision("high")
    dtype = torch.float32 if asked.precision == "tf32" else torch.bfloat16
    totals: dict[str, list[float]] = {}
    for side, inputs, outputs in SIZES:
        cells = []
        for name, sides in ways(side, inputs, outputs, dtype).items():
            turns = [[microseconds(call) for call in sides] for _ in range(TURNS)]
            ours, theirs = (sorted(column)[TURNS // 2] for column in zip(*turns, strict=True))
            total = totals.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + ours, total[1] + theirs
            cells.append(f"{name} {ours:.1f} / {theirs:.1f} = {ours / theirs:.2f}")
        print(f"{side}×{side} {inputs} → {outputs}: {'; '.join(cells)}", flush=True)
    for name, (ours, theirs) in totals.items():
        print(f"all, {name}: {ours:.0f} / {theirs:.0f} = {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
