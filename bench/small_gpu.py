"""MobileNet with ten devices on a GPU of 16 GiB, or 4: a larger one that is told to keep below.

    python bench/small_gpu.py                                   # on a GPU
    python bench/small_gpu.py --gib 24 --precisions bf16 --rounds 30

PyTorch's allocator refuses what goes beyond. What it does not count (CUDA's context, compiled
kernels) is taken off before, and ``in all`` says what the process really held. The rounds are those
of experiments/paper/mobilenet-cifar10-iid.toml, by the cohort engine, on made-up images: devices,
spans and mini-batches as in that experiment, nothing tested. ``ms`` is the median of the last
rounds, over all steps of all devices.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from cocofl.config import Experiment
from cocofl.data import DataSet, Facts, Samples
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.rounds import RunInProgress, play_round
from cocofl.experiment import Setup
from cocofl.freeze import KernelPlan
from cocofl.rng import stream
from cocofl.runlog import RunFolder
from cocofl.vector import PRECISIONS, SmallerCohort

FILE = Path("experiments/paper/mobilenet-cifar10-iid.toml")
GIB = 2**30
OUTSIDE = 1.0 * GIB
"""What a process holds beside the allocator; seen: about 0.9 GiB."""


def made_up_images(samples: int = 50_000) -> DataSet:
    """As many images as CIFAR-10 has, and as large, of noise."""
    classes = tuple(map(str, range(10)))
    facts = Facts("image", classes, (0.5,) * 3, (0.25,) * 3, channels=3)
    splits = []
    for count in (samples, 1000):
        rng = stream(count, "bench.made_up_images")
        images = rng.integers(256, size=(count, 32, 32, 3), dtype="uint8")
        labels = rng.integers(len(classes), size=count)
        splits.append(Samples(Path("noise"), facts, images, labels, None, b""))
    return DataSet("cifar10", *splits)


def play(experiment: Experiment, data: DataSet, gib: float, rounds: int) -> dict[str, Any]:
    """Some rounds within so much memory."""
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gib * GIB - OUTSIDE) / total))
    torch.cuda.reset_peak_memory_stats()
    executor = CohortExecutor("cuda", precision=experiment.engine.precision)
    job, spent = Setup(experiment, data).job(), []
    assert job.federation is not None
    most_in_all = 0
    with tempfile.TemporaryDirectory() as folder:
        run = RunInProgress(job, RunFolder.create(Path(folder) / "run", experiment.to_toml()))
        executor.prepare(job.trainer, KernelPlan())
        run.state = executor.placed(run.state)
        for _ in range(rounds):
            steps = sum(
                job.training.steps(len(job.federation.partition[one.device]))
                for one in run.pace.turn(run.next_round).begin
                if one.fate == "merged"
            )
            begin = time.perf_counter()
            play_round([run], executor)
            torch.cuda.synchronize()
            spent.append(1e3 * (time.perf_counter() - begin) / steps)
            free, _ = torch.cuda.mem_get_info()
            most_in_all = max(most_in_all, total - free)
        loss = run.folder.rounds()[-1].loss
    found = {
        "gib": gib,
        "precision": experiment.engine.precision,
        "devices_at_once": executor.devices_at_once,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "in_all_gib": most_in_all / GIB,
        "ms_per_device_step": statistics.median(spent[len(spent) // 2 :]),
        "loss": loss,
    }
    executor.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[16.0, 4.0])
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"], choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/small_gpu.py makes a GPU smaller, and there is none here")
    warnings.simplefilter("ignore")  # tables of other machines
    warnings.simplefilter("always", SmallerCohort)
    base = Experiment.load(FILE).changed(
        {
            "devices.per_round": asked.devices,
            "evaluation.every": 10**6,
            "engine.checkpoint_every": 10**6,
            "engine.kind": "cohort",
        }
    )
    data, found = made_up_images(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for gib in asked.gib:
        for precision in asked.precisions:
            experiment = base.changed({"engine.precision": precision})
            row = {"gib": gib, "precision": precision}
            try:
                row |= play(experiment, data, gib, asked.rounds)
                print(
                    f"{gib:g} GiB, {precision}: {row['devices_at_once']} of {asked.devices} "
                    f"devices at once, {row['ms_per_device_step']:.3f} ms a device-step; "
                    f"{row['allocated_gib']:.2f} GiB allocated, {row['reserved_gib']:.2f} "
                    f"reserved, {row['in_all_gib']:.2f} in all"
                    f"{'' if row['in_all_gib'] <= gib else ' (MORE THAN IT HAS)'}, "
                    f"loss {row['loss']}",
                    flush=True,
                )
            except torch.OutOfMemoryError as error:
                row["failed"] = str(error).splitlines()[0]
                print(f"{gib:g} GiB, {precision}: DOES NOT FIT: {row['failed']}", flush=True)
            found.append(row)
            if asked.out:
                told = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
                asked.out.write_text(json.dumps(told | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
