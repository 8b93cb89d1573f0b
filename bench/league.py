"""Every strategy under one budget: plays the league, and writes down what came of it.

    python bench/league.py OUT [--experiments FILE ...] [--strategies NAME ...] [--splits NAME ...]
        [--rates NUMBER ...] [--seeds NUMBER ...] [--at-once 2] [--csv FILE] [--picture FILE]
        [--again]

Each experiment is played like ``cocofl compare FILE --strategies all --splits iid,dirichlet,rc``:
three seeds, and for each strategy and split the better of two learning rates, by a seed that is not
reported. What lies in OUT already is not played again. Tables are printed; with ``--again`` nothing
is played, and what is there is shown.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cocofl import Experiment, Run
from cocofl.comparison import compare
from cocofl.fl.strategies import STRATEGIES
from cocofl.report.drawing import bare, new_figure
from cocofl.report.findings import summary
from cocofl.report.palette import line_colours
from cocofl.report.ranking import places_of, took_part
from cocofl.report.runs import Line, Scene, arrange, find_runs

FILES = [Path(f"experiments/league/{name}.toml") for name in ("digits", "fashion_mnist")]
SPLITS = ("iid", "dirichlet", "rc")
RATES = (0.1, 0.4)
SEEDS = (0, 1, 2)


def play(asked: argparse.Namespace, file: Path, split: str) -> None:
    """All runs of one experiment on one split that are not there yet."""
    compare(
        # One process trains, and another league has the other core.
        Experiment.load(file).changed({"engine.workers": 1}),
        strategies=asked.strategies,
        seeds=asked.seeds,
        out=asked.out / file.stem,
        splits=[split],
        lr_grid=asked.rates,
        resume=True,
        announce=lambda name, _rounds: print(name, flush=True),
        leave_out=lambda name, why: print(f"left out: {name}: {why}"),
    )


def finished(folder: Path) -> list[Run]:
    """What was played to its end of one experiment."""
    return [run for run in find_runs([folder]) if run.folder.is_complete]


def by_split(folder: Path) -> dict[str, Scene]:
    """What was played of one experiment, in the order of the splits."""
    found = {one.lines[0].runs[0].experiment.data.split: one for one in arrange(finished(folder))}
    return {split: found[split] for split in SPLITS if split in found}


def mean_places(scenes: Sequence[Scene]) -> dict[str, float]:
    """By strategy that obeys budgets and was played everywhere, its mean place, the best first."""
    places: dict[str, list[int]] = {}
    for scene in scenes:
        for name, place in places_of(scene).items():
            places.setdefault(name, []).append(place)
    played = {name: found for name, found in places.items() if len(found) == len(scenes)}
    means = {name: float(np.mean(found)) for name, found in played.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def table(scenes: dict[str, Scene]) -> list[str]:
    """A row per strategy in Markdown: accuracies, the worst-off group of rc, who took part."""
    columns = [
        "mean place",
        *scenes,
        f"worst-off group, {[*scenes][-1]}",
        "uploaded (MB)",
        "energy (J)",
    ]
    columns += ["weak took part (%)"]
    rows = [f"| | {' | '.join(columns)} |", f"| --- {'| --- ' * len(columns)}|"]
    places = mean_places(list(scenes.values()))
    *_, last = scenes.values()
    bounds = [line.strategy for line in last.lines if line.is_bound]
    for name in (*places, *bounds):
        lines = [next(x for x in scene.lines if x.strategy == name) for scene in scenes.values()]
        found = [summary(line) for line in lines]
        cells = [f"{places[name]:.1f}" if name in places else "(bound)"]
        cells += [row.scores["accuracy"].text(lines[0].metric) for row in found]
        worst = min(found[-1].groups.values(), key=lambda one: one.mean, default=None)
        cells.append("" if worst is None else worst.text(lines[0].metric))
        sends = not lines[0].facts.all_data_in_one_place
        cells.append(f"{np.mean([row.bytes_up for row in found]) / 1e6:.2f}" if sends else "")
        energies = [row.energy_j for row in found]
        cells.append("" if None in energies else f"{np.mean(np.array(energies, float)):.3g}")
        part = took_part(lines[-1])
        cells.append(f"{100 * part.get('weak', 0.0):.0f}" if sends else "")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return rows


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One row per run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        groups = ("strong", "medium", "weak")
        figures = ("accuracy", *groups, "simulated_s", "bytes_up", "energy_j", "merged")
        writer.writerow(["data", "split", "strategy", "seed", "lr", *figures, "commit"])
        for run in runs:
            one, final = run.experiment, run.final.scores
            of_group = final.get("group_accuracy", {})
            energies = [record.energy_j for record in run.rounds]
            writer.writerow(
                [
                    *(one.data.name, one.data.split, one.strategy.name, one.seed, one.training.lr),
                    *(
                        f"{value:.4f}"
                        for value in (final["accuracy"], *(of_group.get(g, 0.0) for g in groups))
                    ),
                    f"{sum(record.simulated_s for record in run.rounds):.4f}",
                    sum(record.bytes_up for record in run.rounds),
                    "" if None in energies else f"{sum(filter(None, energies)):.4f}",
                    run.fates["merged"],
                    run.folder.about["commit"][:10],
                ]
            )


def draw(path: Path, leagues: dict[str, dict[str, Scene]]) -> None:
    """Every strategy's accuracy on each split, one panel per data set, the best place on top."""
    figure = new_figure(10.0, 5.6)
    panels = figure.subplots(1, len(leagues), squeeze=False)[0]
    splits = dict.fromkeys(split for scenes in leagues.values() for split in scenes)
    marks = dict(zip(splits, "osDv^<>", strict=False))
    for axes, (data, scenes) in zip(panels, leagues.items(), strict=True):
        lines = [line for scene in scenes.values() for line in scene.lines]
        colours = line_colours(lines)
        bounds = dict.fromkeys(line.strategy for line in lines if line.is_bound)
        names = [*mean_places(list(scenes.values())), *bounds]
        for split, scene in scenes.items():
            for line in (one for one in scene.lines if one.strategy in names):
                _draw_point(
                    axes, line, names.index(line.strategy), colours[line.label], marks[split]
                )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axhline(len(names) - len(bounds) - 0.5, color="0.7", lw=0.8)
        axes.set_xlim(0, 100)
        axes.set_xlabel("accuracy / %")
        axes.set_title(data, loc="left", fontsize=10)
        bare(axes)
    for split, mark in marks.items():
        panels[0].plot([], [], mark, color="0.4", ms=5, label=split)
    panels[0].legend(loc="lower left", fontsize=8, frameon=False)
    figure.savefig(path)


