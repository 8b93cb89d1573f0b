"""What runs came to, one line per run and kind of norm statistics, and nothing without its origin.

The same lines are a CSV file: small enough to publish, and enough to make every table again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from cocofl.config import Experiment
from cocofl.errors import InvalidSetting
from cocofl.experiment import Run, Spread
from cocofl.files import read_csv, write_text
from cocofl.fl.strategies import recorded_facts
from cocofl.fl.strategies.facts import WIDTHS
from cocofl.profiling.table import PREFIX
from cocofl.report.tables import TextTable
from cocofl.reproduction.collection import Collection, is_ablation
from cocofl.reproduction.plans import Name, label_of, shortened, strategy_of
from cocofl.runlog import EXPERIMENT, Scores, metric_names, scores_by_name

LATE_EVALUATIONS = 10
LATE = "last ten"
"""Instead of a kind of statistics: the mean of a run's last evaluations.

With ten devices a round, the last round says as much about these ten as about the strategy.
"""


@dataclass(frozen=True)
class Result:
    """The end of one run, evaluated with one kind of norm statistics; or its :data:`LATE` mean."""

    row: str
    strategy: str
    """The run's label: the strategy, and what sets it apart."""
    seed: int
    rounds: int
    statistics: str
    table: str
    """Which profile table served it, and where that was measured."""
    changes: str
    """In what its settings differ from the row's file."""
    minutes: float
    engine: str
    hardware: str
    cocofl: str
    torch: str
    python: str
    commit: str
    scores: Mapping[str, float] = field(default_factory=dict)
    """By metric."""
    groups: Mapping[str, float] = field(default_factory=dict)
    """What each group of devices has of the first metric."""

    def value(self, which: str) -> float | None:
        """Of a metric, or of a group."""
        return self.scores.get(which, self.groups.get(which))


_PLAIN = tuple(f.name for f in fields(Result) if f.name not in ("scores", "groups"))
_SPLIT = _PLAIN.index("table")
"""Metrics stand before this column, groups behind the last."""
_NUMBERS = {"seed": int, "rounds": int, "minutes": float}


def find(out: Path, collection: Collection, rows: Sequence[str]) -> tuple[list[Result], list[str]]:
    """The results of all complete runs of these rows below ``out``; and why others are left out."""
    results: list[Result] = []
    left_out: list[str] = []
    for path in sorted(out.iterdir()) if out.is_dir() else []:
        name = Name.parse(path.name)
        if name is None or name.row not in rows or not (path / EXPERIMENT).is_file():
            continue
        run, of_row = Run.open(path), collection.experiment(name.row)
        # What a label says is not in it.
        expected = of_row.changed({"seed": name.seed, **shortened(of_row, name.rounds)})
        if not run.folder.is_complete:
            left_out.append(f"{name} is unfinished: {_state(run)}")
        elif problem := _misnamed(name, run.experiment, expected):
            left_out.append(f"{name} is left out, for it is not what its name says: {problem}")
        else:
            results += _results_of(run, name, expected)
    return results, left_out


def gather(results: Iterable[Result], more: Iterable[Result]) -> list[Result]:
    """Both, each run once: what the first has is not taken from the second."""
    by_key = {_key(result): result for result in (*more, *results)}
    return sorted(by_key.values(), key=_key)


def spread(
    results: Iterable[Result], row: str, label: str, statistics: str, which: str
) -> Spread | None:
    """Mean and standard deviation over the seeds that were run; None where none was."""
    values = [
        value
        for result in results
        if (result.row, result.strategy, result.statistics) == (row, label, statistics)
        and (value := result.value(which)) is not None
    ]
    return Spread.of(values) if values else None


def write(path: Path, results: Sequence[Result]) -> None:
    """As CSV."""
    metrics = list(dict.fromkeys(name for result in results for name in result.scores))
    groups = list(dict.fromkeys(group for result in results for group in result.groups))
    lines = []
    for one in results:
        plain = [str(getattr(one, name)) for name in _PLAIN]
        scores = [str(one.scores.get(name, "")) for name in metrics]
        of_groups = [str(one.groups.get(group, "")) for group in groups]
        lines.append((*plain[:_SPLIT], *scores, *plain[_SPLIT:], *of_groups))
    header = (*_PLAIN[:_SPLIT], *metrics, *_PLAIN[_SPLIT:], *groups)
    write_text(path, TextTable("", header, tuple(lines)).csv())


def read(path: Path) -> list[Result]:
    """What :func:`write` wrote."""
    try:
        return [_parse(line) for line in read_csv(path)]
    except KeyError as error:
        raise InvalidSetting(f"{path} is not a file of results: it lacks column {error}") from error
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{path} is not a file of results: {error}") from error


