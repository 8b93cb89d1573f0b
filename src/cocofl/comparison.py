"""Several strategies and seeds side by side, each with a learning rate chosen in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from cocofl.config import Experiment
from cocofl.data.partition import check_rule
from cocofl.engine.rounds import Watcher
from cocofl.errors import CocoflError, InvalidExperiment
from cocofl.experiment import (
    Run,
    Setup,
    Watch,
    executor_for,
    in_short,
    load_data,
    simulate_batch,
)
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
    watchers: Sequence[Watcher] = (),
    watch: Watch = lambda _path, _experiment: (),
    announce: Callable[[str, int], None] = lambda _name, _rounds: None,
    budgets: Sequence[str] = (),
    leave_out: Callable[[str, str], None] | None = None,
) -> list[Run]:
    """Run every strategy with every seed on every split; runs go to folders below ``out``.

    With an ``lr_grid`` each strategy first runs once per learning rate on each split, two thirds
    of the rounds and with a seed of its own, and keeps the best by the first metric; without one
    all use the experiment's. Runs on which learning rates were chosen are not among the results,
    and ``watch`` is not asked about them. ``budgets`` are values of ``devices.groups``, each of
    which is played as well. A strategy that this network, data or device groups do not suit is an
    error, unless ``leave_out`` is told of it.
    """
    _check(experiment, strategies, splits, lr_grid)
    strategies = _suitable(experiment, strategies, splits, budgets, leave_out)
    played: list[Run] = []
    with executor_for(experiment) as executor:

        def say(paths: Sequence[Path], rounds: int) -> None:
            announce(in_short([str(path.relative_to(out)) for path in paths]), rounds)

        def play(experiments: Mapping[Path, Experiment], **more: Watch) -> dict[Path, Run]:
            runs = simulate_batch(
                experiments,
                resume=resume,
                executor=executor,
                watchers=watchers,
                announce=say,
                **more,
            )
            return {run.path: run for run in runs}

        for place, scene in _scenes(experiment, splits, budgets).items():
            bases = {strategy: _with(scene, strategy) for strategy in strategies}
            folders = {strategy: strategy.replace(":", ".") for strategy in strategies}
            if lr_grid:
                tuning = {s: out / place / "tuning" / folder for s, folder in folders.items()}
                bases = _tuned(bases, lr_grid, tuning, play)
            wanted = {
                out / place / folders[strategy] / f"seed{seed}": base.changed({"seed": seed})
                for strategy, base in bases.items()
                for seed in seeds
            }
            runs = play(wanted, watch=watch)
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


def _suitable(
    experiment: Experiment,
    strategies: Sequence[str],
    splits: Sequence[str],
    budgets: Sequence[str],
    leave_out: Callable[[str, str], None] | None,
) -> list[str]:
    """The strategies that can be played here; nothing is trained yet."""
    scenes, found = list(_scenes(experiment, splits, budgets).values()), []
    data = load_data(experiment)
    for strategy in strategies:
        try:
            for scene in scenes:
                Setup(_with(scene, strategy), data).job()
            found.append(strategy)
        except CocoflError as error:
            if leave_out is None:
                raise
            leave_out(strategy, str(error))
    if not found:
        raise InvalidExperiment("no strategy suits this experiment; what is wrong is said above")
    return found


def _scenes(
    experiment: Experiment, splits: Sequence[str], budgets: Sequence[str]
) -> dict[Path, Experiment]:
    """What is played once per strategy, by the folder that it goes to."""
    found = {}
    for budget, split in product(budgets or [""], splits):
        own = {"data.split": split} | ({"devices.groups": budget} if budget else {})
        name = budget.replace(":", "")
        found[Path(name, split)] = experiment.changed(own)
    return found


def _with(scene: Experiment, strategy: str) -> Experiment:
    options = scene.strategy.options if strategy == scene.strategy.name else {}
    return scene.with_strategy(strategy, **options)


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
