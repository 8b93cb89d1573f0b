"""What it does to accuracy that devices measure unknown scales once, and not in every mini-batch.

    python bench/calibration.py OUT [--experiments FILE ...] [--splits NAME ...] [--seeds 0 1 2]

Plays the league's rows of ``cocofl`` twice, with the same devices, spans, mini-batches and
kernels: as a simulation does it, where a scale that nobody has sent is computed on the fly in every
mini-batch, and as a device in the field does it, where ``freeze`` measures it in the first.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np

from cocofl import Experiment, simulate
from cocofl.fl.strategies import facts_of
from cocofl.fl.strategies.cocofl import cocofl
from cocofl.strategies import (
    Contribution,
    Plan,
    ServerState,
    Situation,
    SpanWork,
    Strategy,
    Tables,
    Task,
    Trainer,
    declares,
)
from league import FILES, RATES, SEEDS, SPLITS

SIDES = {"on the fly": "cocofl", "calibrated": "calibration:calibrating"}


@dataclass(frozen=True)
class CalibratingWork(SpanWork):
    """A span, trained as a device in the field does it."""

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training."""
        trainer.calibrates = True
        return super().train(trainer, task, state)


@declares(facts_of("cocofl"))
def calibrating(tables: Tables) -> Strategy:
    """``cocofl`` by its defaults, with devices that calibrate."""
    plain = cocofl(tables)

    def plan(situation: Situation) -> Plan | None:
        found = plain.plan(situation)
        if found is None:
            return None
        assert isinstance(found.work, SpanWork)
        work = CalibratingWork(**{f.name: getattr(found.work, f.name) for f in fields(SpanWork)})
        return Plan(work, found.time)

    return Strategy(plan, plain.merge, integers=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--experiments", type=Path, nargs="+", default=FILES)
    parser.add_argument("--splits", nargs="+", default=SPLITS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    asked = parser.parse_args()
    print(f"| | | lr | {' | '.join(SIDES)} | difference by seed |")
    print("| --- " * 6 + "|")
    for file, split, rate in product(asked.experiments, asked.splits, asked.rates):
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        for seed, (side, strategy) in product(asked.seeds, SIDES.items()):
            experiment = Experiment.load(file).changed(
                {
                    "strategy.name": strategy,
                    "data.split": split,
                    "training.lr": rate,
                    "seed": seed,
                    "engine.kernels": "onednn",
                }
            )
            out = asked.out / f"{file.stem}-{split}-{rate}-{seed}-{side.replace(' ', '-')}"
            run = simulate(experiment, out=out, resume=out.exists())
            found[side].append(100 * run.final.scores["accuracy"])
        cells = (f"{np.mean(one):.1f} ± {np.std(one, ddof=1):.1f}" for one in found.values())
        apart = np.subtract(found["calibrated"], found["on the fly"])
        print(
            f"| {file.stem} | {split} | {rate} | {' | '.join(cells)} "
            f"| {', '.join(f'{one:+.1f}' for one in apart)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