def _parse(line: Mapping[str, str]) -> Result:
    plain: dict[str, Any] = {name: _NUMBERS.get(name, str)(line[name]) for name in _PLAIN}
    names = list(line)
    scores, groups = (
        {key: float(line[key]) for key in keys if key not in _PLAIN and line[key]}
        for keys in (names[: names.index("table")], names[names.index("table") :])
    )
    for name in _NUMBERS:
        if not 0 <= plain[name] < 2**63:  # nor is it NaN
            raise ValueError(f"{name} is {line[name][:40]!r}; expected a number from 0")
    return Result(**plain, scores=scores, groups=groups)


def _results_of(run: Run, name: Name, expected: Experiment) -> list[Result]:
    experiment, by_group = run.experiment, f"group_{run.metrics[0].name}"
    seconds = sum(line["train_s"] + line["evaluate_s"] for line in run.folder.timing())
    origin = {
        key: run.folder.origin(key)
        for key in ("engine", "hardware", "cocofl", "torch", "python", "commit")
    }
    return [
        Result(
            row=name.row,
            strategy=name.label,
            seed=experiment.seed,
            rounds=experiment.rounds,
            statistics=statistics,
            table=run.folder.by_part(partial(_table, experiment)),
            changes=_changes(name, experiment, expected),
            minutes=round(seconds / 60, 1),
            scores=_means([{key: one[key] for key in metric_names(one)} for one in found]),
            groups=_means([scores_by_name(one, by_group) for one in found]),
            **origin,
        )
        for statistics, found in _tested(run).items()
    ]


def _tested(run: Run) -> dict[str, list[Scores]]:
    """The end with each kind of statistics, and the last evaluations where there are enough."""
    last = [record.scores for record in run.evaluated[-LATE_EVALUATIONS:]]
    late = {LATE: last} if len(last) == LATE_EVALUATIONS else {}
    return {kind: [scores] for kind, scores in run.final_by_statistics.items()} | late


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(fmean(one[key] for one in found), 6) for key in found[0]}


def without_folder(description: str) -> str:
    """A table's description; a file by its name, wherever it was.

    >>> without_folder("/home/me/x64.json: MobileNet"), without_folder("measured:epyc-cnn/f: cnn")
    ('x64.json: MobileNet', 'measured:epyc-cnn/f: cnn')
    """
    source, colon, rest = description.partition(": ")
    return description if source.startswith(PREFIX) else f"{Path(source).name}{colon}{rest}"


def _table(experiment: Experiment, about: Mapping[str, Any]) -> str:
    """The table that said what fits."""
    options = experiment.strategy.options
    needed = recorded_facts(experiment.strategy.name, about.get("strategy_facts")).tables
    if not needed:
        return ""
    kind = "width" if needed == WIDTHS else options.get("costs") or options.get("variant") or "qff"
    return without_folder(about.get("tables", {}).get(str(kind), ""))


def _misnamed(name: Name, experiment: Experiment, expected: Experiment) -> str:
    """What a run is, where its name says otherwise."""
    if experiment.seed != name.seed:
        return f"seed {experiment.seed}"
    if experiment.rounds != expected.rounds:
        return f"{experiment.rounds} rounds"
    strategy = experiment.strategy.name
    if is_ablation(name.row):
        label = label_of(experiment)
        return "" if label == name.label else f"{label or experiment.devices.groups}"
    return "" if strategy == strategy_of(name.label) else f"strategy {strategy}"


def _changes(name: Name, experiment: Experiment, expected: Experiment) -> str:
    """In what a run differs from its file, beyond what its name says."""
    ours, theirs = (one.without_places().by_key() for one in (experiment, expected))
    in_the_name = {"name", "strategy.name"}
    if is_ablation(name.row):
        in_the_name |= {"devices.groups", *(key for key in ours if key.startswith("strategy."))}
    elif strategy_of(name.label) != name.label:
        in_the_name |= {"tables.spans", "tables.widths"}
    return "; ".join(
        f"{key}={value}"
        for key, value in ours.items()
        if key not in in_the_name and value != theirs.get(key)
    )


def _state(run: Run) -> str:
    if not run.evaluated:
        return f"{len(run.rounds)} of {run.experiment.rounds} rounds"
    said = ", ".join(run.metrics[0].found_in(run.final.scores))
    return f"{said} after round {run.final.round} of {run.experiment.rounds}"


def _key(result: Result) -> tuple[str, str, int, int, str]:
    return result.row, result.strategy, result.seed, result.rounds, result.statistics
