"""``cocofl profile`` and ``cocofl select``: what configurations cost, and which fit a budget."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from cocofl.budget import Budget, bytes_text
from cocofl.cli.printing import (
    Json,
    check_writable,
    drawing,
    print_json,
    print_text_table,
    starting,
)
from cocofl.errors import InvalidSetting, OtherHardware
from cocofl.fl.select import feasible, maximal, nothing_fits
from cocofl.fl.strategies.learning import LORA, WHOLE, check_learning
from cocofl.freeze import FLOAT32
from cocofl.freeze.adapters import ALPHA, RANK
from cocofl.models import MODELS
from cocofl.named import vouch_for
from cocofl.profiling import ProfileTable, shipped
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.cost_model import fast_table
from cocofl.profiling.device_rates import DEVICES, device_named
from cocofl.profiling.subject import Settings, Subject
from cocofl.profiling.sweep import Progress, sweep
from cocofl.profiling.table import checkpointed_beside
from cocofl.report.tables import TextTable
from cocofl.span import Blocks, Role

SIGNS = {Role.FROZEN: "░", Role.TRAINED: "█", Role.PASSING: "▒"}
ANALYTIC = "analytic:"
AnalyticDevice = Annotated[
    str,
    typer.Option(help=f"For --analytic: {', '.join(DEVICES)}.", autocompletion=starting(DEVICES)),
]
MoreTables = Annotated[
    list[str] | None,
    typer.Option("--with", help="More tables for --plot; default: the shipped ones."),
]
LEGEND = "░ frozen   █ trained   ▒ frozen, gradients pass"


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="A registry name, or package.module:factory.",
            autocompletion=starting(MODELS),
        ),
    ],
    variant: Annotated[str, typer.Option(help="f, ff or qff.")] = "qff",
    backend: Annotated[str, typer.Option(help="auto, or a kernel `doctor` names.")] = "auto",
    method: Annotated[str, typer.Option(help="span, or width for HeteroFL and FjORD.")] = "span",
    threads: Annotated[int | None, typer.Option(help="Default: all of this machine.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per mini-batch.")] = 32,
    classes: Annotated[int | None, typer.Option(help="Outputs of the model.")] = None,
    train: Annotated[str, typer.Option(help="blocks, or lora for low-rank adapters.")] = WHOLE,
    rank: Annotated[int, typer.Option(help="For --train lora: that of the adapters.")] = RANK,
    head: Annotated[
        bool, typer.Option("--head", help="With the classifier trained beside every span.")
    ] = False,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Trained blocks are computed again in backward.")
    ] = False,
    precision: Annotated[str, typer.Option(help="Of trained blocks; or bfloat16.")] = FLOAT32,
    fast: Annotated[bool, typer.Option("--fast", help="Measure few, predict the rest.")] = False,
    analytic: Annotated[bool, typer.Option("--analytic", help="Measure nothing: count.")] = False,
    device: AnalyticDevice = "x64",
    out: Annotated[Path | None, typer.Option(help="Default: MODEL-VARIANT.json.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw figures (PNG and SVG); OUT is used if it exists.")
    ] = None,
    beside: MoreTables = None,
) -> None:
    """Measure what every configuration of a model costs on this machine.

    Ctrl-C keeps what was measured (not with --fast); the same command then continues.

    Example: cocofl profile mobilenet --fast --threads 2 --out mobilenet.json
    """
    vouch_for(model)
    if fast and analytic:
        raise InvalidSetting("--fast measures and --analytic does not; give one of them")
    cores = os.cpu_count() or 1 if threads is None else threads
    check_learning(train, rank, ALPHA)
    subject = Subject(model, batch, classes, rank=rank if train == LORA else 0)
    settings = Settings(**vars(subject), method=method, variant=variant, backend=backend)
    settings = replace(settings, threads=cores, head=head)
    settings = replace(settings, checkpoint=checkpoint, precision=precision)
    kind = "width" if method == "width" else variant
    path = out or _usual_path(settings, kind)
    _check_places(path, plot)
    if not path.exists():
        check_writable(path, "--out")
        if analytic:
            _counted(settings, device).save(path)
        else:
            measure(settings, path, fast=fast)
    table = _told(path)
    if plot is not None:
        _draw(plot, table, beside or [name for name in shipped() if f"-{model}/" in name], kind)


def _check_places(path: Path, plot: Path | None) -> None:
    """Complain before anything is measured."""
    if path.exists() and plot is None:
        raise InvalidSetting(f"{path} exists; choose another --out, or remove it first")
    if plot is not None:
        check_writable(plot.with_name(f"{plot.stem}.png"), "--plot")


def _usual_path(settings: Settings, kind: str) -> Path:
    """Where a table goes that nobody has named."""
    learned = f"-lora{settings.rank}" if settings.rank else ""
    how = learned + "-head" * settings.head
    how += f"-{settings.precision}" * (settings.precision != FLOAT32)
    path = Path(f"{settings.model.replace(':', '.')}-{kind}{how}.json")
    return checkpointed_beside(path) if settings.checkpoint else path


def _told(path: Path) -> ProfileTable:
    """A table, after a word about it."""
    table = ProfileTable.load(path)
    print(table.describe())
    if table.error:
        print("stated error: " + ", ".join(f"{key} {x:g}" for key, x in table.error.items()))
    return table


def _draw(plot: Path, table: ProfileTable, more: Sequence[str], kind: str) -> None:
    """Figures of a table and others, without those that ship and are of the same kind."""
    # Drawing takes longer to import than everything else here.
    from cocofl.report.drawing import save_profile_figures  # noqa: PLC0415

    same = [name for name in more if name.startswith("measured:") and name.endswith(f"/{kind}")]
    tables = [table, *(ProfileTable.load(name) for name in more if name not in same)]
    print("Figures: " + ", ".join(map(str, save_profile_figures(plot, tables))))


def measure(settings: Settings, path: Path, *, fast: bool) -> None:
    """Make a table here, with a bar where somebody looks; Ctrl-C ends it with a word."""
    steps: Iterator[Progress | ProfileTable] = fast_table(settings)
    if not fast:
        chain, _ = settings.chain()
        steps = sweep(settings, path, n_blocks=len(chain), learning=chain.learning_blocks)
    last: Progress | ProfileTable | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(settings.model, total=None)
        try:
            for last in steps:
                if isinstance(last, Progress):
                    said = f"{settings.model}, {_left(last.seconds_left)}"
                    bar.update(task, completed=last.done, total=last.total, description=said)
        except KeyboardInterrupt:
            done = f"{last.done} of {last.total}" if isinstance(last, Progress) else "nothing"
            again = "nothing is kept of a fast profile; the same command begins anew"
            kept = again if fast else f"{done} kept; the same command continues"
            print(f"stopped: {kept}", file=sys.stderr)
            raise typer.Exit(130) from None
    if isinstance(last, ProfileTable):
        last.save(path)


def _left(seconds: float) -> str:
    if not seconds >= 0:
        return "starting"
    return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"


def select(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            help="A profile table, measured:CPU-MODEL, or analytic:DEVICE/MODEL; several for a "
            "page, which has all that ship by default.",
            autocompletion=starting(shipped()),
            metavar="TABLE",
        ),
    ] = None,
    time: Annotated[str | None, typer.Option(help="0.33 of full, or 30s per round.")] = None,
    memory: Annotated[str | None, typer.Option(help="0.33 of full, or 200MB.")] = None,
    upload: Annotated[str | None, typer.Option(help="0.7 of full, or 1MB.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples per round; for a time in seconds.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Refuse another number of blocks.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write a page with sliders instead: one file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which spans fit a budget, and which of them are maximal.

    Example: cocofl select mobilenet.json --time 0.33 --memory 0.33 --upload 0.7
    """
    if page is None and len(tables or []) != 1:
        raise InvalidSetting("name one table, like measured:epyc-mobilenet; or say --page FILE")
    budget = Budget.parse(time, memory, upload, samples)
    if page is not None:
        _write_page(tables or [], page, budget, blocks)
        return
    (name,) = tables or []
    (table,), warned = _loaded([name], blocks)
    for message in warned:
        print(f"warning: {message}", file=sys.stderr)
    _print_fitting(table, budget, as_json=as_json)


