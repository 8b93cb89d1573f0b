"""Tables of texts, whoever shows them: a terminal, a page, a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cocofl.budget import bytes_text
from cocofl.experiment import Spread
from cocofl.fl.metrics import MetricFacts
from cocofl.report.findings import ahead, summary
from cocofl.report.runs import Scene
from cocofl.runlog import FATES

NOTHING = "–"


@dataclass(frozen=True)
class TextTable:
    """A table of texts with a title above and notes below."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, columns: Mapping[str, Sequence[str]], notes: Iterable[str] = ()
    ) -> TextTable:
        """From columns under their headings."""
        return cls(title, tuple(columns), tuple(zip(*columns.values(), strict=True)), tuple(notes))

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *["--:"] * (len(self.header) - 1)]
        cells = [self.header, rule, *self.lines]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"## {self.title}\n\n{table}\n" + (f"\n{notes}" if notes else "")

    def csv(self) -> str:
        """For other programs."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.lines])
        return text.getvalue()


def summary_table(scene: Scene, *, costs: bool = True) -> TextTable:
    """What the lines of a scene came to; without ``costs`` only how good their models are."""
    rows, metric, found = [summary(line) for line in scene.lines], scene.metric, ahead(scene)
    columns = {
        "strategy": [row.label for row in rows],
        metric.heading: [_cell(row.scores.get(metric.name), metric) for row in rows],
    }
    if any(row.averaged for row in rows):
        averages = [_cell(row.averaged.get(metric.name), metric) for row in rows]
        columns[f"averaged {metric.heading}"] = averages
    if costs and found is not None:
        ours, margins = found
        columns[f"to {ours.name}"] = [
            _difference(metric, -margins[row.label]) if row.label in margins else "" for row in rows
        ]
    for group in scene.groups:
        columns[f"{group}{metric.unit}"] = [_cell(row.groups[group], metric) for row in rows]
    if costs and any(row.worst_device for row in rows):
        columns[f"worst device{metric.unit}"] = [_cell(row.worst_device, metric) for row in rows]
    for other in scene.other_metrics:
        columns[other.heading] = [_cell(row.scores.get(other.name), other) for row in rows]
    if costs:
        columns["simulated time"] = [seconds_text(row.simulated_s) for row in rows]
        columns["uploaded"] = [bytes_text(row.bytes_up) for row in rows]
        if any(row.energy_j for row in rows):
            columns["energy / kJ"] = [
                f"{row.energy_j / 1e3:.4g}" if row.energy_j else NOTHING for row in rows
            ]
        for fate in FATES:
            if fate == "merged" or any(row.updates[fate] for row in rows):
                columns[fate] = [f"{row.updates[fate]:.4g}" for row in rows]
    if any(row.epsilon for row in rows):
        columns["ε"] = [f"{row.epsilon:.4g}" if row.epsilon else NOTHING for row in rows]
    columns["learning rate"] = [f"{row.lr:g}" for row in rows]
    columns["seeds"] = [str(row.seeds) for row in rows]
    return TextTable.of(scene.title, columns)


def highlights(scene: Scene) -> dict[str, str]:
    """What to know first of the only line of a scene, by name."""
    row, first = summary(scene.lines[0]), scene.metric
    figures = [(first.name, first, row.scores.get(first.name))]
    if row.averaged:
        figures.append((f"{first.name} averaged over rounds", first, row.averaged[first.name]))
    figures += [(f"{first.name} of {name}", first, row.groups[name]) for name in scene.groups]
    figures += [(one.name, one, row.scores.get(one.name)) for one in scene.other_metrics]
    return {
        **{
            name: f"{_cell(found, metric)}{' %' if metric.is_share else ''}"
            for name, metric, found in figures
        },
        "simulated time": seconds_text(row.simulated_s),
        "uploaded": bytes_text(row.bytes_up),
        **({"energy": f"{row.energy_j / 1e3:.4g} kJ"} if row.energy_j else {}),
        **{f"updates {fate}": f"{count:.4g}" for fate, count in row.updates.items() if count},
        **({f"ε at δ = {_delta(scene):g}": f"{row.epsilon:.4g}"} if row.epsilon else {}),
    }


def _delta(scene: Scene) -> float:
    return scene.lines[0].runs[0].experiment.privacy.delta


def _cell(found: Spread | None, metric: MetricFacts) -> str:
    return NOTHING if found is None else found.text(metric)


def margins_text(scene: Scene) -> str:
    """How far the method that is proposed is ahead of each that obeys the same budgets."""
    found = ahead(scene)
    if found is None:
        return ""
    ours, margins = found
    leads = (f"{label} {_difference(scene.metric, lead)}" for label, lead in margins.items())
    unit = "in points" if scene.metric.is_share else f"in {scene.metric.name}"
    return f"{ours.name} ahead, {unit}: {', '.join(leads)}"


def _difference(metric: MetricFacts, points: float) -> str:
    return f"{points:+.1f}" if metric.is_share else f"{points:+.4g}"


def seconds_text(seconds: float) -> str:
    """A duration for a person to read.

    >>> seconds_text(0.25), seconds_text(90), seconds_text(7200)
    ('0.25 s', '90 s', '2 h')
    """
    for unit, size in (("d", 172_800 / 2), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
