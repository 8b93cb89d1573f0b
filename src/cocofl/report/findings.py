"""What runs say, as numbers: a summary, curves, and who trained what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidSpan, RunFolderProblem
from cocofl.experiment import Run, Spread
from cocofl.fl.strategies.facts import PROPOSED
from cocofl.report.runs import Line, Scene
from cocofl.runlog import FATES, Scores, metric_names, scores_by_name
from cocofl.span import MOST_BLOCKS, Blocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """What one line came to, over its seeds."""

    label: str
    strategy: str
    split: str
    seeds: int
    is_bound: bool
    lr: float
    scores: dict[str, Spread]
    """By metric."""
    groups: dict[str, Spread]
    """What each group of devices has of the first metric, where that has a meaning."""
    worst_device: Spread | None
    simulated_s: float
    bytes_up: float
    updates: dict[str, float]
    """How many updates of a run were merged, late, lost, rejected, infeasible; means."""
    complete: int
    """How many of its runs have reached their end."""
    epsilon: float | None = None
    """The largest of its runs', where there is privacy."""
    averaged: dict[str, Spread] = field(default_factory=dict)
    """By metric, of the mean of the model over rounds, where all of its runs keep one."""
    energy_j: float | None = None
    """What training took on all devices; a mean, where their power is known."""


def summary(line: Line) -> Row:
    """The row of a line."""
    finals, name = [run.final.scores for run in line.runs], line.metric.name
    experiment = line.runs[0].experiment
    n_runs = len(line.runs)
    return Row(
        label=line.label,
        strategy=line.strategy,
        split=experiment.data.split,
        seeds=n_runs,
        is_bound=line.is_bound,
        lr=experiment.training.lr,
        scores=_spreads([_numbers(one) for one in finals]),
        groups=_spreads([scores_by_name(one, f"group_{name}") for one in finals]),
        worst_device=_spreads([scores_by_name(one, f"device_{name}") for one in finals]).get("min"),
        simulated_s=sum(one.simulated_s for run in line.runs for one in run.rounds) / n_runs,
        bytes_up=sum(one.bytes_up for run in line.runs for one in run.rounds) / n_runs,
        updates={fate: sum(run.fates[fate] for run in line.runs) / n_runs for fate in FATES},
        complete=sum(run.folder.is_complete for run in line.runs),
        epsilon=max(run.rounds[-1].epsilon or 0.0 for run in line.runs) or None,
        averaged=_spreads([_numbers(run.averaged) for run in line.runs]),
        energy_j=sum(one.energy_j or 0.0 for run in line.runs for one in run.rounds) / n_runs
        or None,
    )


def _numbers(scores: Scores) -> dict[str, float]:
    return {key: scores[key] for key in metric_names(scores)}


