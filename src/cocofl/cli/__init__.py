"""The command line: parse, call, print. What it prints is made elsewhere.

A command is a function; :data:`app` lists them by job. Commands raise
:class:`~cocofl.errors.CocoflError` for a user's mistake; :func:`main` turns that into one message
and exit code 2, anything else that goes wrong into exit code 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from cocofl.cli.datasets import data_app
from cocofl.cli.deploying import flower_app
from cocofl.cli.profiling import profile, select
from cocofl.cli.running import compare, evaluate, run
from cocofl.errors import CocoflError

app = typer.Typer(
    name="cocofl",
    help="Federated learning for devices of unequal strength.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
SIMULATE, DEVICES, DATA = "Compare methods", "Ask what fits a device", "Look at data"
DEPLOY = "Train on real devices"
app.command(rich_help_panel=SIMULATE)(run)
app.command(rich_help_panel=SIMULATE)(compare)
app.command(rich_help_panel=SIMULATE)(evaluate)
app.command(rich_help_panel=DEVICES)(profile)
app.command(rich_help_panel=DEVICES)(select)
app.add_typer(flower_app, name="flower", rich_help_panel=DEPLOY)
app.add_typer(data_app, name="data", rich_help_panel=DATA)


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
