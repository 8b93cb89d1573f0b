"""``cocofl run``, ``compare`` and ``evaluate``: federated simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cocofl.budget import bytes_text
from cocofl.cli.outputs import check_writable
from cocofl.cli.printing import Json, Trust, print_json, print_table, right, stoppable
from cocofl.cli.reporting import report_of
from cocofl.comparison import Comparison, Row
from cocofl.comparison import compare as compare_strategies
from cocofl.config import Experiment, parse_value
from cocofl.engine.rounds import Watcher
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Run, evaluate_run, simulate
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.fl.strategies.facts import BASELINE, PROPOSED
from cocofl.named import EVERYTHING, names_in, vouch_for
from cocofl.runlog import FATES
from cocofl.trackers import tracker

File = Annotated[
    Path | None, typer.Argument(help="An experiment in TOML; default: the quick start on digits.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, such as training.lr=0.05; repeatable.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the run was interrupted.")]
Page = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")
]


# What a comparison without a file changes of the quick start: many runs in a few minutes, and
# statistics of the test batch, because in so few steps FjORD's running ones, which only some
# mini-batches move, lag behind its weights (by up to 50 points of accuracy).
QUICK = {
    "name": "digits",
    "rounds": 30,
    "evaluation.every": 10,
    "evaluation.statistics": "batch",
}


def run(
    file: File = None,
    changes: Changes = None,
    resume: Resume = False,
    out: Annotated[Path | None, typer.Option(help="The run folder; default: runs/NAME.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="serial, cohort (default on a GPU), or flower: its simulation on Ray."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where a cohort computes: cuda, cuda:1, cpu.")
    ] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; repeatable.")
    ] = None,
    page: Page = True,
    as_json: Json = False,
) -> None:
    """Run one experiment: devices of unequal strength train a model together.

    Example: cocofl run experiment.toml --set strategy.name=heterofl --out runs/heterofl
    """
    experiment = read_experiment(file, changes)
    if device is not None:
        experiment = experiment.changed({"engine.device": device, "engine.kind": "cohort"})
    if engine is not None:
        experiment = experiment.changed({"engine.kind": engine})
    path = out or experiment.folder
    if not path.exists():
        check_writable(path, "--out")
    with stoppable(path, "the same command with --resume"), ProgressBar(experiment) as bar:
        watchers: list[Watcher] = [bar, *(tracker(name, experiment, path) for name in track or [])]
        play = _flower() if experiment.engine.kind == "flower" else simulate
        done = play(experiment, out=path, resume=resume, watchers=watchers)
    drawn = report_of(done.path) if page else None
    if as_json:
        print_json({"run": str(done.path), **_summary(done)})
        return
    _print_summary(done)
    if drawn:
        print(drawn)


def compare(
    file: File = None,
    changes: Changes = None,
    strategies: Annotated[str, typer.Option(help="Separated by commas; default: all.")] = ",".join(
        STRATEGIES
    ),
    seeds: Annotated[int, typer.Option(min=1, help="How many runs of each.")] = 3,
    splits: Annotated[
        str | None, typer.Option(help="Separated by commas; default: rc,iid without a file.")
    ] = None,
    lr_grid: Annotated[
        str | None,
        typer.Option(help="Learning rates to choose from for each strategy; '' keeps the file's."),
    ] = None,
    resume: Resume = False,
    out: Annotated[Path, typer.Option(help="A folder for all runs.")] = Path("runs/comparison"),
    page: Page = True,
    as_json: Json = False,
) -> None:
    """Compare strategies over several seeds: accuracy overall and per group, mean ± std.

    Example: cocofl compare --strategies cocofl,heterofl --seeds 1 --out runs/two
    """
    experiment = read_experiment(file, changes, QUICK if file is None else {})
    vouch_for(*_words(strategies))
    if not out.exists():
        check_writable(out, "--out")
    with stoppable(out, "the same command with --resume"), ProgressBar(experiment) as bar:
        comparison = compare_strategies(
            experiment,
            strategies=_words(strategies),
            seeds=range(experiment.seed, experiment.seed + seeds),
            splits=_words(splits) if splits else (["rc", "iid"] if file is None else None),
            lr_grid=_grid(lr_grid, default=file is None),
            out=out,
            resume=resume,
            watchers=[bar],
            announce=bar.announce,
        )
    drawn = report_of(out) if page else None
    if as_json:
        print_json(comparison.to_dict())
        return
    _print_comparison(comparison)
    if drawn:
        print(drawn)


def evaluate(
    path: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str | None, typer.Option(help="Another data set.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where it is.")] = None,
    statistics: Annotated[
        str | None, typer.Option(help="BatchNorm's: running, or those of each test batch.")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Test a run's final model, or its last checkpoint.

    Example: cocofl evaluate runs/quickstart --statistics batch
    """
    vouch_for(*[EVERYTHING] * trust, data or "")
    changes: dict[str, Any] = {
        key: str(value)
        for key, value in (
            ("data.name", data),
            ("data.dir", data_dir),
            ("evaluation.statistics", statistics),
        )
        if value is not None
    }
    found = evaluate_run(path, changes=changes)
    if as_json:
        print_json(found)
        return
    table = Table("", right("accuracy"))
    table.add_row("all", f"{found['accuracy']:.1%}")
    for group, accuracy in found["group_accuracy"].items():
        table.add_row(group, f"{accuracy:.1%}")
    print_table(table)
    print(f"macro F1 {found['f1']:.3f}")


