"""Several strategies and seeds side by side, each with a learning rate chosen in the same way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cocofl.config import Experiment
from cocofl.data.partition import check_rule
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Run, in_short, make_executor, simulate_batch
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

    def play(experiments: Mapping[Path, Experiment]) -> dict[Path, Run]:
        def say(paths: Sequence[Path], rounds: int) -> None:
            announce(in_short([str(path.relative_to(out)) for path in paths]), rounds)

        runs = simulate_batch(
            experiments, resume=resume, executor=own, watchers=watchers, announce=say
        )
        return {run.path: run for run in runs}

    rows: list[Row] = []
    tables: dict[str, str] = {}
    try:
        for split in splits or [experiment.data.split]:
            bases = {strategy: _on_split(experiment, split, strategy) for strategy in strategies}
            folders = {strategy: strategy.replace(":", ".") for strategy in strategies}
            if lr_grid:
                tuning = {s: out / split / "tuning" / folder for s, folder in folders.items()}
                bases = _tuned(bases, lr_grid, tuning, play)
            paths = {s: [out / split / folders[s] / f"seed{seed}" for seed in seeds] for s in bases}
            runs = play(
                {
                    path: base.changed({"seed": seed})
                    for strategy, base in bases.items()
                    for seed, path in zip(seeds, paths[strategy], strict=True)
                }
            )
            for strategy, base in bases.items():
                own_runs = [runs[path] for path in paths[strategy]]
                rows.append(_row(split, strategy, base.training.lr, own_runs))
                tables[strategy] = "; ".join(own_runs[0].folder.about["tables"].values())
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


def _on_split(experiment: Experiment, split: str, strategy: str) -> Experiment:
    options = experiment.strategy.options if strategy == experiment.strategy.name else {}
    return experiment.changed({"data.split": split}).with_strategy(strategy, **options)


def _tuned(
    bases: Mapping[str, Experiment],
    lr_grid: Sequence[float],
    folders: Mapping[str, Path],
    play: Callable[[Mapping[Path, Experiment]], Mapping[Path, Run]],
) -> dict[str, Experiment]:
    """Each strategy with the learning rate that served it best in shorter runs."""
    trials = {
        folders[strategy] / f"lr{rate:g}": base.changed(
            {
                "seed": TUNING_SEED,
                "rounds": max(1, base.rounds * 2 // 3),
                "training.lr": rate,
            }
        )
        for strategy, base in bases.items()
        for rate in lr_grid
    }
    runs = play(trials)

    def best(strategy: str) -> float:
        return max(
            lr_grid, key=lambda rate: runs[folders[strategy] / f"lr{rate:g}"].final["accuracy"]
        )

    return {s: base.changed({"training.lr": best(s)}) for s, base in bases.items()}


def _row(split: str, strategy: str, lr: float, runs: Sequence[Run]) -> Row:
    finals = [run.final for run in runs]
    groups = {
        group: _mean_std([final["group_accuracy"][group] for final in finals])
        for group in finals[0]["group_accuracy"]
    }
    return Row(split, strategy, lr, _mean_std([f["accuracy"] for f in finals]), groups)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
