"""The command line: parse, call, print. What it prints is made elsewhere.

A group of commands is one ``typer.Typer`` added to ``app``. Commands raise
:class:`~cocofl.errors.CocoflError` for a user's mistake; :func:`main` turns that into one message
and exit code 2, anything else that goes wrong into exit code 1.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from cocofl import data
from cocofl.budget import Budget, bytes_text
from cocofl.errors import CocoflError, InvalidSetting, OtherHardware
from cocofl.fl.select import feasible, maximal, nothing_fits
from cocofl.profiling import ProfileTable, shipped
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.cost_model import fast_table
from cocofl.profiling.sweep import Progress, sweep
from cocofl.profiling.workspace import Settings
from cocofl.report.pictures import LEGEND, chain_picture
from cocofl.span import Span

app = typer.Typer(
    name="cocofl",
    help="Federated learning for devices of unequal strength.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="Data sets, and how they are divided over devices.", no_args_is_help=True
)
app.add_typer(data_app, name="data")

DataDir = Annotated[
    Path | None,
    typer.Option(help="A folder of data sets in the Hub's layout; default: $COCOFL_DATA."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 the user's mistake."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Taken off here so that it works in any place, before the command or behind it.
    debug = "--debug" in words
    # As with `python -m`: the user's own package.module:function may lie in the current folder.
    sys.path.insert(0, os.getcwd())
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="cocofl")
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(_message(error), file=sys.stderr)
        sys.exit(2 if isinstance(error, CocoflError) else 1)


def _message(error: Exception) -> str:
    if isinstance(error, CocoflError):
        return f"error: {error}"
    return f"failed: {type(error).__name__}: {error} (--debug shows where)"


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Federated learning for devices of unequal strength."""


