"""``cocofl run``, ``compare``, ``evaluate`` and ``report``: federated simulation."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cocofl.cli.printing import (
    Json,
    Trust,
    check_writable,
    drawing,
    key_values,
    numbers,
    print_json,
    print_text_table,
    stoppable,
    words,
)
from cocofl.comparison import compare as compare_strategies
from cocofl.config import Experiment
from cocofl.engine.rounds import Watcher
from cocofl.errors import CocoflError, InvalidExperiment, InvalidSetting
from cocofl.experiment import Run, Watch, evaluate_run, simulate
from cocofl.fl.metrics import metric
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.named import EVERYTHING, names_in, vouch_for
from cocofl.report.findings import summary
from cocofl.report.runs import Scene, arrange, find_runs
from cocofl.report.tables import TextTable, highlights, margins_text, summary_table
from cocofl.runlog import ABOUT, FATES, METRICS, RoundRecord, metric_names, scores_by_name
from cocofl.trackers import tracking

File = Annotated[
    Path | None, typer.Argument(help="An experiment in TOML; default: the quick start on digits.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, such as training.lr=0.05; repeatable.")
]
Track = Annotated[list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; repeatable.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the run was interrupted.")]
Page = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")
]


ALL = "all"

# What a comparison without a file changes of the quick start: many runs in a few minutes, and
# statistics of the test batch, because in so few steps FjORD's running ones, which only some
# mini-batches move, lag behind its weights (by up to 50 points of accuracy).
QUICK = {
    "name": "digits",
    "rounds": 30,
    "evaluation.every": 10,
    "evaluation.statistics": "batch",
}
QUICK_GRID = [0.1, 0.3, 1.0]
PAPER_STRATEGIES = ",".join(name for name in STRATEGIES if facts_of(name).in_paper)


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
    track: Track = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep a page about the run up to date, and open it.")
    ] = False,
    page: Page = True,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run one experiment: devices of unequal strength train a model together.

    Example: cocofl run experiment.toml --set strategy.name=heterofl --out runs/heterofl
    """
    experiment = read_experiment(file, changes, trust=trust)
    if device is not None:
        experiment = experiment.changed({"engine.device": device, "engine.kind": "cohort"})
    if engine is not None:
        experiment = experiment.changed({"engine.kind": engine})
    path = out or experiment.folder
    if not path.exists():
        check_writable(path, "--out")
    on_flower = experiment.engine.kind == "flower"
    play = needs_flower("simulation").simulate if on_flower else simulate
    with stoppable(path, "the same command with --resume"), tracking(track or []) as trackers:
        with ProgressBar(experiment) as bar, live_view(wanted=watch) as live:
            done: Run = play(
                experiment,
                out=path,
                resume=resume,
                watchers=[bar],
                watch=lambda *of: [*live(*of), *trackers.watch(*of)],
            )
        drawn = report_of(done.path) if page else ""
    if as_json:
        print_json({"run": str(done.path), **_summary(done)})
    else:
        (scene,) = arrange([done])
        title = f"{experiment.name}: {experiment.strategy.name}"
        served = (f"table: {one}" for one in done.folder.about["tables"].values())
        notes = (*served, f"run folder: {done.path}", *filter(None, [drawn]))
        print_text_table(TextTable("", (title, ""), tuple(highlights(scene).items()), notes))
    fail_if_nothing_was_merged([done])


def compare(
    file: File = None,
    changes: Changes = None,
    strategies: Annotated[
        str, typer.Option(help="Separated by commas, or all that suit; default: the paper's.")
    ] = PAPER_STRATEGIES,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs of each.")] = 3,
    splits: Annotated[
        str | None, typer.Option(help="Separated by commas; default: rc,iid without a file.")
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Values of devices.groups, as paper,limited:0.25; default: its own.")
    ] = "",
    lr_grid: Annotated[
        str | None,
        typer.Option(help="Learning rates to choose from for each strategy; '' keeps the file's."),
    ] = None,
    resume: Resume = False,
    out: Annotated[Path, typer.Option(help="A folder for all runs.")] = Path("runs/comparison"),
    track: Track = None,
    page: Page = True,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare strategies over several seeds: how good they are overall and per group, mean ± std.

    Example: cocofl compare --strategies cocofl,heterofl --seeds 1 --out runs/two
    """
    experiment = read_experiment(file, changes, QUICK if file is None else {}, trust=trust)
    asked = words(strategies)
    names = _each_once(asked)
    vouch_for(*names)
    grid = QUICK_GRID if lr_grid is None and file is None else numbers(lr_grid or "", "--lr-grid")
    if not out.exists():
        check_writable(out, "--out")
    with stoppable(out, "the same command with --resume"), tracking(track or []) as trackers:
        trackers.begin_comparison(out, experiment)
        with ProgressBar(experiment) as bar:
            runs = compare_strategies(
                experiment,
                strategies=names,
                seeds=range(experiment.seed, experiment.seed + seeds),
                splits=words(splits or "")
                or (["rc", "iid"] if file is None else [experiment.data.split]),
                lr_grid=grid,
                out=out,
                resume=resume,
                watchers=[bar],
                watch=trackers.watch,
                announce=bar.announce,
                budgets=words(budgets),
                leave_out=_say_left_out if ALL in asked else None,
            )
        drawn = report_of(out) if page else ""
    if as_json:
        rows = [row for scene in arrange(runs) for row in _rows(scene)]
        print_json({"path": str(out), "lr_grid": grid, "rows": rows})
    else:
        _print_comparison(runs, grid, [f"runs: {out}", drawn])
    fail_if_nothing_was_merged(runs)


def _print_comparison(runs: Sequence[Run], grid: Sequence[float], places: Sequence[str]) -> None:
    scenes = arrange(runs)
    for scene in scenes:
        print_text_table(summary_table(scene, costs=False))
    leads = [f"{one.title}: {text}" for one in scenes if (text := margins_text(one))]
    tables = {run.experiment.strategy.name: run.folder.about["tables"].values() for run in runs}
    served = [f"table of {name}: {'; '.join(found)}" for name, found in tables.items()]
    tried = ", ".join(f"{lr:g}" for lr in grid)
    chosen = f"learning rate: for each strategy and split the best of {tried}, by another seed"
    print("\n".join([*leads, *served, *[chosen] * bool(grid), *places]).rstrip())


WHY_NOT_MERGED = {
    "rejected": "what devices sent was not finite; try a smaller training.lr",
    "lost": "see [faults]",
    "late": "see [faults]",
    "infeasible": "nothing fits the devices' budgets",
}


def fail_if_nothing_was_merged(runs: Sequence[Run]) -> None:
    """Exit with 1 and a word where devices were asked in vain, so that no script takes it for one.

    Everything is written down all the same.
    """
    empty = [run for run in runs if run.rounds and not run.fates["merged"]]
    for run in empty:
        (fate, _), *_ = [*run.fates.most_common(1), ("infeasible", 0)]
        found = ", ".join(f"{count} {one}" for one, count in run.fates.items()) or "nobody asked"
        print(
            f"failed: no update was merged in {len(run.rounds)} rounds of {run.path} ({found}): "
            f"its model is the one it began with; {WHY_NOT_MERGED[fate]}",
            file=sys.stderr,
        )
    if empty:
        raise typer.Exit(1)


def _each_once(asked: Sequence[str]) -> list[str]:
    """The strategies that are asked for: all of them, and any of one's own beside them."""
    found = (STRATEGIES if name == ALL else (name,) for name in asked)
    return list(dict.fromkeys(chain.from_iterable(found)))


def _say_left_out(strategy: str, reason: str) -> None:
    print(f"left out: {strategy}: {reason}", file=sys.stderr)


def evaluate(
    path: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str | None, typer.Option(help="Another data set.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where it is.")] = None,
    statistics: Annotated[
        str | None, typer.Option(help="BatchNorm's: running, or those of each test batch.")
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="The mean over rounds (evaluation.average).")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Test a run's final model, its last checkpoint, or its mean over rounds.

    Example: cocofl evaluate runs/quickstart --statistics batch
    """
    vouch_for(*[EVERYTHING] * trust, data or "")
    asked = {"data.name": data, "data.dir": data_dir, "evaluation.statistics": statistics}
    changes = {key: str(value) for key, value in asked.items() if value is not None}
    found = evaluate_run(path, changes=changes, average=average)
    if as_json:
        print_json({**found, "model": "average" if average else "last"})
        return
    metrics = Run.open(path).facts_of(found)
    groups = {one.name: scores_by_name(found, f"group_{one.name}") for one in metrics}
    rows = {"all": found, **{group: {} for of_one in groups.values() for group in of_one}}
    columns = {"": list(rows)}
    for one in metrics:
        values = {"all": found[one.name], **groups[one.name]}
        columns[one.name] = [one.text(values[row]) if row in values else "" for row in rows]
    which = "the mean over rounds" if average else "the model of the last round"
    print_text_table(TextTable.of(which, columns))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the first folder.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="A folder for the figures as PNG and SVG.")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a page about one run, several, or a comparison: one file, nothing to install.

    Example: cocofl report runs/comparison --figures figures
    """
    vouch_for(*[EVERYTHING] * trust)
    if out is not None and out.is_dir():
        raise InvalidSetting(f"{out} is a folder; expected the name of a page, like page.html")
    check_writable(out or runs[0] / "report.html", "--out")
    if figures is not None:
        check_writable(figures / "accuracy.png", "--figures")
    found = find_runs(runs)
    with drawing():
        # Drawing takes longer to import than everything else here, and is an extra.
        from cocofl.report.writing import write_report  # noqa: PLC0415

        page = write_report(found, out or runs[0] / "report.html")
        drawn: list[Path] = []
        if figures is not None:
            from cocofl.report.figures import save_figures  # noqa: PLC0415

            drawn = save_figures(found, figures)
    if as_json:
        scenes = [{"scene": one.title, "rows": _rows(one)} for one in arrange(found)]
        print_json({"page": str(page), "figures": [str(path) for path in drawn], "scenes": scenes})
        return
    print(f"report: {page}")
    if drawn:
        print(f"figures: {len(drawn)} files in {figures}")


def report_of(path: Path) -> str:
    """Write the page of a folder that was just made, and say where it is.

    The runs are done and safe: that no page can be drawn is said, not raised.
    """
    try:
        with drawing():
            from cocofl.report.writing import write_report  # noqa: PLC0415

            return f"report: {write_report(find_runs([path]), path / 'report.html')}"
    except (CocoflError, OSError) as error:
        return f"no report: {error}"


@contextmanager
def live_view(*, wanted: bool) -> Iterator[Watch]:
    """A page for each run that begins inside, where ``wanted``; who has a screen sees it."""
    if not wanted:
        yield lambda _path, _experiment: ()
        return
    with drawing():
        from cocofl.report.live import LiveView  # noqa: PLC0415

    def watch(path: Path, experiment: Experiment) -> list[Watcher]:
        view = views.enter_context(LiveView(experiment, path))
        print(f"watch: {view.page}", file=sys.stderr)
        if sys.stderr.isatty() and has_screen(os.environ):
            webbrowser.open(view.page.absolute().as_uri())
        return [view]

    with ExitStack() as views:
        yield watch


def has_screen(environment: Mapping[str, str]) -> bool:
    """Whether a browser opens in a window; one of text would take the terminal over.

    >>> has_screen({"DISPLAY": ":0"})
    True
    """
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys())


