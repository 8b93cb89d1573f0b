"""What runs say, as numbers: a summary, curves, and who trained what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidSpan
from cocofl.experiment import Run
from cocofl.fl.strategies.facts import PROPOSED
from cocofl.report.runs import Line, Scene
from cocofl.runlog import FATES
from cocofl.span import Blocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; no deviation for a single one."""

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value per seed."""
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), std)

    def percent(self) -> str:
        """For a table.

        >>> Spread.of([0.5, 0.7]).percent(), Spread.of([0.5]).percent()
        ('60.0 ± 14.1', '50.0')
        """
        spread = "" if self.std is None else f" ± {100 * self.std:.1f}"
        return f"{100 * self.mean:.1f}{spread}"


@dataclass(frozen=True)
class Row:
    """What one line came to, over its seeds."""

    label: str
    seeds: int
    is_bound: bool
    lr: float
    accuracy: Spread
    f1: Spread
    groups: dict[str, Spread]
    worst_device: Spread
    simulated_s: float
    bytes_up: float
    updates: dict[str, float]
    """How many updates of a run were merged, late, lost, rejected, infeasible; means."""
    complete: int
    """How many of its runs have reached their end."""


def summary(line: Line) -> Row:
    """The row of a line."""
    finals = line.finals
    return Row(
        label=line.label,
        seeds=len(line.runs),
        is_bound=line.is_bound,
        lr=line.runs[0].experiment.training.lr,
        accuracy=Spread.of([final["accuracy"] for final in finals]),
        f1=Spread.of([final["f1"] for final in finals]),
        groups={
            group: Spread.of([final["group_accuracy"][group] for final in finals])
            for group in finals[0]["group_accuracy"]
        },
        worst_device=Spread.of([final["device_accuracy"]["min"] for final in finals]),
        simulated_s=_mean_total(line.runs, "simulated_s"),
        bytes_up=_mean_total(line.runs, "bytes_up"),
        updates={status: _mean_total(line.runs, status) for status in FATES},
        complete=sum(run.folder.is_complete for run in line.runs),
    )


def ahead(scene: Scene) -> list[tuple[str, float]]:
    """How many points the first proposed line is ahead of each other line that obeys budgets."""
    ours = next((line for line in scene.lines if line.facts.role == PROPOSED), None)
    if ours is None:
        return []
    accuracy = summary(ours).accuracy.mean
    return [
        (line.label, 100 * (accuracy - summary(line).accuracy.mean))
        for line in scene.lines
        if line is not ours and not line.is_bound
    ]


def _mean_total(runs: Sequence[Run], key: str) -> float:
    return float(np.mean([sum(record[key] for record in run.rounds) for run in runs]))


@dataclass(frozen=True, eq=False)
class Curve:
    """Accuracies along a line, one entry per evaluated round; means, least and most over seeds."""

    rounds: Ints
    simulated_s: Floats
    bytes_up: Floats
    mean: Floats
    low: Floats
    high: Floats
    groups: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.rounds)

    def at(self, kept: Ints) -> Curve:
        """The curve at some of its points."""
        return Curve(
            self.rounds[kept],
            self.simulated_s[kept],
            self.bytes_up[kept],
            self.mean[kept],
            self.low[kept],
            self.high[kept],
            {group: values[kept] for group, values in self.groups.items()},
        )


def curve(line: Line, at_most: int | None = None) -> Curve:
    """The line's curve over the rounds that every seed has; thinned to some ``at_most`` points."""
    common = set.intersection(*({r["round"] for r in run.evaluated} for run in line.runs))
    rounds = np.array(sorted(common), dtype=np.int64)
    accuracy = np.array([_evaluated(run, common, "accuracy") for run in line.runs])
    by_group = [_evaluated(run, common, "group_accuracy") for run in line.runs]
    whole = Curve(
        rounds,
        _running_total(line.runs, "simulated_s", rounds),
        _running_total(line.runs, "bytes_up", rounds),
        accuracy.mean(axis=0),
        accuracy.min(axis=0),
        accuracy.max(axis=0),
        {
            group: np.array([[r[group] for r in records] for records in by_group]).mean(axis=0)
            for group in line.finals[0]["group_accuracy"]
        },
    )
    if at_most is None or len(whole) <= at_most:
        return whole
    series = [whole.mean, whole.low, whole.high, *whole.groups.values()]
    return whole.at(thin(series, at_most))