class ProgressBar:
    """Rounds, accuracy and time left, on a terminal; silent elsewhere."""

    def __init__(self, experiment: Experiment) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._rounds = experiment.rounds
        self._name = experiment.strategy.name
        self._task = self._bar.add_task(self._name, total=experiment.rounds)
        self._accuracy = ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def announce(self, name: str, rounds: int) -> None:
        """Another run begins."""
        self._name, self._rounds, self._accuracy = name, rounds, ""
        self._bar.reset(self._task, total=rounds, description=name)

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Move on."""
        if "accuracy" in record:
            self._accuracy = f" {record['accuracy']:.1%}"
        self._bar.update(
            self._task,
            completed=record["round"],
            description=f"{self._name}{self._accuracy}",
        )

    def on_end(self) -> None:
        """Nothing is left to show."""


def read_experiment(
    file: Path | None, changes: list[str] | None, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Experiment:
    """The file, or the quick start, with ``key=value`` changes."""
    pairs = dict(defaults)
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals:
            raise InvalidExperiment(f"--set {change}: expected key=value, like training.lr=0.05")
        pairs[key.strip()] = parse_value(value.strip())
    experiment = Experiment.load(file, pairs) if file else Experiment().changed(pairs)
    vouch_for(*names_in(experiment.by_key()))
    return experiment


def _flower() -> Callable[..., Run]:
    """Flower is an extra, and slow to import: only who asks for it needs it."""
    try:
        on_flower: Callable[..., Run] = import_module("cocofl.flower.simulation").simulate
    except ModuleNotFoundError as error:
        raise InvalidExperiment(
            f"engine.kind is flower, which needs {error.name}: pip install 'cocofl[flower]'"
        ) from error
    return on_flower


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _grid(text: str | None, *, default: bool) -> list[float] | None:
    if text is None:
        return [0.1, 0.3, 1.0] if default else None
    try:
        return [float(word) for word in _words(text)] or None
    except ValueError as error:
        raise InvalidExperiment(f"--lr-grid {text}: {error}") from error


def _summary(done: Run) -> dict[str, Any]:
    rounds, final = done.rounds, done.final
    return {
        "strategy": done.experiment.strategy.name,
        "rounds": len(rounds),
        "accuracy": final["accuracy"],
        "f1": final["f1"],
        "group_accuracy": final["group_accuracy"],
        "simulated_s": sum(record["simulated_s"] for record in rounds),
        "bytes_up": sum(record["bytes_up"] for record in rounds),
        **{status: sum(record[status] for record in rounds) for status in FATES},
        "tables": done.folder.about["tables"],
    }


def _print_summary(done: Run) -> None:
    found = _summary(done)
    table = Table(f"{done.experiment.name}: {found['strategy']}", right(""))
    table.add_row("accuracy", f"{found['accuracy']:.1%}")
    table.add_row("macro F1", f"{found['f1']:.3f}")
    for group, accuracy in found["group_accuracy"].items():
        table.add_row(f"accuracy of {group}", f"{accuracy:.1%}")
    table.add_row("simulated time", f"{found['simulated_s']:.1f} s")
    table.add_row("uploaded", bytes_text(found["bytes_up"]))
    for status in FATES:
        if found[status]:
            table.add_row(f"updates {status}", str(found[status]))
    print_table(table)
    for served in found["tables"].values():
        print(f"table: {served}")
    print(f"run folder: {done.path}")


def _print_comparison(comparison: Comparison) -> None:
    groups = comparison.groups
    for split in comparison.splits:
        title = f"{split}, {comparison.seeds} seeds, accuracy in %, mean ± std"
        table = Table("strategy", right("lr"), right("all"), *map(right, groups), title=title)
        for row in comparison.rows:
            if row.split == split:
                cells = (_mean(row.groups[group]) for group in groups)
                table.add_row(row.strategy, f"{row.lr:g}", _mean(row.accuracy), *cells)
        print_table(table)
    for line in best_rivals(comparison):
        print(line)
    for strategy, served in comparison.tables.items():
        print(f"table of {strategy}: {served}")
    if comparison.lr_grid:
        grid = ", ".join(f"{lr:g}" for lr in comparison.lr_grid)
        print(f"learning rate: for each strategy and split the best of {grid}, by another seed")
    print(f"runs: {comparison.path}")


def best_rivals(comparison: Comparison) -> list[str]:
    """One line per split: how far what is proposed is ahead of the others that obey budgets."""
    lines = []
    for split in comparison.splits:
        rows = {row.strategy: row for row in comparison.rows if row.split == split}
        facts = {name: facts_of(name) for name in rows}
        in_order = sorted(rows, key=lambda name: facts[name].order)
        rivals = [name for name in in_order if facts[name].role == BASELINE]
        for name in in_order if rivals else ():
            if facts[name].role == PROPOSED:
                leads = (f"{rival} {_ahead(rows[name], rows[rival]):+.1f}" for rival in rivals)
                who = facts[name].label or name
                lines.append(f"{split}: {who} ahead, in points: {', '.join(leads)}")
    return lines


def _ahead(one: Row, other: Row) -> float:
    return 100 * (one.accuracy[0] - other.accuracy[0])


def _mean(pair: tuple[float, float]) -> str:
    return f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f}"
