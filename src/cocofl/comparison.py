"""Several strategies and seeds side by side, each with a learning rate chosen in the same way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cocofl.config import Experiment
from cocofl.data.rules import check_rule
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Run, make_executor, rounds_of, simulate, simulate_together
from cocofl.fl.strategies import STRATEGIES
from cocofl.named import lookup

# A seed that no comparison reports: what was chosen on it was not seen before.
TUNING_SEED = 1_000_003


@dataclass(frozen=True)
class Row:
    """A strategy on a split: mean and standard deviation over seeds."""

    split: str
    strategy: str
    lr: float
    accuracy: tuple[float, float]
    groups: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Comparison:
    """What came out."""

    path: Path
    rows: tuple[Row, ...]
    seeds: int
    lr_grid: tuple[float, ...]
    tables: dict[str, str]

    @property
    def splits(self) -> list[str]:
        """In the order in which they were run."""
        return list(dict.fromkeys(row.split for row in self.rows))

    @property
    def groups(self) -> list[str]:
        """The device groups."""
        return list(self.rows[0].groups)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "path": str(self.path)}


def compare(
    experiment: Experiment,
    *,
    strategies: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    splits: Sequence[str] | None = None,
    lr_grid: Sequence[float] | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    watchers: Sequence[Watcher] = (),
    announce: Callable[[str, int], None] = lambda _name, _rounds: None,
) -> Comparison:
    """Run every strategy with every seed on every split; runs go to folders below ``out``.

    With an ``lr_grid`` each strategy first runs once per learning rate on each split, two thirds
    of the rounds and with a seed of its own, and keeps the best; without one all use the
    experiment's.
    """
    _check(experiment, strategies, splits or [], lr_grid or [])
    own = executor or make_executor(experiment)

    def play(one: Experiment, path: Path) -> Run:
        announce(f"{path.relative_to(out)}", rounds_of(one))
        return simulate(one, out=path, resume=resume, executor=own, watchers=watchers)

    def play_seeds(base: Experiment, folder: Path) -> list[Run]:
        if not isinstance(own, CohortExecutor):
            return [play(base.changed({"seed": s}), folder / f"seed{s}") for s in seeds]
        announce(f"{folder.relative_to(out)}, all seeds", rounds_of(base))
        several = {folder / f"seed{seed}": base.changed({"seed": seed}) for seed in seeds}
        return simulate_together(several, resume=resume, executor=own, watchers=watchers)

    def best_rate(base: Experiment, folder: Path) -> float:
        shorter = base.changed({"seed": TUNING_SEED, "rounds": max(1, base.rounds * 2 // 3)})
        tried = {
            rate: play(shorter.changed({"training.lr": rate}), folder / f"lr{rate:g}").final[
                "accuracy"
            ]
            for rate in lr_grid or ()
        }
        return max(tried, key=lambda rate: tried[rate]) if tried else base.training.lr

    rows: list[Row] = []
    tables: dict[str, str] = {}
    try:
        for split in splits or [experiment.data.split]:
            for strategy in strategies:
                name = strategy.replace(":", ".")
                ours = strategy == experiment.strategy.name
                options = experiment.strategy.options if ours else {}
                base = experiment.changed({"data.split": split}).with_strategy(strategy, **options)
                lr = best_rate(base, out / split / "tuning" / name)
                runs = play_seeds(base.changed({"training.lr": lr}), out / split / name)
                rows.append(_row(split, strategy, lr, runs))
                tables[strategy] = "; ".join(runs[0].folder.about["tables"].values())
    finally:
        if executor is None:
            own.close()
    return Comparison(out, tuple(rows), len(seeds), tuple(lr_grid or ()), tables)


def _check(
    experiment: Experiment,
    strategies: Sequence[str],
    splits: Sequence[str],
    lr_grid: Sequence[float],
) -> None:
    """Find now what would be found after hours, when its turn comes."""
    if not strategies:
        raise InvalidExperiment("no strategy to compare; name some, like cocofl,fedavg")
    for strategy in strategies:
        lookup(strategy, STRATEGIES, "strategy", InvalidExperiment)
    for split in splits:
        check_rule(split)
    for rate in lr_grid:
        experiment.changed({"training.lr": rate})


def _row(split: str, strategy: str, lr: float, runs: Sequence[Run]) -> Row:
    finals = [run.final for run in runs]
    groups = {
        group: _mean_std([final["group_accuracy"][group] for final in finals])
        for group in finals[0]["group_accuracy"]
    }
    return Row(split, strategy, lr, _mean_std([f["accuracy"] for f in finals]), groups)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
