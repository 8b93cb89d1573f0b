"""Checks of settings and of what files say: an error names the key, the value, what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from cocofl.errors import InvalidExperiment
from cocofl.named import nearest


def check_number(
    key: str,
    value: float,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    finite: bool = True,
) -> None:
    """Complain about a number out of range."""
    good = least <= value <= most and above < value and (value < below or not finite)
    if math.isnan(value) or not good:
        words = {"at least": least, "above": above, "at most": most, "below": below}
        limits = [f"{word} {limit:g}" for word, limit in words.items() if math.isfinite(limit)]
        raise InvalidExperiment(f"{key} is {value}; expected a number {' and '.join(limits)}")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Complain about a text that is none of those known."""
    if value not in choices:
        raise InvalidExperiment(
            f"{key} is {value!r}{nearest(value, choices)}; expected one of {', '.join(choices)}"
        )


# --- what a JSON file holds ----------------------------------------------------------------------


class Score(float):
    """A number that may well be infinite, or none."""


class Amount(float):
    """A finite number that is not negative."""


Check = Callable[[Any], bool]

# Numbers of a file are bounded: one of a thousand digits is no number that can be computed with.
_CHECKS: dict[Any, Check] = {
    int: lambda value: type(value) is int and 0 <= value < 2**64,
    float: lambda value: type(value) in (int, float) and abs(value) < 1e300,  # so it is finite
    Score: lambda value: type(value) is float or (type(value) is int and abs(value) < 1e300),
    Amount: lambda value: type(value) in (int, float) and 0 <= value < 1e300,
    bool: lambda value: type(value) is bool,
    str: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
}


_ALWAYS: dict[Any, set[type]] = {Score: {float}, str: {str}, bool: {bool}}
"""Of which every value of a type will do: logs are long, and looking at types is fast."""


def _all_of(shape: Any) -> Callable[[Collection[Any]], bool]:
    check, fine = check_of(shape), _ALWAYS.get(shape, set())
    return lambda values: fine.issuperset(map(type, values)) or all(map(check, values))


def check_of(shape: Any) -> Check:
    """Whether what a JSON file holds is of a shape; a tuple is a list there.

    >>> check_of(dict[str, int | None])({"a": 3, "b": None}), check_of(list[int])([-1])
    (True, False)
    """
    origin, inner = get_origin(shape), get_args(shape)
    if origin is Literal:
        return lambda value: value in inner
    if origin in (list, dict):
        all_are = _all_of(inner[-1])
        if origin is list:
            return lambda value: isinstance(value, list) and all_are(value)
        return lambda value: isinstance(value, dict) and all_are(value.values())
    checks = [check_of(one) for one in inner]
    if origin is tuple:
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )
    if origin is UnionType:
        return lambda value: any(check(value) for check in checks)
    return _CHECKS[shape]


def in_short(value: Any) -> str:
    """A value for a message; one that holds others is not written out, however deep it is."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.40}"