class ProgressBar(Progress):
    """Rounds, the first metric and time left, on a terminal; silent elsewhere."""

    def __init__(self, experiment: Experiment) -> None:
        console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        described = TextColumn("{task.description}")
        super().__init__(described, *columns, console=console, disable=not console.is_terminal)
        self._name = experiment.strategy.name
        self._task = self.add_task(self._name, total=experiment.rounds)
        self._headline = metric(experiment.evaluation.metrics[0]).facts
        self._found = ""

    def announce(self, name: str, rounds: int) -> None:
        """Another run begins."""
        self._name, self._found = name, ""
        self.reset(self._task, total=rounds, description=name)

    def on_round(self, record: RoundRecord) -> None:
        """Move on."""
        self._found = " ".join(self._headline.found_in(record.scores)) or self._found
        description = f"{self._name} {self._found}".rstrip()
        self.update(self._task, completed=record.round, description=description)

    def on_end(self) -> None:
        """Nothing is left to show."""


def read_experiment(
    file: Path | None,
    changes: list[str] | None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    trust: bool = False,
) -> Experiment:
    """The file, or the quick start, with ``key=value`` changes.

    What the user's own file names is imported; what lies in a run folder was written by a program,
    and may come from anywhere.
    """
    pairs = {**defaults, **key_values(changes, "--set", "training.lr=0.05")}
    experiment = Experiment.load(file, pairs) if file else Experiment().changed(pairs)
    in_a_run = file is not None and any((file.parent / one).exists() for one in (ABOUT, METRICS))
    vouch_for(*[EVERYTHING] * trust, *(names_in(pairs) if in_a_run else experiment.names()))
    return experiment


def needs_flower(name: str) -> Any:
    """A module of ours. Flower is an extra, and slow to import: only who asks for it needs it."""
    try:
        return import_module(f"cocofl.flower.{name}")
    except ModuleNotFoundError as error:
        raise InvalidExperiment(
            f"this needs {error.name}: pip install 'cocofl[flower]' (on a device 'cocofl[device]')"
        ) from error


def _rows(scene: Scene) -> list[dict[str, Any]]:
    return [asdict(summary(line)) for line in scene.lines]


def _summary(done: Run) -> dict[str, Any]:
    rounds, scores = done.rounds, done.final.scores
    by_group = f"group_{done.metrics[0].name}"
    return {
        "strategy": done.experiment.strategy.name,
        "rounds": len(rounds),
        **{name: scores[name] for name in metric_names(scores)},
        by_group: scores_by_name(scores, by_group),
        **({"averaged": done.averaged} if done.averaged else {}),
        "simulated_s": sum(record.simulated_s for record in rounds),
        "bytes_up": sum(record.bytes_up for record in rounds),
        **({} if rounds[-1].epsilon is None else {"epsilon": rounds[-1].epsilon}),
        **(
            {}
            if rounds[-1].energy_j is None
            else {"energy_j": sum(record.energy_j or 0.0 for record in rounds)}
        ),
        **{fate: done.fates[fate] for fate in FATES},
        "tables": done.folder.about["tables"],
    }