@data_app.command("list")
def data_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: size, classes, and whether they are here or how to get them.

    Example: cocofl data list --data-dir ~/datasets
    """
    listings = [data.listing(name, data_dir=data_dir) for name in data.REGISTRY]
    if as_json:
        _print_json([asdict(listing) for listing in listings])
        return
    table = Table("name", "task", _right("train"), _right("test"), _right("classes"), "available")
    for entry in listings:
        counts = (entry.train_samples, entry.test_samples, entry.num_classes)
        place = {"ready": "ready", "here": "here", "hub": "on the Hub", "missing": "not here"}
        table.add_row(
            entry.name,
            entry.task,
            *(f"{count:,}".replace(",", " ") for count in counts),
            f"{place[entry.state]}: {entry.place}",
        )
    _print_table(table)


@data_app.command("show")
def data_show(
    name: Annotated[
        str, typer.Argument(help="A name from `data list`, or package.module:function.")
    ],
    split: Annotated[str, typer.Option(help="iid, dirichlet, rc, by_play or natural.")] = "rc",
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet distribution.")] = 0.1,
    devices: Annotated[int, typer.Option(help="How many devices.")] = 100,
    groups: Annotated[int, typer.Option(help="How many equally large groups of them.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and the groups.")] = 0,
    unequal: Annotated[bool, typer.Option("--unequal", help="Keep the drawn sizes.")] = False,
    preset: Annotated[
        str, typer.Option(help="standard, or paper for the part it uses.")
    ] = "standard",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The chart's file; default: NAME-SPLIT.png.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show who holds what: a bubble chart as PNG, and the class densities of each group.

    Example: cocofl data show digits --split rc --alpha 0.1 --devices 30
    """
    # Drawing takes longer to import than everything else here.
    from cocofl.report.bubbles import save_bubble_chart  # noqa: PLC0415

    train = data.load(name, data_dir=data_dir, preset=preset).train
    group_of = data.partition.equal_groups(devices, groups, seed)
    rule = data.Rule(split, alpha, not unequal)
    partition = data.divide(train, devices, seed, rule, group_of)
    counts = data.partition.class_counts(partition, train.labels, train.facts.num_classes)
    group_names = _group_names(groups)
    path = out or Path(f"{name.replace(':', '.')}-{split}.png")
    with_alpha = f", alpha {alpha:g}" if split in ("dirichlet", "rc") else ""
    title = f"{name}: {split}{with_alpha}, {devices} devices, seed {seed}"
    save_bubble_chart(path, counts, group_of, train.facts.class_names, group_names, title)
    per_group = data.partition.group_counts(counts, group_of)
    densities = data.partition.class_densities(counts, group_of)
    if as_json:
        summary = {
            "name": name,
            "rule": asdict(rule),
            "samples": len(train),
            "devices": devices,
            "samples_per_device": [int(partition.sizes.min()), int(partition.sizes.max())],
            "remainder": len(partition.remainder),
            "class_names": train.facts.class_names,
            "densities": dict(zip(group_names, densities.tolist(), strict=True)),
            "chart": str(path),
        }
        _print_json(summary)
        return
    table = Table(
        "class", *(_right(group) for group in group_names), "most of it is on", title=title
    )
    for label, class_name in enumerate(train.facts.class_names):
        total = int(per_group[:, label].sum())
        top = int(np.argmax(per_group[:, label]))
        most = f"{group_names[top]} ({per_group[top, label] / total:.0%})" if total else "nobody"
        shown = class_name if class_name.isprintable() and class_name.strip() else repr(class_name)
        table.add_row(escape(shown), *(f"{share:.1%}" for share in densities[:, label]), most)
    _print_table(table)
    low, high = int(partition.sizes.min()), int(partition.sizes.max())
    size = str(low) if low == high else f"{low} to {high}"
    print(f"{devices} devices with {size} samples each; {len(partition.remainder)} left over.")
    print(f"Chart: {path}")


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="A registry name, or package.module:factory.")],
    variant: Annotated[str, typer.Option(help="f, ff or qff.")] = "qff",
    backend: Annotated[str, typer.Option(help="auto, reference, onednn or legacy.")] = "auto",
    method: Annotated[str, typer.Option(help="span, or width for HeteroFL and FjORD.")] = "span",
    threads: Annotated[int | None, typer.Option(help="Default: all of this machine.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per mini-batch.")] = 32,
    classes: Annotated[int | None, typer.Option(help="Outputs of the model.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Measure few, predict the rest.")] = False,
    analytic: Annotated[bool, typer.Option("--analytic", help="Measure nothing: count.")] = False,
    device: Annotated[str, typer.Option(help="For --analytic: x64 or pi4.")] = "x64",
    out: Annotated[Path | None, typer.Option(help="Default: MODEL-VARIANT.json.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw figures (PNG and SVG); OUT is used if it exists.")
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", help="More tables for --plot; default: the shipped ones."),
    ] = None,
) -> None:
    """Measure what every configuration of a model costs on this machine.

    Ctrl-C keeps what was measured; the same command then continues.

    Example: cocofl profile mobilenet --fast --threads 2 --out mobilenet.json
    """
    settings = Settings(
        model, method, variant, backend, batch, threads or os.cpu_count() or 1, classes
    )
    kind = "width" if method == "width" else variant
    path = out or Path(f"{model.replace(':', '.')}-{kind}.json")
    if path.exists():
        if plot is None:
            raise InvalidSetting(f"{path} exists; choose another --out, or remove it first")
    elif analytic:
        analytic_table(settings, device).save(path)
    else:
        _profile(settings, path, fast=fast)
    table = ProfileTable.load(path)
    print(table.describe())
    if table.error:
        print(
            "stated error: " + ", ".join(f"{key} {value:g}" for key, value in table.error.items())
        )
    if plot is not None:
        # Drawing takes longer to import than everything else here.
        from cocofl.report.profiles import save_profile_figures  # noqa: PLC0415

        more = beside or [name for name in shipped() if f"-{model}/" in name]
        tables = [table, *(ProfileTable.load(name) for name in more if not _same(name, kind))]
        print("Figures: " + ", ".join(map(str, save_profile_figures(plot, tables))))


