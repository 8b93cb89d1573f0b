"""How fast the simulation is: FedAvg rounds next to a bare PyTorch loop, interleaved in one run.

    python bench/simulate.py            # W1: a small CNN, 100 devices × 100 images, 10 per round
    python bench/simulate.py W2         # MobileNetV2, 10 devices × 96 images
    python bench/simulate.py scale      # W1 with 100 and with 100 000 devices

The bare loop trains the same devices on the same images, one after the other, with two threads
and channels last, and averages the weights. It runs in a process with the same malloc settings as
our workers (``--plain-malloc`` runs it without), so that the ratio is about the engine.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from cocofl.allocator import keep_freed_memory
from cocofl.data import Partition, load
from cocofl.engine.executor import InProcess
from cocofl.engine.rounds import Job, RunInProgress, play_round
from cocofl.engine.workers import Workers
from cocofl.fl.devices import Group, make_devices
from cocofl.fl.federation import Faults, Federation
from cocofl.fl.merge import Mean
from cocofl.fl.metrics import Evaluation
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy
from cocofl.fl.trainer import Trainer, TrainerSpec
from cocofl.fl.training import Training
from cocofl.freeze import KernelPlan, chain_state
from cocofl.models import MODELS
from cocofl.profiling.subject import Subject
from cocofl.runlog import RunFolder
from cocofl.span import Span

WORKLOADS = {
    # model, devices, per round, images per device, most that may be needed of the bare loop's time
    "W1": ("cnn", 100, 10, 100, 0.68),
    "W2": ("mobilenet", 10, 10, 96, 0.92),
}
IMAGES = 10_000


def random_images(_folder: Path | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Noise in the shape of CIFAR-10: what a step costs does not depend on the pixels."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(IMAGES) % 10
    return {"train": (images, labels), "test": (images[:1000], labels[:1000])}


def make_job(model: str, n_devices: int, per_round: int, n_images: int) -> Job:
    data = load("simulate:random_images")
    training = Training(weight_decay=0.001)
    spec = TrainerSpec(Subject(model, 32, 10), training, data.train, data.test)
    trainer = Trainer(spec)
    chain = trainer.chain()
    work = SpanWork(Span(0, len(chain)), "f")
    rng = np.random.default_rng(1)
    indices = rng.integers(0, IMAGES, n_devices * n_images)
    offsets = np.arange(n_devices + 1) * n_images
    devices = make_devices(n_devices, [Group("all")], seed=0)
    partition = Partition(indices, offsets, indices[:0])
    return Job(
        strategy=Strategy(lambda _: Plan(work, 1.0), Mean("everyone")),
        federation=Federation(devices, partition, training, per_round, seed=0),
        trainer=trainer,
        initial=trainer.server_state(chain_state(chain)),
        rounds=10**9,
        seed=0,
        training=training,
        faults=Faults(),
        evaluation=Evaluation(every=10**9),
        populations=None,
        deadline_s=1.0,
        checkpoint_every=10**9,
    )


def our_round(job: Job, workers: Any) -> Callable[[], float]:
    workers.prepare(job.trainer, KernelPlan())
    run = RunInProgress(job, RunFolder.create(Path(tempfile.mkdtemp()) / "run", ""))

    def play() -> float:
        begin = time.perf_counter()
        play_round([run], workers)
        return time.perf_counter() - begin

    return play


def bare_loop(model_name: str, per_round: int, n_images: int, threads: int) -> float:
    """One round of FedAvg, as one would write it without any framework."""
    torch.set_num_threads(threads)
    if "model" not in _BARE:
        torch.manual_seed(0)
        model = MODELS[model_name](10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(per_round * n_images, 3, 32, 32)
        _BARE.update(
            model=model,
            images=images.contiguous(memory_format=torch.channels_last),
            labels=torch.arange(per_round * n_images) % 10,
            state={key: t.clone() for key, t in model.state_dict().items()},
        )
    model, state = _BARE["model"], _BARE["state"]
    begin = time.perf_counter()
    total = {key: torch.zeros_like(t) for key, t in state.items() if t.is_floating_point()}
    for device in range(per_round):
        model.load_state_dict(state)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.001)
        own = torch.arange(device * n_images, (device + 1) * n_images)
        for batch in own[torch.randperm(n_images)].split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(_BARE["images"][batch]), _BARE["labels"][batch]).backward()
            optimizer.step()
        for key, tensor in model.state_dict().items():
            if key in total:
                total[key] += tensor / per_round
    state.update(total)
    return time.perf_counter() - begin


_BARE: dict[str, Any] = {}


class BareProcess:
    """The bare loop in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", f"{theirs_in},{theirs_out}", *arguments],
            pass_fds=(theirs_in, theirs_out),
        )
        self._out = Connection(ours_out, readable=False)
        self._in = Connection(ours_in, writable=False)

    def __call__(self, threads: int) -> float:
        self._out.send(threads)
        seconds: float = self._in.recv()
        return seconds

    def close(self) -> None:
        self._out.close()
        self._process.wait()


