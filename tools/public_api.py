"""What users import of us, with signatures, so that no change of it goes unnoticed.

python tools/public_api.py

writes tests/public_api.txt; a test complains where that is not what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "cocofl",
    "cocofl.codecs",
    "cocofl.data",
    "cocofl.experiment",
    "cocofl.kernels",
    "cocofl.metrics",
    "cocofl.strategies",
    "cocofl.vector",
)
FILE = Path(__file__).parents[1] / "tests" / "public_api.txt"


def listing() -> str:
    """A line for every public name, and for every public method of a class."""
    lines = [line for module in MODULES for line in _names(module)]
    return "\n".join(lines) + "\n"


def _names(module: str) -> Iterator[str]:
    found = import_module(module)
    for name in sorted(found.__all__):
        thing = getattr(found, name)
        yield f"{module}.{name}{_signature(thing)}"
        if inspect.isclass(thing):
            for member, value in sorted(vars(thing).items()):
                if not member.startswith("_") and (inspect.isroutine(value) or _is_property(value)):
                    yield f"{module}.{name}.{member}{_typed(value)}"


def _is_property(value: Any) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def _typed(value: Any) -> str:
    """The signature of a method, the type of a property."""
    if _is_property(value):
        getter = value.fget if isinstance(value, property) else value.func
        return f": {inspect.signature(getter).return_annotation!r}"
    return _signature(value.__func__ if isinstance(value, classmethod | staticmethod) else value)


def _signature(thing: Any) -> str:
    if not callable(thing):
        return ""
    try:
        said = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", said)


if __name__ == "__main__":
    FILE.write_text(listing(), encoding="utf-8")
