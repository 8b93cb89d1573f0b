"""``cocofl reproduce``: the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from cocofl.cli.printing import (
    check_writable,
    drawing,
    numbers,
    print_text_table,
    stoppable,
    words,
)
from cocofl.cli.running import ProgressBar
from cocofl.errors import InvalidSetting
from cocofl.files import write_text
from cocofl.fl.strategies import facts_of
from cocofl.named import vouch_for
from cocofl.report.tables import TextTable
from cocofl.reproduction import collection as collections
from cocofl.reproduction import plans, results, tables
from cocofl.reproduction.collection import Collection
from cocofl.reproduction.plans import Planned, missing, play
from cocofl.reproduction.results import Result

reproduce_app = typer.Typer(
    name="reproduce",
    help="The paper's tables and figures: run what is missing, show ours beside its numbers.",
    no_args_is_help=True,
)

OUT = Path("runs/paper")
Out = Annotated[Path, typer.Option(help="The folder of all runs; tables and figures go there.")]
ALL_STRATEGIES = ",".join(plans.STRATEGY_ORDER)
FEDERATED = ",".join(n for n in plans.STRATEGY_ORDER if not facts_of(n).all_data_in_one_place)
Strategies = Annotated[str, typer.Option(help="Strategies, separated by commas.")]
SeedsBySize = Annotated[
    int | None, typer.Option(min=1, help="How many runs of each; default: 3, 1 if --small.")
]
Small = Annotated[bool, typer.Option("--small", help="The question at a size for two CPU cores.")]
Rounds = Annotated[
    int | None, typer.Option(min=1, help="Fewer rounds than the paper, decays moved along.")
]
OwnSpans = Annotated[
    str | None,
    typer.Option(
        "--table", help="Another span table (a file, analytic): CoCoFL runs with it, too."
    ),
]
OwnWidths = Annotated[
    str | None,
    typer.Option("--widths", help="Another width table: HeteroFL and FjORD run with it, too."),
]
Read = Annotated[bool, typer.Option("--read", help="Run nothing, show what is there.")]
Listed = Annotated[
    bool, typer.Option("--list", help="Print the commands of the runs that are missing.")
]
Also = Annotated[
    list[Path] | None, typer.Option(help="A CSV of results of runs that are not here; repeatable.")
]


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper: the runs it needs, and what is made of their results."""

    name: str
    files: Collection
    rows: Sequence[str]
    planned: Sequence[Planned]
    tables: Callable[[Sequence[Result]], Sequence[TextTable | None]]
    draw: Callable[[Any, Sequence[Result]], Sequence[Path]] | None = None
    """With the module of figures, which takes longer to import than everything else here."""


@reproduce_app.command()
def table2(
    rows: Annotated[
        str | None, typer.Option(help="Rows, separated by commas; default: all.")
    ] = None,
    strategies: Strategies = ALL_STRATEGIES,
    seeds: SeedsBySize = None,
    rounds: Rounds = None,
    table: OwnSpans = None,
    widths: OwnWidths = None,
    small: Small = False,
    out: Out = OUT,
    read: Read = False,
    listed: Listed = False,
    also: Also = None,
) -> None:
    """Accuracies of all strategies on all data sets, beside the paper's.

    Example: cocofl reproduce table2 --rows mobilenet-cifar10-rc --seeds 1
    """
    vouch_for(*words(strategies))
    files, seeds = _of_size(small, seeds)
    chosen = words(rows or "") or list(files.rows)
    planned = plans.table2(files, chosen, words(strategies), seeds, rounds, table, widths)
    with_central = dict.fromkeys([*chosen, *map(collections.on_one_place, chosen)])
    study = Study(
        "table2",
        files,
        [row for row in with_central if row in files.rows],
        planned,
        lambda found: [tables.of_row(files, found, row) for row in chosen],
    )
    found = _carry_out(study, out=out, read=read, listed=listed, also=also)
    if small and found:
        for row in chosen:
            print(f"ordering found: {tables.ordering(files, found, row)}")


@reproduce_app.command()
def fairness(
    rows: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "mobilenet-cifar10-rc",
    strategies: Strategies = FEDERATED,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs of each, from seed 0.")] = 3,
    rounds: Rounds = None,
    table: OwnSpans = None,
    widths: OwnWidths = None,
    out: Out = OUT,
    read: Read = False,
    listed: Listed = False,
    also: Also = None,
) -> None:
    """What strong, medium and weak devices get of the common model: table and figure.

    Example: cocofl reproduce fairness --rows mobilenet-cifar10-rc --seeds 1
    """
    vouch_for(*words(strategies))
    files, chosen = collections.paper(), words(rows)
    study = Study(
        "fairness",
        files,
        chosen,
        plans.table2(files, chosen, words(strategies), seeds, rounds, table, widths),
        lambda found: [tables.fairness(files, found, row) for row in chosen],
        lambda figures, found: [
            file
            for row in dict.fromkeys(one.row for one in found)
            for file in figures.fairness(files, found, row, out / f"fairness-{row}")
        ],
    )
    _carry_out(study, out=out, read=read, listed=listed, also=also)


