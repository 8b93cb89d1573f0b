"""Methods by width and without a deadline, each beside what its paper compares it with.

    python bench/widths.py rolex|pace|distreal|distreal-iid OUT [SEED ...]

prints what accuracy became, over rounds or over simulated time in deadlines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cocofl import Experiment, simulate

SLOW = [{"name": "fast", "time": 1.0, "share": 2.0}, {"name": "slow", "time": 0.2, "share": 1.0}]
SHORT_OF_TIME = [
    {"name": "strong", "share": 0.1},
    {"name": "limited", "share": 0.9, "time": 0.25},
]
STUDIES: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "rolex": (
        {"data.split": "iid", "devices.groups": "limited:0.25"},
        [("heterofl", 300), ("fedrolex", 300)],
    ),
    # As many updates of each; FedAvg without limits takes the time of the slowest, here 5.
    "pace": (
        {"data.split": "rc", "devices.groups": SLOW},
        [("fedavg", 60), ("fedavg-full", 60), ("fedbuff", 60), ("fedasync", 600)],
    ),
    "distreal": (
        {"data.split": "rc", "devices.groups": SHORT_OF_TIME},
        [("fedavg", 60), ("heterofl", 60), ("distreal", 60)],
    ),
    "distreal-iid": (
        {"data.split": "iid", "devices.groups": SHORT_OF_TIME},
        [("fedavg", 120), ("heterofl", 120), ("distreal", 120)],
    ),
}


def main(study: str, out: str, *seeds: str) -> None:
    """One line per run."""
    settings, strategies = STUDIES[study]
    for seed in map(int, seeds or ("0", "1", "2")):
        for strategy, rounds in strategies:
            own: dict[str, Any] = {"seed": seed, "rounds": rounds, "evaluation.every": rounds // 12}
            own |= {"strategy.name": strategy, "engine.workers": 1}
            experiment = Experiment().changed(settings | own)
            run = simulate(experiment, out=Path(out) / f"{strategy}{seed}")
            clock, line = 0.0, []
            for record in run.rounds:
                clock += record.simulated_s
                if record.scores:
                    line.append(f"{clock:.1f} s {record.scores['accuracy']:.3f}")
            print(seed, strategy, ", ".join(line), run.final.scores["group_accuracy"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
