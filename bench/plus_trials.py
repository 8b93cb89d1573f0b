"""What could make ``cocofl+`` better under ``rc``, tried at the league's size before on a GPU.

    python bench/plus_trials.py OUT [--rounds 60] [--seeds 0 1 2 3 4 5] [--experiments FILE ...]

One change at a time against the plain run with the same devices, data and kernels. Printed is the
mean over seeds, of all and of the weak group, and the mean of the differences seed by seed with its
standard error. Learning rates decay after 60 and 80 % of the rounds, as in the paper.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from cocofl import Experiment, simulate
from league import FILES

MOMENTUM: dict[str, Any] = {"server.optimizer": "fedavgm", "server.momentum": 0.5}
TRIALS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum 0.5": MOMENTUM,
    "momentum 0.5, half the step": MOMENTUM | {"server.lr": 0.5},
    "momentum 0.7, half the step": MOMENTUM | {"server.momentum": 0.7, "server.lr": 0.5},
    "coverage": {"strategy.selector": "coverage"},
    "proportional": {"strategy.selector": "proportional"},
    "momentum 0.5, coverage": MOMENTUM | {"strategy.selector": "coverage"},
    "momentum 0.5, proportional": MOMENTUM | {"strategy.selector": "proportional"},
    "half the learning rate": {"training.lr": 0.2},
    "half the learning rate, momentum 0.5": MOMENTUM | {"training.lr": 0.2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--experiments", type=Path, nargs="+", default=FILES)
    asked = parser.parse_args()
    own: dict[str, Any] = {
        "strategy.name": "cocofl+",
        "data.split": "rc",
        "training.lr": 0.4,
        "training.decay_rounds": [6 * asked.rounds // 10, 8 * asked.rounds // 10],
        "rounds": asked.rounds,
        "evaluation.every": asked.rounds,
        "engine.kernels": "onednn",
    }
    print("| | data | accuracy (%) | beside plain | weak group | beside plain |")
    print("| --- | --- | --- | --- | --- | --- |")
    plain: dict[str, np.ndarray] = {}
    for name, changes in TRIALS.items():
        for file in asked.experiments:
            found: list[list[float]] = []
            for seed in asked.seeds:
                experiment = Experiment.load(file).changed({**own, "seed": seed, **changes})
                run = simulate(experiment, out=asked.out / name / file.stem / f"seed{seed}")
                scores = run.final.scores
                found.append([scores["accuracy"], scores["group_accuracy"]["weak"]])
            each: np.ndarray = 100 * np.array(found)
            apart = each - plain.setdefault(file.stem, each)
            errors = apart.std(axis=0, ddof=1) / len(each) ** 0.5
            cells = [
                f"{mean:.1f} | {difference:+.1f} ± {error:.1f}"
                for mean, difference, error in zip(
                    each.mean(axis=0), apart.mean(axis=0), errors, strict=True
                )
            ]
            print(f"| {name} | {file.stem} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
