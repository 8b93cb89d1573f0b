"""Checks of settings: an error names the key, the value and what is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