def _spreads(of_seeds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Over seeds, of what each of them has."""
    return {
        key: Spread.of([one[key] for one in of_seeds])
        for key in of_seeds[0]
        if all(key in one for one in of_seeds)
    }


def ahead(scene: Scene) -> tuple[Line, dict[str, float]] | None:
    """The first proposed line, and how far ahead it is of each other line that obeys budgets.

    In points, where the metric is a share. Whichever way the metric goes, ahead is positive.
    """
    ours = next((line for line in scene.lines if line.facts.role == PROPOSED), None)
    rivals = [line for line in scene.lines if line is not ours and not line.is_bound]
    if ours is None or not rivals:
        return None
    metric = scene.metric
    sign = metric.scale if metric.higher_is_better else -metric.scale
    means = {line.label: summary(line).scores[metric.name].mean for line in (ours, *rivals)}
    return ours, {one.label: sign * (means[ours.label] - means[one.label]) for one in rivals}


AXES = {
    "rounds": "round",
    "simulated_s": "simulated time / s",
    "uploaded_mb": "uploaded / MB",
    "energy_j": "energy of training / J",
}
"""Along what curves are drawn, and what the axis is called."""
WORST = "worst-off"
"""Stands for a group's name: of each point the one that has least."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The metric along a line, one entry per evaluated round; means, least and most over seeds."""

    rounds: Ints
    simulated_s: Floats
    uploaded_mb: Floats
    mean: Floats
    low: Floats
    high: Floats
    groups: dict[str, Floats]
    worst: Floats
    """Of the groups the one that has least, at each point by itself; empty where there are none."""
    energy_j: Floats | None = None
    """None where no device's power is known."""

    def of(self, group: str | None) -> Floats:
        """The mean of all, or a group's."""
        if group == WORST:
            return self.worst
        return self.mean if group is None else self.groups[group]

    @property
    def is_short(self) -> bool:
        """Whether its points are marked: of one alone nothing else would be seen."""
        return len(self.rounds) < 30


def curve(line: Line, at_most: int | None = None) -> Curve:
    """The line's curve over the rounds that every seed has; thinned to some ``at_most`` points."""
    common = set.intersection(*({one.round for one in run.evaluated} for run in line.runs))
    if not common:
        raise RunFolderProblem(f"the runs of {line.label} were never tested after the same round")
    rounds, name = np.array(sorted(common), dtype=np.int64), line.metric.name
    tested = [[r.scores for r in run.evaluated if r.round in common] for run in line.runs]
    values = np.array([[one[name] for one in scores] for scores in tested], dtype=np.float64)
    by_group = [[scores_by_name(one, f"group_{name}") for one in scores] for scores in tested]
    shared = set.intersection(*(set(one) for groups in by_group for one in groups))
    groups = {
        group: np.array([[one[group] for one in groups] for groups in by_group]).mean(axis=0)
        for group in by_group[0][0]
        if group in shared
    }
    mean, low, high = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
    least = np.min if line.metric.higher_is_better else np.max
    worst: Floats = least(list(groups.values()), axis=0) if groups else np.zeros(0)
    kept = np.arange(len(rounds))
    if at_most is not None and len(rounds) > at_most:
        kept = thin([mean, low, high, *groups.values()], at_most)
    return Curve(
        rounds[kept],
        _running_total(line.runs, "simulated_s", rounds[kept]),
        _running_total(line.runs, "bytes_up", rounds[kept]) / 1e6,
        mean[kept],
        low[kept],
        high[kept],
        {group: found[kept] for group, found in groups.items()},
        worst[kept] if groups else worst,
        _running_total(line.runs, "energy_j", rounds[kept]) if _knows_energy(line) else None,
    )


def _knows_energy(line: Line) -> bool:
    return all(record.energy_j is not None for run in line.runs for record in run.rounds)


def known_axes(lines: Sequence[Line], curves: Sequence[Curve]) -> dict[str, str]:
    """Along what all of them can be drawn; what has all data in one place is a level anywhere."""
    pairs = zip(lines, curves, strict=True)
    own = [one for line, one in pairs if not line.facts.all_data_in_one_place]
    return {
        axis: title
        for axis, title in AXES.items()
        if all(getattr(o, axis) is not None for o in own)
    }


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


def _running_total(runs: Sequence[Run], key: str, rounds: Ints) -> Floats:
    totals = [np.cumsum([getattr(one, key) for one in run.rounds])[rounds - 1] for run in runs]
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
        (one.group, one.work)
        for run in line.runs
        for record in run.rounds
        for one in record.devices
        if one.fate == "merged" and one.work is not None
    )
    trained_by = {work: blocks_of(work) for _, work in counts}
    if all(blocks is not None for blocks in trained_by.values()):
        n_blocks = 1 + max((max(blocks) for blocks in trained_by.values() if blocks), default=0)
        known = line.runs[0].folder.about.get("model_blocks")
        n_blocks = max(n_blocks, known if isinstance(known, int) else 0)
        what, columns = "block", tuple(map(str, range(n_blocks)))
        places = {work: list(blocks or ()) for work, blocks in trained_by.items()}
    else:
        what, columns = "width", tuple(sorted(trained_by, key=_width))
        places = {work: [place] for place, work in enumerate(columns)}
    # One who trains all data in one place belongs to no group of devices.
    own = () if line.facts.all_data_in_one_place else groups
    names = tuple(dict.fromkeys([*own, *(group for group, _ in counts)]))
    found = np.zeros((len(names), len(columns)))
    totals = np.zeros((len(names), 1))
    for (group, work), count in counts.items():
        row = names.index(group)
        totals[row] += count
        found[row, places[work]] += count
    n_rounds = sum(len(run.rounds) for run in line.runs)
    return Trained(what, columns, names, found / n_rounds, found / np.maximum(totals, 1))


def most_updates(found: Iterable[Trained]) -> float:
    """Where the scale of heat maps that are compared ends."""
    return max((float(one.updates.max(initial=0)) for one in found), default=0) or 1.0


def blocks_of(work: str) -> Blocks | None:
    """The blocks that a record says were trained; None where it names a width or the like."""
    try:
        blocks = Blocks.parse(work)
        blocks.check_fits(MOST_BLOCKS)
        return blocks
    except InvalidSpan:
        return None


def _width(work: str) -> tuple[float, str]:
    try:
        return float(work), work
    except ValueError:
        return float("inf"), work
