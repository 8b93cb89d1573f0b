"""The command line: parse, call, print. What it prints is made elsewhere.

A command is a function; :data:`app` lists them by job. Commands raise
:class:`~cocofl.errors.CocoflError` for a user's mistake; :func:`main` turns that into one message
and exit code 2, anything else that goes wrong into exit code 1.
"""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape

from cocofl.cli.datasets import data_app
from cocofl.cli.deploying import flower_app
from cocofl.cli.joining import device
from cocofl.cli.machine import doctor
from cocofl.cli.profiling import profile, select
from cocofl.cli.reproducing import reproduce_app
from cocofl.cli.running import compare, evaluate, report, run
from cocofl.config import UserSettings
from cocofl.errors import CocoflError
from cocofl.named import names_are_data
from cocofl.source import VERSION

app = typer.Typer(
    name="cocofl",
    help="Federated learning for devices of unequal strength.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _brief(command: Callable[..., Any]) -> str:
    """What `cocofl --help` says of a command: its first sentence and its example."""
    text = inspect.cleandoc(command.__doc__ or "")
    _, _, example = text.partition("Example: ")
    summary = text.splitlines()[0]
    return f"{summary}\n[dim]{escape(example)}[/dim]" if example else summary


MACHINE = "Look at data and at this machine"
JOBS: dict[str, list[Callable[..., Any]]] = {
    "Compare methods": [run, compare, evaluate, report],
    "Ask what fits a device": [profile, select],
    MACHINE: [doctor],
}
GROUPS = {
    "Compare methods": (reproduce_app, "table2 --rows mobilenet-cifar10-rc --seeds 1"),
    MACHINE: (data_app, "show digits --split rc"),
    "Train on real devices": (flower_app, "up --supernodes 3 --set rounds=3"),
}
flower_app.command()(device)
for job, commands in JOBS.items():
    for command in commands:
        app.command(rich_help_panel=job, short_help=_brief(command))(command)
for job, (group, words) in GROUPS.items():
    name = group.info.name
    said = f"{group.info.help}\n[dim]cocofl {name} {words}[/dim]"
    app.add_typer(group, name=name, rich_help_panel=job, short_help=said)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    0 done, 1 failed, 2 the user's mistake, 130 stopped by Ctrl-C, 143 ended by SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Taken off here so that it works in any place, before the command or behind it.
    debug = "--debug" in words
    try:
        with names_are_data(*UserSettings.load().trust.modules), ended_like_ctrl_c():
            app(args=[word for word in words if word != "--debug"], prog_name="cocofl")
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            failed = f"failed: {type(error).__name__}: {error} (--debug shows where)"
            mistake = isinstance(error, CocoflError)
            print(f"error: {error}" if mistake else failed, file=sys.stderr)
        sys.exit(2 if isinstance(error, CocoflError) else 1)


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that a command says what it kept; exit code 143."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if ended:
            sys.exit(128 + signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"cocofl {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say which, and end."),
    ] = False,
) -> None:
    """Federated learning for devices of unequal strength."""
