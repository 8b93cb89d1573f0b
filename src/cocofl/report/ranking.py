"""Methods ranked: how good they get, what that costs, and who could take part at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from cocofl.budget import bytes_text
from cocofl.fl.metrics import MetricFacts
from cocofl.report.findings import Curve, Floats, curve, summary
from cocofl.report.runs import Line, Scene
from cocofl.report.tables import NOTHING, TextTable, seconds_text

FEWEST = 3
"""Methods that obey budgets, from which on a ranking says more than the summary."""
_NEARLY = 0.9  # of what the best method of a scene gets


def ranked(scene: Scene) -> list[Line]:
    """The lines that obey budgets, the best first."""
    metric = scene.metric
    rivals = [line for line in scene.lines if not line.is_bound]
    return sorted(rivals, key=lambda line: -metric.merit(_mean(line, metric)))


def places(lines: Sequence[Line]) -> list[int]:
    """The places of ranked lines: those that are equally good have the same."""
    merits = [round(line.metric.merit(_mean(line, line.metric)), 9) for line in lines]
    return [1 + merits.index(merit) for merit in merits]


def places_of(scene: Scene) -> dict[str, int]:
    """The places of a scene by strategy."""
    lines = ranked(scene)
    return {line.strategy: place for line, place in zip(lines, places(lines), strict=True)}


def _mean(line: Line, metric: MetricFacts) -> float:
    return summary(line).scores[metric.name].mean


def ranking_table(scene: Scene) -> TextTable | None:
    """The methods of one scene, the best first; None where there are few."""
    lines, metric = ranked(scene), scene.metric
    if len(lines) < FEWEST:
        return None
    rows, curves = [summary(line) for line in lines], [curve(line) for line in lines]
    goal = _goal(_mean(lines[0], metric), metric)
    columns = {
        "strategy": [row.label for row in rows],
        "rank": [str(place) for place in places(lines)],
        metric.heading: [row.scores[metric.name].text(metric) for row in rows],
    }
    if scene.groups:
        worst = [min(row.groups, key=lambda name: metric.merit(row.groups[name].mean))
                 for row in rows]  # fmt: skip
        columns[f"worst group{metric.unit}"] = [
            f"{row.groups[name].text(metric)} ({name})"
            for row, name in zip(rows, worst, strict=True)
        ]
    reached = metric.text(goal)
    costs: dict[str, tuple[Callable[[Curve], Floats | None], Callable[[float], str]]] = {
        f"time to {reached}": (lambda one: one.simulated_s, seconds_text),
        f"uploaded to {reached}": (lambda one: 1e6 * one.uploaded_mb, bytes_text),
        f"energy to {reached}": (lambda one: one.energy_j, lambda joules: f"{joules:.3g} J"),
    }
    for heading, (along, text) in costs.items():
        spent = [along(one) for one in curves]
        if any(one is not None for one in spent):
            pairs = zip(spent, curves, strict=True)
            found = [_first(cost, one.mean, goal, metric) for cost, one in pairs]
            columns[heading] = [NOTHING if cost is None else text(cost) for cost in found]
    shares = [took_part(line) for line in lines]
    # As the summary has them, then those of which nothing else is known.
    for group in dict.fromkeys([*scene.groups, *(name for one in shares for name in one)]):
        columns[f"{group} took part / %"] = [f"{100 * one.get(group, 0):.0f}" for one in shares]
    return TextTable.of(scene.title, columns)


def _goal(best: float, metric: MetricFacts) -> float:
    """Nearly what the best gets: rounded as people say it, where it is a share."""
    goal = best * _NEARLY if metric.higher_is_better else best / _NEARLY
    return float(np.floor(100 * goal) / 100) if metric.is_share else goal


def _first(costs: Floats | None, values: Floats, goal: float, metric: MetricFacts) -> float | None:
    """The cost at which the goal is reached; None where it never is, or nobody knows."""
    there = np.flatnonzero([metric.merit(value) >= metric.merit(goal) for value in values])
    return None if costs is None or not len(there) else float(costs[there[0]])


def took_part(line: Line) -> dict[str, float]:
    """By group, how many of the devices that were asked were merged."""
    asked, merged = Counter[str](), Counter[str]()
    for run in line.runs:
        for record in run.rounds:
            for one in record.devices:
                asked[one.group] += 1
                merged[one.group] += one.fate == "merged"
    return {group: merged[group] / count for group, count in asked.items()}


def overall_table(scenes: Sequence[Scene]) -> TextTable | None:
    """The place of every method in every scene, and the mean of its places; None for one scene.

    A method counts where it was played in all scenes.
    """
    found = [places_of(scene) for scene in scenes]
    everywhere = [name for name in found[0] if all(name in one for one in found)]
    if len(scenes) < 2 or len(everywhere) < FEWEST:
        return None
    mean = {name: float(np.mean([one[name] for one in found])) for name in everywhere}
    names = sorted(everywhere, key=lambda name: mean[name])
    columns = {
        "strategy": names,
        "mean rank": [f"{mean[name]:.1f}" for name in names],
        **{
            scene.title: [str(place[name]) for name in names]
            for scene, place in zip(scenes, found, strict=True)
        },
    }
    return TextTable.of("All scenes", columns)