def _loaded(names: Sequence[str], blocks: int | None) -> tuple[list[ProfileTable], list[str]]:
    """Tables, and what is to be said of those that were measured elsewhere."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OtherHardware)
        found = [_table_named(name, blocks) for name in names]
    return found, [str(one.message) for one in caught]


def _print_fitting(found: ProfileTable, budget: Budget, *, as_json: bool) -> None:
    """The spans of a table that fit, as a table or as JSON."""
    spans = feasible(found, budget)
    if not spans:
        raise nothing_fits(found, budget)
    best, names = maximal(spans), ("time", "memory", "upload")
    costs = {span: dict(zip(names, found.row(span), strict=True)) for span in spans}
    if as_json:
        print_json(
            {
                "table": found.describe(),
                "budget": str(budget),
                "feasible": [{"span": str(span), **cost} for span, cost in costs.items()],
                "maximal": [str(span) for span in best],
            }
        )
        return
    columns = {
        "": ["*" if span in best else "" for span in spans],
        "span": [str(span) for span in spans],
        **{name: [_cell(found, name, cost[name]) for cost in costs.values()] for name in names},
        "chain": [chain_picture(span, found.n_blocks) for span in spans],
    }
    print(f"{len(spans)} of {len(found)} spans fit {budget}; {len(best)} are maximal (*)")
    print_text_table(TextTable.of("", columns, (LEGEND, found.describe())))


def _write_page(names: Sequence[str], page: Path, budget: Budget, blocks: int | None) -> None:
    check_writable(page, "--page")
    with drawing():
        # An extra, and slow to import.
        from cocofl.report.fits import LIMITS, shipped_names, write_fits_page  # noqa: PLC0415

    tables, _ = _loaded(names or shipped_names(), blocks)  # the page says where each was measured
    limits = dict(zip(LIMITS, tables[0].limits(budget), strict=True))
    print(f"page: {write_fits_page(tables, page, None if budget == Budget() else limits)}")


def _table_named(source: str, n_blocks: int | None) -> ProfileTable:
    """A table by its name; one that is analytic is counted now."""
    if not source.startswith(ANALYTIC):
        return ProfileTable.load(source, n_blocks=n_blocks)
    device, _, model = source.removeprefix(ANALYTIC).partition("/")
    vouch_for(model)
    table = replace(_counted(Settings(model), device), name=source)
    if n_blocks is not None:
        table.check_fits(n_blocks)
    return table


def _counted(settings: Settings, device: str) -> ProfileTable:
    """An analytic table; whoever uses it is told what the device's rates come from."""
    print(f"{device}: {device_named(device).basis}", file=sys.stderr)
    return analytic_table(settings, device)


def _cell(table: ProfileTable, name: str, value: float) -> str:
    """A fraction, and the amount where the table knows it."""
    full_bytes = {"memory": table.full_memory_bytes, "upload": table.full_upload_bytes}
    full = full_bytes.get(name, table.full_step_s)
    if full is None:
        return f"{value:.3f}"
    amount = f"{1e3 * value * full:.3g} ms" if name == "time" else bytes_text(value * full)
    return f"{value:.3f} ({amount})"


def chain_picture(trained: Blocks, n_blocks: int) -> str:
    """A chain of which some blocks are trained, one sign per block.

    >>> chain_picture(Blocks("2:4+5:6"), 6)
    '░░██▒█'
    """
    return "".join(SIGNS[role] for role in trained.roles(n_blocks))
