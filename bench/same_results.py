"""Plays every strategy and option for a few rounds and prints a hash of each result.

Two versions that compute the same print the same lines:

    python bench/same_results.py > after.txt
    PYTHONPATH=/path/to/other/src python bench/same_results.py > before.txt
    diff before.txt after.txt

A line has the name of a run, and the SHA-256 (16 digits) of its metrics and of its model. Kernels
are fixed, since ``auto`` chooses by measuring. ``--only WORD`` plays the runs whose name has it.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

from cocofl.config import Experiment
from cocofl.experiment import simulate
from cocofl.runlog import METRICS, MODEL

SMALL: dict[str, Any] = {
    "rounds": 4,
    "devices.count": 12,
    "devices.per_round": 6,
    "evaluation.every": 2,
    "engine.kind": "serial",
    "engine.kernels": "reference",
    "engine.checkpoint_every": 1,
}
COHORT = {"engine.kind": "cohort", "engine.device": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "cocofl": {},
    "cocofl-f": {"strategy.variant": "f"},
    "cocofl-ff": {"strategy.variant": "ff"},
    "cocofl-costs": {"strategy.variant": "qff", "strategy.costs": "f"},
    "cocofl-max": {"strategy.selector": "max"},
    "cocofl-min-all": {"strategy.selector": "min", "strategy.over": "all"},
    "cocofl-round-robin": {"strategy.selector": "round-robin"},
    "heterofl": {"strategy.name": "heterofl"},
    "heterofl-scaler": {"strategy.name": "heterofl", "strategy.scaler": True},
    "heterofl-masked": {"strategy.name": "heterofl", "strategy.masked": True},
    "fjord": {"strategy.name": "fjord"},
    "fjord-distillation": {"strategy.name": "fjord", "strategy.distillation": 0.5},
    "fedavg": {"strategy.name": "fedavg"},
    "fedavg-full": {"strategy.name": "fedavg-full"},
    "centralized": {"strategy.name": "centralized", "rounds": 20},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "onednn": {"engine.kernels": "onednn"},
    "faults": {"faults.jitter": 0.2, "faults.dropout": 0.2},
    "adam-clip": {"training.optimizer": "adam", "training.lr": 0.002, "training.clip": 1.0},
    "momentum-decay": {"training.momentum": 0.9, "training.decay_rounds": [2]},
    "batch-statistics": {"evaluation.statistics": "batch", "strategy.name": "heterofl"},
    "iid-limited": {"data.split": "iid", "devices.groups": "limited:0.5"},
    "dirichlet-drop": {
        "data.split": "dirichlet",
        "data.equal": False,
        "training.last_batch": "drop",
    },
}


def runs() -> dict[str, dict[str, Any]]:
    """By name, what a run changes of the small one."""
    found = {f"serial/{name}": changes for name, changes in STRATEGIES.items()}
    found |= {f"serial/{name}": changes for name, changes in SETTINGS.items()}
    alone = ("centralized", "onednn")
    for name, changes in (STRATEGIES | SETTINGS).items():
        if name not in alone:
            found[f"cohort/{name}"] = changes | COHORT
    return found


class _Interrupted(Exception):
    pass


class _Interrupt:
    """Breaks a run off after its second round."""

    def on_round(self, record: Any) -> None:
        number = record["round"] if isinstance(record, dict) else record.round
        if number == 2:
            raise _Interrupted

    def on_end(self) -> None:
        pass


def digest(path: Path) -> str:
    """Of a run folder: its metrics, and the values of its model, whatever the file says of them."""
    model = (path / MODEL).read_bytes()
    values = model[8 + int.from_bytes(model[:8], "little") :]
    parts = [hashlib.sha256(content) for content in ((path / METRICS).read_bytes(), values)]
    return " ".join(part.hexdigest()[:16] for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    wanted = parser.parse_args().only
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in runs().items():
            if wanted not in name:
                continue
            experiment = Experiment().changed(SMALL | changes)
            path = Path(folder) / name
            try:
                simulate(experiment, out=path)
            except Exception as error:  # the others can still be compared
                print(f"{name:32} failed: {error}", flush=True)
                continue
            print(f"{name:32} {digest(path)}", flush=True)
            if name.split("/")[1] in ("cocofl", "fjord", "heterofl"):
                path = Path(folder) / f"{name}-resumed"
                try:
                    simulate(experiment, out=path, watchers=[_Interrupt()])
                except _Interrupted:
                    simulate(experiment, out=path, resume=True)
                print(f"{name + '-resumed':32} {digest(path)}", flush=True)


if __name__ == "__main__":
    main()