def thin(series: Sequence[Floats], at_most: int) -> Ints:
    """Which points to draw so that nothing is hidden: every peak and dip of every series stays.

    The points are divided into stretches; of each the least and the largest value of each series
    are kept, and of all the first and the last.

    >>> values = np.zeros(1000)
    >>> values[123] = 1.0
    >>> kept = thin([values], 50)
    >>> len(kept) <= 50, 123 in kept
    (True, True)
    """
    n_points = len(series[0])
    stretches = max(1, (at_most - 2) // (2 * len(series)))
    kept = {0, n_points - 1}
    for stretch in np.array_split(np.arange(n_points), stretches):
        for values in series:
            if len(stretch):
                kept.add(int(stretch[np.argmin(values[stretch])]))
                kept.add(int(stretch[np.argmax(values[stretch])]))
    return np.array(sorted(kept), dtype=np.int64)


def _evaluated(run: Run, rounds: set[int], key: str) -> list[Any]:
    return [record[key] for record in run.evaluated if record["round"] in rounds]


def _running_total(runs: Sequence[Run], key: str, rounds: Ints) -> Floats:
    totals = [np.cumsum([record[key] for record in run.rounds])[rounds - 1] for run in runs]
    return np.asarray(np.mean(totals, axis=0), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Trained:
    """How many updates per round trained what, by group: (groups, columns)."""

    what: str
    """``block`` or ``width``."""
    columns: tuple[str, ...]
    groups: tuple[str, ...]
    updates: Floats
    """Merged updates per round that trained the column."""
    shares: Floats
    """The same as a share of all merged updates of the group."""


def trained(line: Line, groups: Sequence[str]) -> Trained:
    """Which blocks (or which widths) the merged updates of each group trained, and how often."""
    counts = Counter(
        (group, work)
        for run in line.runs
        for record in run.rounds
        for _, group, work, fate in record["devices"]
        if fate == "merged" and work is not None
    )
    trained_by = {work: _blocks(work) for _, work in counts}
    if all(blocks is not None for blocks in trained_by.values()):
        n_blocks = 1 + max((max(blocks) for blocks in trained_by.values() if blocks), default=0)
        about = line.runs[0].folder.about
        columns = tuple(map(str, range(int(about.get("model_blocks", n_blocks)))))
        what = "block"
    else:
        columns = tuple(sorted(trained_by, key=_width))
        what = "width"
    # One who trains all data in one place belongs to no group of devices.
    names = tuple(dict.fromkeys([*groups, *(group for group, _ in counts)]))
    if line.facts.all_data_in_one_place:
        names = tuple(dict.fromkeys(group for group, _ in counts))
    found = np.zeros((len(names), len(columns)))
    totals = np.zeros((len(names), 1))
    for (group, work), count in counts.items():
        row, blocks = names.index(group), trained_by[work]
        totals[row] += count
        if blocks is not None and what == "block":
            found[row, list(blocks)] += count
        else:
            found[row, columns.index(work)] += count
    n_rounds = sum(len(run.rounds) for run in line.runs)
    return Trained(what, columns, names, found / n_rounds, found / np.maximum(totals, 1))


def _blocks(work: str) -> Blocks | None:
    try:
        return Blocks.parse(work)
    except InvalidSpan:
        return None


def _width(work: str) -> tuple[float, str]:
    try:
        return float(work), work
    except ValueError:
        return float("inf"), work