def _same(name: str, kind: str) -> bool:
    return name.startswith("measured:") and name.endswith(f"/{kind}")


def _profile(settings: Settings, path: Path, *, fast: bool) -> None:
    if fast:
        steps: Iterator[Progress | ProfileTable] = fast_table(settings)
    else:
        n_blocks = len(settings.subject.chain()[0])
        steps = sweep(settings, path, n_blocks=n_blocks)
    last: Progress | ProfileTable | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(settings.model, total=None)
        try:
            for last in steps:
                if isinstance(last, Progress):
                    bar.update(
                        task,
                        completed=last.done,
                        total=last.total,
                        description=f"{settings.model}, {_left(last.seconds_left)}",
                    )
        except KeyboardInterrupt:
            done = f"{last.done} of {last.total}" if isinstance(last, Progress) else "nothing"
            kept = "nothing is kept of a fast profile" if fast else f"{done} kept"
            print(f"stopped: {kept}; the same command continues", file=sys.stderr)
            raise typer.Exit(130) from None
    if isinstance(last, ProfileTable):
        last.save(path)


def _left(seconds: float) -> str:
    if not seconds >= 0:
        return "starting"
    return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"


@app.command()
def select(
    table: Annotated[str, typer.Argument(help="A profile table, or measured:CPU-MODEL.")],
    time: Annotated[str | None, typer.Option(help="0.33 of full, or 30s per round.")] = None,
    memory: Annotated[str | None, typer.Option(help="0.33 of full, or 200MB.")] = None,
    upload: Annotated[str | None, typer.Option(help="0.7 of full, or 1MB.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples per round; for a time in seconds.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Refuse another number of blocks.")] = None,
    as_json: Json = False,
) -> None:
    """Show which spans fit a budget, and which of them are maximal.

    Example: cocofl select mobilenet.json --time 0.33 --memory 0.33 --upload 0.7
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OtherHardware)
        found = ProfileTable.load(table, n_blocks=blocks)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    budget = Budget.parse(time, memory, upload, samples)
    spans = feasible(found, budget)
    if not spans:
        raise nothing_fits(found, budget)
    best = maximal(spans)
    if as_json:
        _print_json(
            {
                "table": found.describe(),
                "budget": str(budget),
                "feasible": [_span_row(found, span) for span in spans],
                "maximal": [str(span) for span in best],
            }
        )
        return
    title = f"{len(spans)} of {len(found)} spans fit {budget}; {len(best)} are maximal (*)"
    columns = ("time", "memory", "upload")
    shown = Table("", "span", *(_right(name) for name in columns), "chain")
    for span in spans:
        cells = (_cell(found, name, value) for name, value in _span_row(found, span).items())
        shown.add_row("*" if span in best else "", *cells, chain_picture(span, found.n_blocks))
    print(title)
    _print_table(shown)
    print(LEGEND)
    print(found.describe())


def _span_row(table: ProfileTable, span: Span) -> dict[str, Any]:
    time, memory, upload = table.row(span)
    return {"span": str(span), "time": time, "memory": memory, "upload": upload}


def _cell(table: ProfileTable, name: str, value: Any) -> str:
    """A fraction, and the amount where the table knows it."""
    if name == "span":
        return str(value)
    full = {
        "time": table.full_step_s,
        "memory": table.full_memory_bytes,
        "upload": table.full_upload_bytes,
    }[name]
    if full is None:
        return f"{value:.3f}"
    amount = f"{1e3 * value * full:.3g} ms" if name == "time" else bytes_text(value * full)
    return f"{value:.3f} ({amount})"


def _group_names(n_groups: int) -> list[str]:
    if n_groups == 3:
        return ["strong", "medium", "weak"]
    return [f"group {group}" for group in range(n_groups)]


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _print_table(table: Table) -> None:
    console = Console()
    # A pipe has no width; rich would cut the columns to 80 characters.
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
