"""Device-steps per second: a plain PyTorch loop, the same as a CUDA graph, and the cohort.

    python bench/cohort.py --out cohort.json                 # on a GPU
    python bench/cohort.py --models mobilenet --rounds 50    # one network, longer
    python bench/cohort.py --profile profiles                # and where a step's time goes

A device-step is one mini-batch of one device: forward, backward and update. Serial is FedAvg on
the plain model; CoCoFL's cohort has three groups of devices, of which one trains everything and
the others spans drawn anew each round, frozen in int8. Everything runs in one process, on the
same data, and is timed from the first captured step on; what came before is ``prepare_s``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import BlockChain, Span, chain_state, split
from cocofl.models import MODELS
from cocofl.vector import PRECISIONS, Cohort, DeviceWork, Rows, Sgd

CLASSES = {"transformer": 2}
SAMPLES = 2000


def data(name: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    classes = CLASSES.get(name, 10)
    model = MODELS[name](classes)
    x = model.example_input(64).repeat(SAMPLES // 64 + 1, *[1] * (model.example_input(1).ndim - 1))
    y = torch.randint(0, classes, (SAMPLES,))
    return model, x[:SAMPLES].to(device), y.to(device)


def seconds(step: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def serial(name: str, batch: int, device: torch.device) -> dict[str, float]:
    """Milliseconds per step of plain PyTorch, eager and captured."""
    model, x, y = data(name, device)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    own = x[:batch].contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x[:batch]
    labels = y[:batch].clone()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.01)

    def step() -> None:
        sgd.zero_grad()
        F.cross_entropy(model(own), labels).backward()
        sgd.step()

    eager = seconds(step, 30)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return {"eager_ms": 1e3 * eager, "graph_ms": 1e3 * seconds(graph.replay, 100)}


def works(
    chain: BlockChain, devices: int, strategy: str, rng: np.random.Generator
) -> list[DeviceWork]:
    """A third of the devices trains everything, the others what fits a half and a third."""
    n = len(chain)
    if strategy == "fedavg":
        return [DeviceWork(Span(0, n), "f", 0.01)] * devices
    found = []
    for d in range(devices):
        share = (1.0, 0.5, 0.33)[d % 3]
        length = max(1, round(share * n))
        start = int(rng.integers(0, n - length + 1))
        found.append(DeviceWork(Span(start, start + length), "qff", 0.01))
    return found


def cohort(
    name: str, strategy: str, precision: str, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    begin = time.perf_counter()
    model, x, y = data(name, device)
    chain = split(model, MODELS[name](CLASSES.get(name, 10)).example_input(args.batch))
    rng = np.random.default_rng(0)
    run = Cohort(
        chain,
        lambda i: ((x[i],), y[i]),
        devices=args.devices,
        batch=args.batch,
        on=device,
        optimizer=Sgd(weight_decay=0.01),
        precision=precision,
    )
    rows = run.rows_of([chain_state(chain)])
    shape = args.steps, args.devices, args.batch
    valid = np.full(shape[:2], args.batch)
    known: frozenset[str] = frozenset()

    def round_() -> None:
        nonlocal rows, known
        indices = rng.integers(0, SAMPLES, shape)
        run.train(rows, [known], works(chain, args.devices, strategy, rng), indices, valid)
        scales = torch.where(torch.isnan(run.measured), 0.0, run.measured)
        found = (scales > 0).sum(0)
        mean = torch.where(found > 0, scales.sum(0) / found, rows.scales[0])
        known = frozenset(
            key
            for key, value in zip(run.program.sites.keys, mean.tolist(), strict=True)
            if not math.isnan(value)
        )
        rows = Rows(
            run.parameters.mean(0, keepdim=True), run.statistics.mean(0, keepdim=True), mean[None]
        )

    torch.cuda.reset_peak_memory_stats()
    for _ in range(6):  # then the scales are settled, and all steps captured
        round_()
    torch.cuda.synchronize()
    prepare_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(args.rounds):
        round_()
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    if args.profile:
        write_profile(args.profile / f"{name}-{strategy}-{precision}.txt", round_, args.steps)
    device_steps = args.rounds * args.steps * args.devices
    return {
        "strategy": strategy,
        "precision": precision,
        "ms_per_device_step": 1e3 * taken / device_steps,
        "device_steps_per_s": device_steps / taken,
        "prepare_s": prepare_s,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "loss": run.losses.mean().item(),
    }


def write_profile(path: Path, round_: Callable[[], None], steps: int) -> None:
    """What the GPU does in a step, by kernel: microseconds, launches, and how long it is busy."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        round_()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda k: k.self_device_time_total, reverse=True)
    total = sum(k.self_device_time_total for k in kernels)
    lines = [
        f"{total / steps:10.1f} us a step in {sum(k.count for k in kernels) / steps:.0f} kernels"
    ]
    lines += [
        f"{k.self_device_time_total / steps:10.1f} {k.count / steps:7.1f}  {k.key[:110]}"
        for k in kernels
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ["mobilenet", "resnet18", "densenet40", "transformer"]
    parser.add_argument("--models", nargs="+", default=names, choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=["cocofl", "fedavg"])
    parser.add_argument("--precisions", nargs="+", default=["tf32"], choices=PRECISIONS)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/cohort.py compares ways to use a GPU, and there is none here")
    device = torch.device("cuda")
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "devices": args.devices,
        "batch": args.batch,
        "steps": args.steps,
        "models": {},
    }
    for name in args.models:
        found: dict[str, Any] = serial(name, args.batch, device) | {"cohort": []}
        report["models"][name] = found
        print(f"{name}: eager {found['eager_ms']:.2f} ms, graph {found['graph_ms']:.2f} ms")
        for strategy in args.strategies:
            for precision in args.precisions:
                row = cohort(name, strategy, precision, args, device)
                row["times_eager"] = found["eager_ms"] / row["ms_per_device_step"]
                found["cohort"].append(row)
                print(
                    f"  {strategy} {precision}: {row['ms_per_device_step']:.3f} ms a device-step, "
                    f"{row['times_eager']:.1f} x eager, prepared in {row['prepare_s']:.1f} s, "
                    f"{row['peak_gb']:.1f} GB, loss {row['loss']:.3f}",
                    flush=True,
                )
                torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
