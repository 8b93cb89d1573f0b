"""Things by name: an entry of a registry, or the user's own as ``package.module:function``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from cocofl.errors import CocoflError

Entry = TypeVar("Entry")


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
    """The function that ``package.module:function`` names.

    >>> import_function("math:sqrt", CocoflError)(9.0)
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