def _draw_point(axes: Axes, line: Line, row: int, colour: str, mark: str) -> None:
    found = summary(line).scores["accuracy"]
    error = 100 * (found.std or 0.0)
    style: dict[str, Any] = {"color": colour, "ms": 5, "elinewidth": 1, "alpha": 0.85}
    axes.errorbar(100 * found.mean, row, xerr=error, fmt=mark, **style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experiments", type=Path, nargs="+", default=FILES)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--splits", nargs="+", default=SPLITS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path("bench/results/league.csv"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/league.png"))
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    begin = time.perf_counter()
    todo = list(product(asked.experiments, asked.splits)) if not asked.again else []
    with ProcessPoolExecutor(asked.at_once, multiprocessing.get_context("spawn")) as pool:
        for one in [pool.submit(play, asked, file, split) for file, split in todo]:
            one.result()
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = sum(sum(resource.getrusage(one)[:2]) for one in who)
    print(f"{time.perf_counter() - begin:.0f} s, {used:.0f} s of CPU time")
    folders = [asked.out / file.stem for file in asked.experiments]
    leagues = {folder.name: by_split(folder) for folder in folders if folder.exists()}
    for name, scenes in leagues.items():
        print(f"\n## {name}\n", *table(scenes), sep="\n")
    write_csv(asked.csv, [run for one in folders if one.exists() for run in finished(one)])
    draw(asked.picture, leagues)


if __name__ == "__main__":
    main()