def serve(fds: str, workload: str) -> None:
    reading, writing = map(int, fds.split(","))
    requests, replies = Connection(reading, writable=False), Connection(writing, readable=False)
    model, _, per_round, n_images, _ = WORKLOADS[workload]
    while True:
        try:
            threads = requests.recv()
        except EOFError:
            return
        replies.send(bare_loop(model, per_round, n_images, threads))


def children_mb() -> float:
    """Resident memory of this process and its children now."""
    pids = [os.getpid()]
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            status = (pid / "status").read_text()
        except OSError:
            continue
        if f"PPid:\t{os.getpid()}\n" in status and "--serve" not in (pid / "cmdline").read_text():
            pids.append(int(pid.name))
    pages = (
        int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )
    return sum(pages) / 1024


def against_bare_loop(workload: str, rounds: int, plain_malloc: bool) -> None:
    model, n_devices, per_round, n_images, limit = WORKLOADS[workload]
    bare = BareProcess([workload, *(["--plain-malloc"] if plain_malloc else [])])
    workers = Workers(2)
    try:
        play = our_round(make_job(model, n_devices, per_round, n_images), workers)
        times: dict[str, list[float]] = {"ours": [], "bare 2 threads": [], "bare 1 thread": []}
        for index in range(rounds + 1):
            found = {"ours": play(), "bare 2 threads": bare(2), "bare 1 thread": bare(1)}
            if index:  # the first round warms up
                for name, seconds in found.items():
                    times[name].append(seconds)
        memory_mb = children_mb()
    finally:
        workers.close()
        bare.close()
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(f"{workload}: {model}, {per_round} of {n_devices} devices, {n_images} images each")
    for name, seconds in medians.items():
        spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
        print(f"  {name:<16} {seconds:7.3f} s a round   ({spread}, {rounds} rounds)")
    ratio = statistics.median(
        a / b for a, b in zip(times["ours"], times["bare 2 threads"], strict=True)
    )
    print(f"  ours / bare 2 threads: {ratio:.3f}   (required: at most {limit})")
    print(f"  memory of all processes: {memory_mb:.0f} MB   (W1: at most 1000)")


def scale(rounds: int) -> None:
    workers = InProcess()
    plays, sizes = {}, {}
    for n_devices in (100, 100_000):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        job = make_job("cnn", n_devices, 10, 100)
        plays[n_devices] = our_round(job, workers)
        plays[n_devices]()
        sizes[n_devices] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    times: dict[int, list[float]] = {n: [] for n in plays}
    for _ in range(rounds):
        for n_devices, play in plays.items():
            times[n_devices].append(play())
    workers.close()
    ratio = statistics.median(b / a for a, b in zip(times[100], times[100_000], strict=True))
    for n_devices, found in times.items():
        print(f"  {n_devices:>7} devices: {statistics.median(found):.3f} s a round, "
              f"{sizes[n_devices]:+.0f} MB")  # fmt: skip
    print(f"  ratio {ratio:.3f} (required: below 1.10, and below 200 MB more)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", nargs="?", default="W1", choices=["W1", "W2", "scale"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain-malloc", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if args.serve:
        if not args.plain_malloc:
            keep_freed_memory()
        serve(args.serve, args.workload)
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ["COCOFL_CACHE"] = cache
        if args.workload == "scale":
            scale(args.rounds)
        else:
            against_bare_loop(args.workload, args.rounds, args.plain_malloc)


if __name__ == "__main__":
    main()
