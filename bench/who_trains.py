"""Who can train what in the paper's rows: rounds are planned with all devices, nothing is trained.

    python bench/who_trains.py --analytic --tables FOLDER       # every row, six minutes
    python bench/who_trains.py resnet50-cifar100-rc --real
    python bench/who_trains.py mobilenet-cifar10-rc --selectors random,coverage --tables FOLDER

The data is made up, with the paper's number of samples, classes and plays: planning looks at
labels, owners and sizes only. ``--real`` loads it instead. ``--analytic`` shows HeteroFL and FjORD
with analytic tables, too; ``--tables`` shows CoCoFL with those that the paper's authors published.
``--selectors`` shows instead, for each of them, how many devices of a round train each block.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cocofl.config import Experiment
from cocofl.data import REGISTRY, DataSet, Facts, Samples
from cocofl.engine.pace import AskedDevice, UntilTheDeadline
from cocofl.errors import CocoflError
from cocofl.experiment import Setup
from cocofl.fl.federation import Federation
from cocofl.fl.spans import SpanWork
from cocofl.reproduction.collection import paper
from cocofl.reproduction.plans import STRATEGY_ORDER
from cocofl.rng import stream

ROUNDS = 5
SHAPES = {"xchest": (256, 256, 3), "imdb": (512,), "shakespeare": (80,)}
# Training samples of the paper, where they are not all there are.
SAMPLES = {"femnist": 640_500, "xchest": 12_700, "imdb": 40_000, "shakespeare": 200_000}
PLAYS = 25


class Share(NamedTuple):
    """What the devices of a group can do under a strategy."""

    strategy: str
    group: str
    asked: int
    able: int
    size: float | None
    """The mean number of trained blocks, or the mean width; None where nobody can train."""
    reach: str
    """The blocks, or widths, that occur."""


def made_up(name: str) -> DataSet:
    """Samples of the right number and shape, of which only labels and owners hold anything."""
    source = REGISTRY[name]
    splits = []
    for n in (SAMPLES.get(name, source.samples[0]), 1000):
        rng = stream(n, "bench.made_up")
        shape = SHAPES.get(name, (32, 32, 3))
        names = tuple(map(str, range(source.num_classes)))
        # Plays are not equally long: from 1 to 2.
        play = rng.choice(PLAYS, n, p=np.linspace(1, 2, PLAYS) / (1.5 * PLAYS))
        facts = Facts(
            source.task,
            names,
            (0.5,) * 3,
            (0.25,) * 3,
            channels=3,
            owner_names=tuple(map(str, range(PLAYS))),
        )
        labels = rng.integers(source.num_classes, size=n)
        inputs = np.broadcast_to(np.uint8(0), (n, *shape))
        splits.append(Samples(Path(name), facts, inputs, labels, play.astype(np.int32), b""))
    return DataSet(name, *splits)


def planned(
    experiment: Experiment, dataset: DataSet | None
) -> tuple[Setup, Federation, list[AskedDevice]]:
    """What all devices plan for a few rounds."""
    everyone = {"devices.per_round": experiment.devices.count}
    setup = Setup(experiment.changed(everyone), dataset)
    job = setup.job()
    federation = job.federation
    assert federation is not None
    pace = UntilTheDeadline(job.strategy, federation, job.faults, job.seed)
    return setup, federation, [one for r in range(ROUNDS) for one in pace.turn(r).begin]


def coverage(experiment: Experiment, dataset: DataSet | None) -> list[float]:
    """By block, how many of the devices of a round train it."""
    setup, _, asked = planned(experiment, dataset)
    works = [one.plan.work for one in asked if one.plan is not None]
    spans = [work.blocks for work in works if isinstance(work, SpanWork)]
    each = experiment.devices.per_round / len(asked)
    return [each * sum(block in span for span in spans) for block in range(len(setup.chain))]


def shares(experiment: Experiment, dataset: DataSet | None) -> tuple[list[Share], dict[str, str]]:
    """What each group of devices does in a few rounds, and which tables said so."""
    setup, federation, asked = planned(experiment, dataset)
    found = []
    for group in federation.devices.groups:
        plans = [one.plan for one in asked if federation.group_name(one.device) == group.name]
        works = [plan.work for plan in plans if plan is not None]
        spans = [work.blocks for work in works if isinstance(work, SpanWork)]
        widths = [float(str(work)) for work in works if not isinstance(work, SpanWork)]
        sizes = [*map(len, spans), *widths]
        blocks = sorted({block for span in spans for block in span})
        # Between the first and the last there may be some that nobody trains.
        reach = f"{len(blocks)} of {blocks[0]}:{blocks[-1] + 1}" if blocks else ""
        if widths:
            reach = f"{min(widths):g} to {max(widths):g}"
        size = statistics.mean(sizes) if sizes else None
        strategy = experiment.strategy.name
        found.append(Share(strategy, group.name, len(plans), len(works), size, reach))
    return found, setup.tables.served


def published(model: str, folder: Path) -> Path:
    """The authors' table of a network."""
    (found,) = folder.glob(f"*_{model.replace('-', '')}.json")
    return found


def lines(row: str, dataset: DataSet | None, analytic: bool, tables: Path | None) -> Iterator[str]:
    """A row's shares, one line per strategy."""
    experiment = paper().experiment(row)
    trials = {name: experiment.with_strategy(name) for name in STRATEGY_ORDER}
    if analytic:
        for name in ("heterofl", "fjord"):
            trials[f"{name}, analytic"] = trials[name].changed({"tables.widths": "analytic"})
    if tables is not None:
        path = published(experiment.model.name, tables)
        trials[f"cocofl, {path.stem}"] = trials["cocofl"].changed({"tables.spans": str(path)})
    served: dict[str, str] = {}
    for label, trial in trials.items():
        try:
            found, by = shares(trial, dataset)
        except CocoflError as error:
            yield f"  {label}: REFUSED: {error}"
            continue
        if label in STRATEGY_ORDER:
            served |= by
        yield f"  {label:<12} " + " | ".join(
            f"{one.group} {one.able}/{one.asked}"
            + (f" {one.size:.3g} in {one.reach}" if one.size is not None else "")
            for one in found
        )
    yield from (f"  table {kind}: {what}" for kind, what in served.items())


def coverage_lines(
    row: str, dataset: DataSet | None, selectors: list[str], tables: Path | None
) -> Iterator[str]:
    """How many devices train each block, one line per selector."""
    experiment = paper().experiment(row).with_strategy("cocofl")
    if tables is not None:
        spans = str(published(experiment.model.name, tables))
        experiment = experiment.changed({"tables.spans": spans})
    for name in selectors:
        found = coverage(experiment.changed({"strategy.selector": name}), dataset)
        mean, spread = statistics.mean(found), statistics.pstdev(found)
        yield f"  {name:<12} " + " ".join(f"{count:.1f}" for count in found)
        yield f"  {'':<12} mean {mean:.2f}, standard deviation {spread:.2f}, least {min(found):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(paper().rows))
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--analytic", action="store_true")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--selectors", type=lambda text: text.split(","))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # tables of other machines
    for row in arguments.rows:
        print(row, flush=True)
        dataset = None if arguments.real else made_up(paper().experiment(row).data.name)
        found = lines(row, dataset, arguments.analytic, arguments.tables)
        if arguments.selectors:
            found = coverage_lines(row, dataset, arguments.selectors, arguments.tables)
        for line in found:
            print(line, flush=True)


if __name__ == "__main__":
    main()
