"""A run while it runs: a page that is written anew after rounds, and loads itself again meanwhile.

It is one file without a server, there from the first moment, and tells of a run that goes on from
its beginning. Its charts are drawn here, so it stays small.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cocofl.config import Experiment
from cocofl.experiment import rounds_of
from cocofl.files import write_text
from cocofl.fl.metrics import MetricFacts, metric
from cocofl.report.findings import blocks_of
from cocofl.report.pages import template
from cocofl.report.palette import group_colour
from cocofl.report.tables import seconds_text
from cocofl.runlog import DeviceRecord, RoundRecord, RunFolder, scores_by_name

LIVE = "live.html"
EVERY_S = 1.0
"""The page is written no more often than this; it loads itself again every two seconds."""
_WIDTH, _HEIGHT = 600, 200
_RECENT = 20  # rounds by which the time left is judged


class Series(NamedTuple):
    """A line of a chart: its name, colour, last value, and points of a polyline."""

    name: str
    colour: str
    last: str
    points: Sequence[tuple[float, float]]

    @property
    def path(self) -> str:
        """As SVG has it."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


class LiveView:
    """A watcher that keeps the page; inside ``with``, so that it also tells of an early end."""

    def __init__(
        self,
        experiment: Experiment,
        path: Path,
        *,
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page = path / LIVE
        self._experiment, self._every_s, self._now = experiment, every_s, now
        self._rounds = rounds_of(experiment)
        self._metric: MetricFacts = metric(experiment.evaluation.metrics[0]).facts
        self._round, self._devices = 0, list[DeviceRecord]()
        self._scores: list[tuple[int, Mapping[str, Any]]] = []
        self._works: Counter[tuple[str, str]] = Counter()
        self._fates: Counter[str] = Counter()
        self._times = [now()]
        for record in RunFolder(path).rounds():
            self._take_down(record)
        self._write("running")

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._write("stopped" if issubclass(kind, KeyboardInterrupt) else "failed")

    def on_round(self, record: RoundRecord) -> None:
        """Take a round down, and show it if the page is not new."""
        if record.round <= self._round:
            return  # it was played before the run was interrupted, and came to the same
        self._take_down(record)
        self._times = [*self._times, self._now()][-_RECENT - 1 :]
        if self._now() - self._written_at >= self._every_s:
            self._write("running")

    def _take_down(self, record: RoundRecord) -> None:
        self._round, self._devices = record.round, list(record.devices)
        if record.scores:
            self._scores.append((record.round, record.scores))
        for one in record.devices:
            self._fates[one.fate] += 1
            if one.fate == "merged" and one.work is not None:
                self._works[one.group, one.work] += 1

    def on_end(self) -> None:
        """The run is complete."""
        self._write("complete")

    @property
    def seconds_left(self) -> float | None:
        """How long the rounds that are left take, by the last ones."""
        if len(self._times) < 2:
            return None
        each = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return each * (self._rounds - self._round)

    def _write(self, state: str) -> None:
        self._written_at, left = self._now(), self.seconds_left
        write_text(
            self.page,
            template("live.html").render(
                title=f"{self._experiment.name}: {self._experiment.strategy.name}",
                state=state,
                round=self._round,
                rounds=self._rounds,
                left=seconds_text(left) if left is not None and state == "running" else "",
                metric=self._metric,
                charts=self._charts(),
                size=(_WIDTH, _HEIGHT),
                trained=who_trained(self._works, self._groups()),
                fates=dict(self._fates),
                devices=self._devices,
            ),
        )

    def _groups(self) -> list[str]:
        """Groups in the order that scores have them in: the experiment's."""
        name = f"group_{self._metric.name}"
        return [*scores_by_name(self._scores[-1][1], name)] if self._scores else []

    def _charts(self) -> list[tuple[str, list[Series], float]]:
        """The metric overall and by group, and where the scale ends."""
        name = self._metric.name
        overall = {name: [(at, float(scores[name])) for at, scores in self._scores]}
        groups: dict[str, list[tuple[int, float]]] = {}
        for at, scores in self._scores:
            for group, value in scores_by_name(scores, f"group_{name}").items():
                groups.setdefault(group, []).append((at, value))
        parts = {name: overall, f"{name} of groups": groups}
        shown = {title: lines for title, lines in parts.items() if any(lines.values())}
        return [(title, *self._series(lines)) for title, lines in shown.items()]

    def _series(self, lines: Mapping[str, list[tuple[int, float]]]) -> tuple[list[Series], float]:
        scale = self._metric.scale
        values = [scale * value for points in lines.values() for _, value in points]
        top = 100.0 if self._metric.is_share else max([*values, 1e-9])

        def place(at: int, value: float) -> tuple[float, float]:
            height = min(1.0, max(0.0, scale * value / top))
            return _WIDTH * at / self._rounds, _HEIGHT * (1 - height)

        return [
            Series(
                name,
                group_colour(index),
                self._metric.text(points[-1][1]),
                [place(*point) for point in points],
            )
            for index, (name, points) in enumerate(lines.items())
        ], top


def who_trained(works: Mapping[tuple[str, str], int], groups: Sequence[str] = ()) -> dict[str, Any]:
    """The share of each group's merged updates that trained each block, or used each width.

    Groups are in the order given, others behind them.
    """
    blocks = {work: blocks_of(work) for _, work in works}
    if all(one is not None for one in blocks.values()):
        n_blocks = 1 + max((max(one) for one in blocks.values() if one), default=-1)
        columns = [str(block) for block in range(n_blocks)]
        places = {work: [str(block) for block in one or ()] for work, one in blocks.items()}
    else:
        columns = sorted(blocks)
        places = {work: [work] for work in blocks}
    rows: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for (group, work), count in works.items():
        totals[group] += count
        for column in places[work]:
            rows.setdefault(group, Counter())[column] += count
    order = dict.fromkeys([*(group for group in groups if group in rows), *rows])
    shares = {g: [rows[g][column] / totals[g] for column in columns] for g in order}
    return {"columns": columns, "rows": shares}
