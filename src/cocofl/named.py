"""Things by name: an entry of a registry, or the user's own as ``package.module:function``.

A name is code: importing it runs it. Names that the user's own Python code gives are imported. On
the command line, and on a device that serves others, names are data (:func:`names_are_data`): one
is imported only if the user has given it there, or trusts its module. The current folder is on the
path only for names that the user has given, and last.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cocofl.errors import CocoflError, InvalidSetting, Untrusted

Entry = TypeVar("Entry")
Kind = TypeVar("Kind")

EVERYTHING = "*"
RESERVED = ("hf",)
"""What stands before a colon and is no module: ``hf:NAME`` is read as data."""
_trusted: set[str] | None = None
"""Names and modules that may be imported; None: all, as the user's own code is running."""


@contextmanager
def names_are_data(*trusted: str) -> Iterator[None]:
    """Inside, only these names and modules are imported, and those that are vouched for."""
    global _trusted  # noqa: PLW0603
    before, path = _trusted, list(sys.path)
    _trusted = set(trusted)
    try:
        yield
    finally:
        _trusted, sys.path[:] = before, path


def vouch_for(*names: str) -> None:
    """The user gave these names here and now: they are imported, from the current folder, too."""
    own = [name for name in names if ":" in name or name == EVERYTHING]
    if _trusted is not None and own:
        _trusted.update(own)
        # Last, so that nothing in the folder is taken for a library.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def search_path() -> str:
    """``PYTHONPATH`` of a process of ours, which finds modules where this one does, in order."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def user_file() -> Path:
    """The user's own settings, which nothing that is read can change."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "cocofl" / "config.toml"


def names_in(values: Any) -> list[str]:
    """All that may be names of functions in the settings of an experiment, at any depth.

    >>> names_in({"model.name": "mine:net", "metrics": ["f1", "my.own:metric"], "groups": "a:0.25"})
    ['mine:net', 'my.own:metric']
    """
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [name for value in values for name in names_in(value)]
    module, colon, function = str(values).partition(":")
    parts = [*module.split("."), function]
    is_name = colon and module not in RESERVED and all(part.isidentifier() for part in parts)
    return [str(values)] if is_name else []


def refuse_untrusted(*names: str) -> None:
    """Complain about a name that came with a folder or a message and that nobody vouched for."""
    for name in names:
        module = name.partition(":")[0]
        if _trusted is not None and not _trusted & {EVERYTHING, name, module}:
            raise Untrusted(
                f"{name} would run code of the module {module!r}, and it was not you who named it "
                "here: it came with what is read. If you trust whoever made that, say --trust, or "
                f"list {module!r} under [trust] modules in {user_file()} (on a device: trust = "
                f"{module!r} in its node config)"
            )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name most like this one, or nothing.

    >>> nearest("mobilnet", ["mobilenet", "resnet18"])
    ' (did you mean mobilenet?)'
    >>> nearest("xyz", ["mobilenet"])
    ''
    """
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def lookup(
    name: str, registry: Mapping[str, Entry], what: str, error: type[CocoflError]
) -> Entry | Callable[..., Any]:
    """The registry's entry, or the user's own function where the name has a colon."""
    if ":" in name:
        return import_function(name, error)
    if name not in registry:
        raise error(
            f"unknown {what} {name!r}{nearest(name, registry)}; expected one of "
            f"{', '.join(registry)}, or your own as package.module:function"
        )
    return registry[name]


def import_function(name: str, error: type[CocoflError]) -> Callable[..., Any]:
    """The user's own function, if it may be imported."""
    refuse_untrusted(name)
    return import_ours(name, error)


def import_ours(name: str, error: type[CocoflError]) -> Callable[..., Any]:
    """The function that ``package.module:function`` names.

    >>> import_ours("math:sqrt", CocoflError)(9.0)
    3.0
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise error(
            f"cannot import {name}: {problem}. Expected package.module:function, importable from "
            "here (the current folder counts)"
        ) from problem
    except SyntaxError as problem:
        raise error(f"cannot import {name}: {problem}") from problem
    if not callable(function):
        raise error(f"{name} is a {type(function).__name__}, not a function or class")
    return function  # type: ignore[no-any-return]


@contextmanager
def named_in_errors(name: str, error: type[CocoflError]) -> Iterator[None]:
    """Let whatever the user's own function raises say whose it is, and in which line."""
    try:
        yield
    except CocoflError:
        raise
    except Exception as problem:
        own = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        steps = traceback.extract_tb(problem.__traceback__)
        lines = [f" (line {one.lineno} of {own})" for one in steps if one.filename == own]
        said = f"{type(problem).__name__}: {problem}"
        raise error(f"{name} failed with {said}{lines[-1] if lines else ''}") from problem


def made_by_name(
    name: str, registry: Mapping[str, Callable[[], Kind]], what: str, kind: type[Kind]
) -> Kind:
    """What the function of that name makes, which must be of a kind.

    >>> made_by_name("zero", {"zero": int}, "number", int)
    0
    """
    made = lookup(name, registry, what, InvalidSetting)()
    if not isinstance(made, kind):
        raise InvalidSetting(
            f"the {what} {name} gives a {type(made).__name__}; "
            f"expected a cocofl.{what}s.{kind.__name__}"
        )
    return made
