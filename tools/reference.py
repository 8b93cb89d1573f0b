"""The pages of the reference that say what the code says.

python tools/reference.py

writes docs/reference/commands.md and docs/reference/experiment.md. A test complains where they are
not what this makes.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import click
import typer

from cocofl.cli import app
from cocofl.config import Experiment, StrategySettings
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.flower.settings import Deployment

PAGES = Path(__file__).parents[1] / "docs" / "reference"


def commands_page() -> str:
    """Every command, argument and option."""
    root = typer.main.get_command(app)
    parts = [_command(["cocofl"], root, level=2)]
    parts += [_command(["cocofl", *names], one, 2) for names, one in _commands(root)]
    return _page("Commands", "Every command, as `--help` tells it.", parts)


def _commands(group: click.Command) -> Iterator[tuple[list[str], click.Command]]:
    for name, one in getattr(group, "commands", {}).items():
        yield [name], one
        yield from (([name, *names], inner) for names, inner in _commands(one))


def _command(names: list[str], command: click.Command, level: int) -> str:
    said, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    lines = [f"{'#' * level} {' '.join(names)}", said.strip()]
    if example:
        lines.append(f"```\n{example.strip()}\n```")
    helps = _argument_helps(command)
    rows = [
        (_name(one), _default(one), getattr(one, "help", "") or helps.get(one.name or "", ""))
        for one in command.params
        if one.name not in ("help", "install_completion", "show_completion")
    ]
    return "\n\n".join([*lines, _table(("", "default", ""), rows)])


def _argument_helps(command: click.Command) -> dict[str, str]:
    """What arguments are for, from the function: with some versions click forgets it."""
    hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
    return {
        name: str(said.help)
        for name, hint in hints.items()
        for said in getattr(hint, "__metadata__", ())
        if getattr(said, "help", None)
    }


def _name(one: click.Parameter) -> str:
    if isinstance(one, click.Argument):
        return f"`{(one.name or '').upper()}`"
    return ", ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))


def _default(one: click.Parameter) -> str:
    if one.required:
        return "needed"
    value = one.default
    if value is None or value is False or callable(value) or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def experiment_page() -> str:
    """Every key of an experiment file and of a deployment."""
    top = [row for row in _keys(Experiment, "") if row]
    parts = ["## At the top\n\n" + _table(("key", "default", ""), top)]
    for field in fields(Experiment):
        default = getattr(Experiment(), field.name)
        if is_dataclass(default):
            parts.append(_section(field.name, type(default)))
    parts.append(_strategy_options())
    parts.append(_section("flower", Deployment, "flower."))
    intro = (
        "An experiment is TOML. Every key has a default; together these are the quick start. "
        "`--set section.key=value` changes single values. A file that begins with "
        '`base = "other.toml"` says only what it changes of the other.'
    )
    return _page("Experiment keys", intro, parts)


def _section(name: str, kind: type[Any], prefix: str = "") -> str:
    said = _plain(inspect.getdoc(kind) or "")
    said = re.sub(r"^(The s|S)ection `\[\w+\]` of an experiment[:.]? ?", "", said)
    rows = list(_keys(kind, prefix))
    if kind is StrategySettings:
        rows = [row for row in rows if row[0] != "`options`"]
    text = [said[:1].upper() + said[1:]] if said else []
    return "\n\n".join([f"## [{name}]", *text, _table(("key", "default", ""), rows)])


def _keys(kind: type[Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    told, default = attribute_docs(kind), kind()
    for field in fields(kind):
        value = getattr(default, field.name)
        if not is_dataclass(value):
            yield f"`{prefix}{field.name}`", f"`{_toml(value)}`", told.get(field.name, "")


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return "{}" if value == {} else json.dumps(value, default=str, ensure_ascii=False)


def attribute_docs(kind: type[Any]) -> dict[str, str]:
    """What stands below each field of a dataclass."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    told = {}
    for one, following in zip(found.body, found.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and is_text:
            told[one.target.id] = _plain(inspect.cleandoc(following.value.value))
    return told


def _strategy_options() -> str:
    rows = []
    for name in STRATEGIES:
        given = inspect.signature(STRATEGIES[name]).parameters.values()
        own = [one for one in given if one.kind is inspect.Parameter.KEYWORD_ONLY]
        said = ", ".join(f"`{one.name} = {_toml(one.default)}`" for one in own)
        rows.append((f"`{name}`", facts_of(name).role, said))
    head = "## Options of strategies\n\nThey stand beside `strategy.name`; what they do is in "
    text = f"{head}[Strategies](strategies.md).\n\n"
    return text + _table(("strategy", "role", "options"), rows)


def _plain(text: str) -> str:
    """A docstring for a page."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"\s*\n\s*", " ", re.sub(r"\n\n>>>.*", "", text, flags=re.DOTALL)).strip()


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    table = "\n".join("| " + " | ".join(line) + " |" for line in cells)
    return table + "\n" if len(lines) > 2 else ""


def _page(title: str, intro: str, parts: Iterable[str]) -> str:
    made = "<!-- made by tools/reference.py: do not edit -->"
    text = "\n".join(part.rstrip() + "\n" for part in parts)
    return f"{made}\n\n# {title}\n\n{textwrap.fill(intro, 100)}\n\n{text}"


GENERATED: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "experiment.md": experiment_page,
}

if __name__ == "__main__":
    for page, make in GENERATED.items():
        (PAGES / page).write_text(make(), encoding="utf-8")
