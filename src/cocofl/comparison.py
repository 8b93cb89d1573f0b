"""Several strategies and seeds side by side, each with a learning rate chosen in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from cocofl.config import Experiment
from cocofl.data.partition import check_rule
from cocofl.engine.rounds import Watcher
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Run, executor_for, in_short, simulate_batch
from cocofl.fl.strategies import STRATEGIES
from cocofl.named import lookup

# A seed that no comparison reports: what was chosen on it was not seen before.
TUNING_SEED = 1_000_003


def compare(
    experiment: Experiment,
    *,
    strategies: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    splits: Sequence[str],
    lr_grid: Sequence[float],
    resume: bool,
    watchers: Sequence[Watcher],
    announce: Callable[[str, int], None],
) -> list[Run]:
    """Run every strategy with every seed on every split; runs go to folders below ``out``.

    With an ``lr_grid`` each strategy first runs once per learning rate on each split, two thirds
    of the rounds and with a seed of its own, and keeps the best by the first metric; without one
    all use the experiment's. Runs on which learning rates were chosen are not among the results.
    """
    _check(experiment, strategies, splits, lr_grid)
    played: list[Run] = []
    with executor_for(experiment) as executor:

        def say(paths: Sequence[Path], rounds: int) -> None:
            announce(in_short([str(path.relative_to(out)) for path in paths]), rounds)

        def play(experiments: Mapping[Path, Experiment]) -> dict[Path, Run]:
            runs = simulate_batch(
                experiments, resume=resume, executor=executor, watchers=watchers, announce=say
            )
            return {run.path: run for run in runs}

        for split in splits:
            bases = {strategy: _on_split(experiment, split, strategy) for strategy in strategies}
            folders = {strategy: strategy.replace(":", ".") for strategy in strategies}
            if lr_grid:
                tuning = {s: out / split / "tuning" / folder for s, folder in folders.items()}
                bases = _tuned(bases, lr_grid, tuning, play)
            wanted = {
                out / split / folders[strategy] / f"seed{seed}": base.changed({"seed": seed})
                for strategy, base in bases.items()
                for seed in seeds
            }
            runs = play(wanted)
            played += [runs[path] for path in wanted]
    return played


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
    trials = {}
    for strategy, base in bases.items():
        shorter = base.changed({"seed": TUNING_SEED, "rounds": max(1, base.rounds * 2 // 3)})
        for rate in lr_grid:
            trials[folders[strategy] / f"lr{rate:g}"] = shorter.changed({"training.lr": rate})
    runs = play(trials)

    def merit(strategy: str, rate: float) -> float:
        run = runs[folders[strategy] / f"lr{rate:g}"]
        return run.metrics[0].merit(run.final.scores[run.metrics[0].name])

    return {
        strategy: base.changed({"training.lr": max(lr_grid, key=partial(merit, strategy))})
        for strategy, base in bases.items()
    }
