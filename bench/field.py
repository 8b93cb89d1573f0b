"""What other methods claim, at a size for two CPU cores: each beside what it claims to beat.

python bench/field.py [CLAIM ...] [--runs LABEL,...] [--rounds 40] [--seeds 3]

Digits, 30 devices of which 10 are asked, a tiny network, mini-batches of 8 samples; norm
statistics of the test batch. Budgets are fractions of an analytic table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cocofl import Experiment, Run, simulate
from cocofl.engine.executor import InProcess

BASE: dict[str, Any] = {
    "devices.count": 30,
    "devices.per_round": 10,
    "model.options": {"tiny": True},
    "training.batch": 8,
    "evaluation.statistics": "batch",
    "tables.spans": "analytic",
    "tables.widths": "analytic",
    "engine.kernels": "reference",
}
STRONG = [{"name": "strong"}]
SLOW = [{"name": "fast", "share": 0.1, "time": 1.0}, {"name": "slow", "share": 0.9, "time": 0.4}]
UNEQUAL_TIME = [{"name": "a"}, {"name": "b", "time": 0.85}, {"name": "c", "time": 0.7}]
STRAGGLERS = [{"name": "fast", "share": 0.3}, {"name": "slow", "share": 0.7, "time": 0.4}]
HURRIED = [{"name": "hurried", "time": 0.7}]


class Claim(NamedTuple):
    """What a method's paper says of it, and the runs that show whether it is so here."""

    says: str
    settings: dict[str, Any]
    runs: dict[str, dict[str, Any]]
    """By label, what each run sets."""


CLAIMS = {
    "fedprox": Claim(
        "partial work of slow devices is worth more than dropping them",
        {"devices.groups": SLOW, "data.split": "rc"},
        {"fedprox": {}, "fedprox mu=0": {"strategy.mu": 0.0}, "fedavg": {}, "fedavg-full": {}},
    ),
    "unequal": Claim(
        "one small network, blocks at the output and shallow networks with exits beat narrow ones",
        {"devices.groups": "paper", "data.split": "rc"},
        {"small": {}, "embracing": {}, "depthfl": {}, "pvt": {}, "cocofl": {}}
        | {"depthfl alone": {"strategy.distillation": 0.0}}
        | {"heterofl": {}, "fjord": {}, "fedavg": {}},
    ),
    "depthfl": Claim(
        "where only time is short: shallow networks with exits beat leaving the weak out",
        {"devices.groups": UNEQUAL_TIME, "data.split": "rc"},
        {"depthfl": {}, "depthfl alone": {"strategy.distillation": 0.0}, "heterofl": {}}
        | {"fedavg": {}},
    ),
    "inclusivefl": Claim(
        "where only time is short: shallow networks for the weak beat leaving them out",
        {"devices.groups": UNEQUAL_TIME, "data.split": "iid"},
        {"inclusivefl": {}, "inclusivefl alone": {"strategy.momentum": 0.0}, "depthfl": {}}
        | {"fedavg": {}, "heterofl": {}},
    ),
    "helios": Claim(
        "neurons in turn beat leaving out the slow, and the same neurons in every round",
        {"devices.groups": STRAGGLERS, "data.split": "iid"},
        {"helios": {}, "fedavg": {}, "heterofl": {}, "fedrolex": {}, "distreal": {}},
    ),
    "fedavgm": Claim(
        "under strong label skew, a server with momentum beats one without",
        {"devices.groups": STRONG, "data.split": "dirichlet", "data.alpha": 0.1},
        {"fedavg-full": {}, "fedavg-full momentum": {"server.optimizer": "fedavgm"}}
        | {"fedavg-full adam": {"server.optimizer": "fedadam"}}
        | {"fedavg-full yogi": {"server.optimizer": "fedyogi"}}
        | {"fedavg-full calibrated": {"training.calibration": 1.0}},
    ),
    "fedpart": Claim(
        "one block at a time is better than everything, with a part of the upload",
        {"devices.groups": STRONG, "data.split": "iid"},
        {"fedpart": {}, "fedpart only blocks": {"strategy.warmup": 0, "strategy.between": 0}}
        | {"fedavg-full": {}},
    ),
    "slt": Claim(
        "where nobody can train all of it, growing block by block beats narrow networks",
        {"devices.groups": [{"name": "weak", "memory": 0.6}], "data.split": "iid"},
        {"slt": {"strategy.each": 8}, "small": {}, "heterofl": {}, "embracing": {}, "cocofl": {}},
    ),
    "pvt": Claim(
        "a part of the network, drawn at random, is hardly worse than all of it",
        {"devices.groups": [{"name": "half", "upload": 0.5}], "data.split": "iid"},
        {"pvt": {}, "embracing": {}, "fedavg-full": {}},
    ),
    "layerout": Claim(
        "freezing at random per mini-batch costs no accuracy, and saves time",
        {"devices.groups": HURRIED, "data.split": "iid"},
        {"layerout": {}, "fedprox": {}, "fedavg-full": {}},
    ),
    "codecs": Claim(
        "updates can be sent in a fraction of their bytes for the same accuracy",
        {"devices.groups": STRONG, "data.split": "iid"},
        {"fedavg-full": {}, "fedavg-full float16": {"upload.codec": "float16"}}
        | {"fedavg-full int8": {"upload.codec": "int8"}}
        | {"fedavg-full topk 0.1": {"upload.codec": "topk", "upload.fraction": 0.1}}
        | {"fedavg-full topk 0.01": {"upload.codec": "topk", "upload.fraction": 0.01}},
    ),
    "apf": Claim(
        "what is stable need not be sent: the same accuracy, less upload",
        {"devices.groups": STRONG, "data.split": "iid"},
        {"apf": {}, "apf threshold=0.2": {"strategy.threshold": 0.2}, "fedavg": {}},
    ),
}


def played(settings: dict[str, Any], folder: Path) -> Run:
    executor = InProcess()
    try:
        return simulate(Experiment().changed(BASE | settings), out=folder, executor=executor)
    finally:
        executor.close()


def spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("claims", nargs="*", choices=[[], *CLAIMS], default=[])
    parser.add_argument("--runs", default="", help="only these, separated by commas")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.claims or CLAIMS:
        says, settings, runs = CLAIMS[name]
        print(f"\n{name}: {says}\n\n| | accuracy (%) | weakest group | upload (MB) | merged |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for label, own in runs.items():
            if asked.runs and label not in asked.runs.split(","):
                continue
            found = []
            for seed in range(asked.seeds):
                common = {"rounds": asked.rounds, "evaluation.every": asked.rounds, "seed": seed}
                chosen = settings | common | {"strategy.name": label.partition(" ")[0]} | own
                with tempfile.TemporaryDirectory() as folder:
                    found.append(played(chosen, Path(folder) / "run"))
                    found[-1].final  # noqa: B018 - read before the folder is gone
                    found[-1].fates  # noqa: B018
            scores = [run.final.scores for run in found]
            accuracy = spread([100 * one["accuracy"] for one in scores])
            weakest = spread([100 * min(one["group_accuracy"].values()) for one in scores])
            upload = spread([sum(r.bytes_up for r in run.rounds) / 1e6 for run in found])
            merged = spread([float(run.fates["merged"]) for run in found])
            print(f"| {label} | {accuracy} | {weakest} | {upload} | {merged} |", flush=True)


if __name__ == "__main__":
    main()
