"""Which runs to report, and which of them belong together.

Runs that differ by their seed only are one *line*. Lines on the same data, model and devices that
are judged by the same metric first can be compared and make one *scene*.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from cocofl.errors import RunFolderProblem
from cocofl.experiment import Run
from cocofl.fl.metrics import MetricFacts
from cocofl.fl.strategies import StrategyFacts, recorded_facts
from cocofl.runlog import EXPERIMENT, METRICS, scores_by_name

TUNING = "tuning"
"""Where a comparison keeps the runs on which it chose learning rates; they are no results."""

# Scores compare only where these agree; everything else is what is being compared.
_SCENE_SECTIONS = ("data", "model", "devices", "metric")
_OF_DATA = ("data.name", "data.split")
"""What says most about a scene."""
# What changes nothing but the seed of a run, its name or its speed.
_NEUTRAL = (
    *("name", "seed", "data.dir"),
    *("engine.kind", "engine.workers", "engine.device", "engine.checkpoint_every"),
)


@dataclass(frozen=True, eq=False)
class Line:
    """One strategy with its settings: the runs that differ by seed only, and a short name."""

    label: str
    runs: tuple[Run, ...]

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.runs[0].experiment.strategy.name

    @cached_property
    def facts(self) -> StrategyFacts:
        """What is known of the strategy."""
        return recorded_facts(self.strategy, self.runs[0].folder.about.get("strategy_facts"))

    @property
    def name(self) -> str:
        """How a sentence calls it."""
        return self.facts.label or self.label

    @property
    def is_bound(self) -> bool:
        """Whether it ignores budgets."""
        return self.facts.is_bound

    @property
    def metric(self) -> MetricFacts:
        """By what it is compared: the first that the experiment names."""
        return self.runs[0].metrics[0]


@dataclass(frozen=True, eq=False)
class Scene:
    """Lines that can be compared. The title says what sets this scene apart from others."""

    title: str
    lines: tuple[Line, ...]

    @property
    def metric(self) -> MetricFacts:
        """By what its lines are compared."""
        return self.lines[0].metric

    @property
    def other_metrics(self) -> list[MetricFacts]:
        """What else the models of some lines were tested for."""
        found = {one.name: one for line in self.lines for one in line.runs[0].metrics}
        return [one for name, one in found.items() if name != self.metric.name]

    @property
    def groups(self) -> list[str]:
        """The device groups of which the metric is known, in every run; none where it has none."""
        key = f"group_{self.metric.name}"
        known = [scores_by_name(r.final.scores, key) for line in self.lines for r in line.runs]
        return [group for group in known[0] if all(group in one for one in known)]


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The run folders at or below these paths, each once, without those of tuning."""
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise RunFolderProblem(f"{path} is not a folder; expected a run or a comparison")
        below = [path] if (path / EXPERIMENT).is_file() else _below(path)
        if not below:
            raise RunFolderProblem(
                f"{path} holds no run: neither it nor a folder below it has an {EXPERIMENT}"
            )
        for folder in below:
            found.setdefault(folder.resolve(), Run.open(folder))
    return list(found.values())


def _below(path: Path) -> list[Path]:
    folders = (file.parent for file in path.rglob(EXPERIMENT))
    runs = [folder for folder in folders if TUNING not in folder.relative_to(path).parts]
    # In the order in which they were made: that of the comparison.
    return sorted(runs, key=lambda run: ((run / EXPERIMENT).stat().st_mtime_ns, run))


def arrange(runs: Sequence[Run]) -> list[Scene]:
    """Scenes of lines of runs, in the order in which they came."""
    evaluated = [run for run in runs if run.evaluated]
    if not evaluated:
        names = ", ".join(str(run.path) for run in runs[:3])
        raise RunFolderProblem(
            f"nothing to report yet: {names} {'has' if len(runs) == 1 else 'have'} no evaluated "
            f"round in {METRICS}"
        )
    scenes = []
    for title, members in _told_apart(evaluated, scene=True):
        data = members[0].experiment.data
        scenes.append(Scene(title or f"{data.title}, split {data.split}", tuple(_lines(members))))
    return scenes


def _lines(members: Sequence[Run]) -> Iterator[Line]:
    by_strategy: dict[str, list[Run]] = {}
    for run in members:
        by_strategy.setdefault(run.experiment.strategy.name, []).append(run)
    for name, alike in by_strategy.items():
        for title, runs in _told_apart(alike, scene=False):
            ordered = sorted(runs, key=attrgetter("experiment.seed"))
            yield Line(f"{name}, {title}" if title else name, tuple(ordered))


def _told_apart(runs: Sequence[Run], *, scene: bool) -> Iterator[tuple[str, list[Run]]]:
    """The runs of each scene (or line of one), under what sets it apart from the others."""
    groups: dict[str, list[Run]] = {}
    settings: list[dict[str, Any]] = []
    for run in runs:
        flat = run.experiment.by_key() | {"metric": run.metrics[0].name}
        own = {
            key: value
            for key, value in flat.items()
            if key not in _NEUTRAL and (key.partition(".")[0] in _SCENE_SECTIONS) == scene
        }
        group = groups.setdefault(json.dumps(own, sort_keys=True, default=str), [])
        settings += [own] if not group else []
        group.append(run)
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [
        key for key in keys if len({json.dumps(one.get(key), default=str) for one in settings}) > 1
    ]
    if scene:
        differing = _telling(differing, settings)
    for own, group in zip(settings, groups.values(), strict=True):
        yield ", ".join(_words(key, own.get(key)) for key in differing), group


def _telling(keys: Iterable[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    """As few of the keys as tell all settings apart, of the data first."""
    chosen: list[str] = []

    def told(by: Sequence[str]) -> int:
        return len({json.dumps([one.get(key) for key in by], default=str) for one in settings})

    for key in sorted(keys, key=lambda key: key not in _OF_DATA):
        if told([*chosen, key]) > told(chosen):
            chosen.append(key)
    return chosen


def _words(key: str, value: Any) -> str:
    """A setting in a title."""
    text = "–" if value is None else str(value)
    return text if key == "data.name" else f"{key.rpartition('.')[2]} {text}"
