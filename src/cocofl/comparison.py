"""Several strategies and seeds side by side, each with a learning rate chosen in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

from cocofl.config import Experiment
from cocofl.data import DataSet
from cocofl.data.partition import check_rule
from cocofl.engine.rounds import Watcher, refuse_if_nobody_can_train
from cocofl.errors import CocoflError, InvalidExperiment, NoFeasibleSpan
from cocofl.experiment import (
    Run,
    Setup,
    Watch,
    executor_for,
    in_short,
    load_data,
    places_of,
    simulate_batch,
)
from cocofl.experiment.setup import devices_of, strategy_options
from cocofl.fl.strategies import STRATEGIES
from cocofl.named import lookup

# A seed that no comparison reports: what was chosen on it was not seen before.
TUNING_SEED = 1_000_003


def _nobody(_path: Path, _experiment: Experiment) -> Sequence[Watcher]:
    return ()


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
    watch: Watch = _nobody,
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
    error, unless ``leave_out`` is told of it: then it is played where it suits. A server that does
    not wait for devices merges so often that all strategies have as many updates.
    """
    _check(experiment, strategies, splits, lr_grid, seeds)
    scenes = _scenes(experiment, splits, budgets)
    for scene in scenes.values():
        devices_of(scene)
    suitable = _suitable(scenes, strategies, load_data(experiment), leave_out)
    played: list[Run] = []
    # Spread over several GPUs, runs are played by processes that have executors of their own.
    spread = len(places_of(experiment)) > 1
    with nullcontext() if spread else executor_for(experiment) as executor:

        def say(paths: Sequence[Path], rounds: int) -> None:
            announce(in_short([str(path.relative_to(out)) for path in paths]), rounds)

        def play(some: Mapping[Path, Experiment], watch: Watch = _nobody) -> dict[Path, Run]:
            runs = simulate_batch(
                some, resume=resume, executor=executor, watchers=watchers, watch=watch, announce=say
            )
            return {run.path: run for run in runs}

        for place, merges in suitable.items():
            with_one = partial(_with, scenes[place])
            bases = {one: _merging(with_one(one), often) for one, often in merges.items()}
            folders = {strategy: strategy.replace(":", ".") for strategy in merges}
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
    seeds: Sequence[int],
) -> None:
    """Find now what would be found after hours, when its turn comes."""
    if lr_grid and TUNING_SEED in seeds:
        raise InvalidExperiment(
            f"learning rates are chosen by seed {TUNING_SEED}, which is not to be reported; take "
            "another seed"
        )
    if not strategies:
        raise InvalidExperiment("no strategy to compare; name some, like cocofl,fedavg")
    for strategy in strategies:
        lookup(strategy, STRATEGIES, "strategy", InvalidExperiment)
    own = experiment.strategy
    strategy_options(experiment)
    if own.options and own.name not in strategies:
        raise InvalidExperiment(
            f"strategy.{next(iter(own.options))} is for {own.name!r}, as strategy.name says, which "
            "is not compared; compare it, too, or leave the option out"
        )
    for split in splits:
        check_rule(split)
    for rate in lr_grid:
        experiment.changed({"training.lr": rate})


def _suitable(
    scenes: Mapping[Path, Experiment],
    strategies: Sequence[str],
    data: DataSet,
    leave_out: Callable[[str, str], None] | None,
) -> dict[Path, dict[str, float]]:
    """By folder the strategies that can be played there, and how often each merges in a round.

    Nothing is trained yet. What is wrong with a strategy in several places is said once.
    """
    found: dict[Path, dict[str, float]] = {place: {} for place in scenes}
    unsuitable: dict[str, str] = {}
    for strategy in strategies:
        wrong: dict[Path, str] = {}
        for place, scene in scenes.items():
            try:
                job = Setup(_with(scene, strategy), data).job()
                refuse_if_nobody_can_train(job)
            except CocoflError as error:
                # Whose options are given is wanted: that these are wrong is no reason to go on.
                is_wanted = scene.strategy.options and strategy == scene.strategy.name
                is_about_budgets = isinstance(error, NoFeasibleSpan)
                if leave_out is None and is_about_budgets:
                    raise NoFeasibleSpan(f"{strategy}: {error}") from error
                if leave_out is None or (is_wanted and not is_about_budgets):
                    raise
                wrong[place] = str(error)
                continue
            arrival, updates = job.strategy.arrival, scene.devices.per_round
            found[place][strategy] = 1.0 if arrival is None else updates / arrival.buffer
        for why in dict.fromkeys(wrong.values()):
            where = [str(place) for place, one in wrong.items() if one == why]
            is_everywhere = len(where) == len(scenes)
            unsuitable[strategy if is_everywhere else f"{strategy} in {', '.join(where)}"] = why
    if not any(found.values()) and len({*unsuitable.values()}) == 1:
        raise InvalidExperiment(next(iter(unsuitable.values())))  # nothing is wrong with strategies
    if leave_out is not None:
        for strategy, why in unsuitable.items():
            leave_out(strategy, why)
    if not any(found.values()):
        raise InvalidExperiment("no strategy suits this experiment; what is wrong is said above")
    return {place: some for place, some in found.items() if some}


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


def _merging(experiment: Experiment, often: float) -> Experiment:
    """The same updates in so many times more rounds, of fewer updates each."""
    if often == 1.0:
        return experiment
    evaluation = experiment.evaluation.with_fewer_rounds(1 / often)
    decay = [max(1, round(often * one)) for one in experiment.training.decay_rounds]
    changes = {"rounds": max(1, round(often * experiment.rounds)), "training.decay_rounds": decay}
    changes |= {"evaluation.every": evaluation.every, "evaluation.average": evaluation.average}
    return experiment.changed(changes)


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
