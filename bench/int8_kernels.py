"""Every int8 kernel of this machine on the linear maps of common networks, interleaved.

    python bench/int8_kernels.py --threads 1
    COCOFL_WITHOUT=legacy python bench/int8_kernels.py

Times are medians; ratios are to ``reference``, which computes in float32 with a conversion on each
side. "Apart" is by how many codes a result differs from the reference's at most. Under emulation
times say nothing, and ``--repeats 1 --batch 1`` tells which kernels run and whether they are right.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from cocofl.freeze.kernels import KERNELS, REFERENCE, Geometry, LinearMap, available, why_not
from cocofl.numerics import Codes, Grid, QuantizedWeight

Case = tuple[tuple[int, ...], tuple[int, ...], Geometry | None]
CASES: dict[str, Case] = {
    "3x3 64>64 at 32x32": ((64, 32, 32), (64, 64, 3, 3), Geometry(padding=(1, 1))),
    "3x3 128>128 at 8x8": ((128, 8, 8), (128, 128, 3, 3), Geometry(padding=(1, 1))),
    "1x1 24>144 at 32x32": ((24, 32, 32), (144, 24, 1, 1), Geometry()),
    "1x1 144>24 at 32x32": ((144, 32, 32), (24, 144, 1, 1), Geometry()),
    "depthwise 144 at 32x32": (
        (144, 32, 32), (144, 1, 3, 3), Geometry(padding=(1, 1), groups=144),
    ),
    "linear 256>1024, 128 rows each": ((128, 256), (1024, 256), None),
    "linear 64>10": ((64,), (10, 64), None),
}  # fmt: skip


def one_map(case: Case, batch: int) -> tuple[LinearMap, Codes, Grid]:
    """A linear map with random weights, an input, and the grid of its result."""
    sample, weight, geometry = case
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-63, 64, weight, dtype=torch.int8, generator=random)
    scale = 0.005 + 0.01 * torch.rand(weight[0], generator=random)
    bias = torch.randn(weight[0], generator=random)
    shape = (batch, *sample)
    linear_map = LinearMap(QuantizedWeight(codes, scale), bias, geometry, True, 0, shape)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    if geometry is not None:
        values = values.contiguous(memory_format=torch.channels_last)
    x = Codes(values, Grid(0.02, 0))
    result = REFERENCE.prepare(linear_map)(x, None, None)
    assert isinstance(result, torch.Tensor)
    return linear_map, x, Grid(float(result.max()) / 255, 0)


def main() -> None:
    """Take turns, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, k in KERNELS.items():
        if reason := why_not(k):
            print(f"without {name}: {reason}")
    for name, case in CASES.items():
        linear_map, x, out = one_map(case, options.batch)
        runs = {k.name: k.prepare(linear_map) for k in available(torch.device("cpu"))}
        found = {kernel: run(x, out, None) for kernel, run in runs.items()}
        codes = {kernel: y.values.int() for kernel, y in found.items() if isinstance(y, Codes)}
        times: dict[str, list[float]] = {kernel: [] for kernel in runs}
        for _ in range(options.repeats):
            for kernel, run in runs.items():
                begin = time.perf_counter()
                run(x, out, None)
                times[kernel].append(time.perf_counter() - begin)
        middle = {kernel: statistics.median(values) for kernel, values in times.items()}
        print(name)
        for kernel, seconds in middle.items():
            ratio = seconds / middle[REFERENCE.name]
            apart = int((codes[kernel] - codes[REFERENCE.name]).abs().max())
            print(f"  {kernel:15} {1e3 * seconds:8.2f} ms  {ratio:5.2f}  apart {apart}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}, {options.threads} threads, batch {options.batch}")


if __name__ == "__main__":
    main()