def _over_limits(name: str) -> Any:
    """A command that varies something at every limit of devices."""

    def command(
        limits: Annotated[
            str | None, typer.Option(help="Limits, separated by commas; default: all.")
        ] = None,
        seeds: SeedsBySize = None,
        rounds: Rounds = None,
        small: Small = False,
        out: Out = OUT,
        read: Read = False,
        listed: Listed = False,
        also: Also = None,
    ) -> None:
        files, n_seeds = _of_size(small, seeds)
        chosen = _limits(limits) or plans.OVER_LIMITS[name].limits
        study = Study(
            name,
            files,
            [files.ablation],
            plans.over_limits(files, name, chosen, n_seeds, rounds),
            lambda found: [tables.over_limits(files, found, name, chosen)],
            lambda figures, found: getattr(figures, name)(files, found, chosen, out / name),
        )
        _carry_out(study, out=out, read=read, listed=listed, also=also)

    return command


reproduce_app.command(
    "ablation",
    help="""Freezing, fusion and int8 over the limit of devices, without and with what they save.

    Example: cocofl reproduce ablation --limits 0.25,0.4 --seeds 1""",
)(_over_limits("ablation"))
reproduce_app.command(
    "selectors",
    help="""Ways to select what a device trains, over the limit of devices.

    Example: cocofl reproduce selectors --limits 0.2 --seeds 1""",
)(_over_limits("selectors"))


@reproduce_app.command()
def profiling(
    model: Annotated[str, typer.Option(help="A model of which tables ship.")] = "mobilenet",
    table: Annotated[Path | None, typer.Option(help="A span table to show beside ours.")] = None,
    out: Out = OUT,
) -> None:
    """What configurations cost: time, memory and upload of spans and of widths.

    Example: cocofl reproduce profiling --model mobilenet
    """
    costs = tables.tables_of(model, table)
    if not costs:
        raise InvalidSetting(f"no table of {model} ships with the package; give one with --table")
    shown = tables.savings(costs)
    print_text_table(shown)
    check_writable(out / "profiling.md", "--out")
    write_text(out / "profiling.md", shown.markdown())
    write_text(out / "profiling.csv", shown.csv())
    print(f"written: {out / 'profiling'}.md and .csv")
    with drawing():
        figures = import_module("cocofl.reproduction.figures")
        _say_drawn(figures.profiling(costs, out / f"profiling-{model}"))


def _of_size(small: bool, seeds: int | None) -> tuple[Collection, int]:
    """The experiment files of a size, and how many seeds of each are run."""
    return (collections.small(), seeds or 1) if small else (collections.paper(), seeds or 3)


def _carry_out(
    study: Study, *, out: Path, read: bool, listed: bool, also: Sequence[Path] | None
) -> list[Result]:
    """Run what is missing, then show all that is there and keep it; the results."""
    if listed:
        for planned in missing(study.planned, out):
            print(planned.command(out))
        return []
    notes: list[str] = []
    if study.planned and not read:
        check_writable(out / f"{study.name}.csv", "--out")
        first = study.planned[0].experiment
        for planned in study.planned:
            vouch_for(*planned.experiment.names())
        with stoppable(out, "the same command"), ProgressBar(first) as bar:
            notes += play(study.planned, out, watchers=[bar], announce=bar.announce)
    here, left_out = results.find(out, study.files, study.rows)
    elsewhere = [one for path in also or [] for one in results.read(path) if one.row in study.rows]
    found = results.gather(here, elsewhere)
    shown = [one for one in study.tables(found) if one is not None]
    for one in shown:
        print_text_table(one)
    for note in (*notes, *left_out):
        print(note)
    if not shown:
        print(f"no complete run of these is in {out} yet; --list says how to make them")
        return []
    check_writable(out / f"{study.name}.csv", "--out")
    results.write(out / f"{study.name}.csv", found)
    write_text(out / f"{study.name}.md", "\n".join(one.markdown() for one in shown))
    print(f"written: {out / study.name}.md and .csv")
    if study.draw is not None:
        with drawing():
            _say_drawn(study.draw(import_module("cocofl.reproduction.figures"), found))
    return found


def _say_drawn(files: Sequence[Path]) -> None:
    print("figures: " + ", ".join(map(str, files)))


def _limits(text: str | None) -> list[float]:
    limits = numbers(text or "", "--limits")
    for limit in limits:
        if not 0 < limit <= 1:
            raise InvalidSetting(f"--limits {text}: {limit:g} is no share; use 0.2 to 1")
    return limits
