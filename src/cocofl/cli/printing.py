"""How the command line talks: tables, JSON, places of results, names that a shell completes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cocofl.config import parse_value
from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.report.tables import TextTable

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the folder names; you know who made it.")
]


def print_table(table: Table) -> None:
    """Print a table as wide as it needs to be."""
    # A pipe has no width; rich would cut the columns to 80 characters.
    Console(width=None if Console().is_terminal else 200).print(table)


def print_text_table(shown: TextTable) -> None:
    """Print a table of texts, which may come from files, and its notes."""
    first, *others = map(escape, shown.header)
    numbers = (Column(name, justify="right") for name in others)
    table = Table(first, *numbers, title=escape(shown.title))
    for line in shown.lines:
        table.add_row(*map(escape, line))
    print_table(table)
    for note in shown.notes:
        print(note)


def print_json(value: Any) -> None:
    """Print data for other programs."""
    print(json.dumps(value, indent=2))


def key_values(given: Iterable[str] | None, option: str, example: str) -> dict[str, Any]:
    """What a repeatable option ``key=value`` says, with values as in TOML."""
    found = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not equals:
            raise InvalidExperiment(f"{option} {one}: expected key=value, like {example}")
        found[key.strip()] = parse_value(value.strip())
    return found


@contextmanager
def stoppable(folder: Path, again: str) -> Iterator[None]:
    """Let Ctrl-C end with a word on what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what is done is kept in {folder}; {again} goes on"
        print(f"stopped: {kept if folder.exists() else 'nothing was written'}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def drawing() -> Iterator[None]:
    """Say how to get the libraries that draw, where they are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or str(error)).partition(".")[0]
        raise InvalidSetting(
            f"a report needs the library {library}: pip install 'cocofl[report]'"
        ) from error


def check_writable(path: Path, option: str) -> None:
    """Complain about a file, not there perhaps, that the command could not write in the end.

    It is looked at before the work, which may take hours.
    """
    try:
        if path.exists():
            path.open("ab").close()
        parents = path.absolute().parents
        # Folders that are missing will be made.
        with tempfile.TemporaryFile(dir=next(folder for folder in parents if folder.exists())):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidSetting(f"cannot write {path}: {reason}; choose another {option}") from error


def words(text: str) -> list[str]:
    """What is separated by commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, option: str) -> list[float]:
    """Numbers that are separated by commas."""
    try:
        return [float(word) for word in words(text)]
    except ValueError as error:
        raise InvalidSetting(f"{option} {text}: {error}") from error


def starting(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a word to the names that begin so.

    >>> starting(["mobilenet", "resnet18"])("res")
    ['resnet18']
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete
