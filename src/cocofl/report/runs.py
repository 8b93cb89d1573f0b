"""Which runs to report, and which of them belong together.

Runs that differ by their seed only are one *line*. Lines on the same data, model and devices that
are judged by the same metric first can be compared and make one *scene*.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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

    @property
    def first(self) -> Run:
        """Any of its runs; they agree on data, model and devices."""
        return self.lines[0].runs[0]


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
    flat = {
        run.path: run.experiment.by_key() | {"metric": run.metrics[0].name} for run in evaluated
    }
    scenes: dict[str, list[Run]] = {}
    for run in evaluated:
        scenes.setdefault(_key(flat[run.path], scene=True), []).append(run)
    titles = _titles([flat[members[0].path] for members in scenes.values()], scene=True)
    return [
        Scene(title or _default_title(members[0]), _lines(members, flat))
        for title, members in zip(titles, scenes.values(), strict=True)
    ]


def _lines(members: Sequence[Run], flat: Mapping[Path, Mapping[str, Any]]) -> tuple[Line, ...]:
    lines: dict[str, list[Run]] = {}
    for run in members:
        lines.setdefault(_key(flat[run.path], scene=False), []).append(run)
    by_name: dict[str, list[list[Run]]] = {}
    for runs in lines.values():
        by_name.setdefault(runs[0].experiment.strategy.name, []).append(runs)
    made: list[Line] = []
    by_seed = attrgetter("experiment.seed")
    for name, alike in by_name.items():
        titles = _titles([flat[runs[0].path] for runs in alike], scene=False)
        made += [
            Line(f"{name}, {title}" if title else name, tuple(sorted(runs, key=by_seed)))
            for title, runs in zip(titles, alike, strict=True)
        ]
    return tuple(made)


def _tells_apart(key: str, *, scene: bool) -> bool:
    """Whether a setting sets scenes (or the lines of one) apart."""
    return key not in _NEUTRAL and (key.split(".", maxsplit=1)[0] in _SCENE_SECTIONS) == scene


def _key(settings: Mapping[str, Any], *, scene: bool) -> str:
    chosen = {key: value for key, value in settings.items() if _tells_apart(key, scene=scene)}
    return json.dumps(chosen, sort_keys=True, default=str)


def _titles(settings: Sequence[Mapping[str, Any]], *, scene: bool) -> list[str]:
    """For each what sets it apart from the others."""
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differing = [
        key
        for key in keys
        if _tells_apart(key, scene=scene)
        and len({json.dumps(one.get(key), default=str) for one in settings}) > 1
    ]
    return [
        ", ".join(f"{key.split('.')[-1]} {_text(one.get(key))}" for key in differing)
        for one in settings
    ]


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _default_title(run: Run) -> str:
    data = run.experiment.data
    return f"{data.name}, split {data.split}"
