"""What one device has in one round: time, memory, upload."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from cocofl.errors import InvalidBudget

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([a-z%]*)", re.IGNORECASE)

SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_LIMITS = (
    ("time", "time_s", SECONDS),
    ("memory", "memory_bytes", BYTES),
    ("upload", "upload_bytes", BYTES),
)
"""As a fraction, as an amount, and the units of the amount."""


@dataclass(frozen=True)
class Budget:
    """The most a configuration may need; what is not given is unlimited.

    ``time``, ``memory`` and ``upload`` are fractions of what training every block needs. A device
    owner who knows seconds and bytes gives those instead; a time in seconds is for one round, so
    it needs the number of samples the device trains on in it.

    >>> str(Budget(time=1 / 3, memory=1 / 3, upload=0.7))
    'time ≤ 0.333, memory ≤ 0.333, upload ≤ 0.7'
    >>> str(Budget(time_s=30, memory_bytes=200e6, upload_bytes=1e6, samples=500))
    'time ≤ 30 s for 500 samples, memory ≤ 200 MB, upload ≤ 1 MB'
    """

    time: float = math.inf
    memory: float = math.inf
    upload: float = math.inf
    time_s: float = math.inf
    memory_bytes: float = math.inf
    upload_bytes: float = math.inf
    samples: int | None = None

    def __post_init__(self) -> None:
        for *names, _units in _LIMITS:
            values = [getattr(self, name) for name in names]
            for name, value in zip(names, values, strict=True):
                if not isinstance(value, int | float) or math.isnan(value) or value < 0:
                    raise InvalidBudget(
                        f"{name} is {value!r}; expected a number that is not negative"
                    )
            if all(map(math.isfinite, values)):
                raise InvalidBudget(
                    f"both {names[0]} = {values[0]:g} (a fraction of full training) and "
                    f"{names[1]} = {values[1]:g} are given; give one of them"
                )
        if self.samples is not None and self.samples < 1:
            raise InvalidBudget(f"samples is {self.samples}; a round trains on at least 1 sample")
        if math.isfinite(self.time_s) and self.samples is None:
            raise InvalidBudget(
                f"time_s = {self.time_s:g} is a time for one round: give also samples, "
                "the number of samples the device trains on in a round"
            )

    @classmethod
    def parse(
        cls,
        time: str | float | None = None,
        memory: str | float | None = None,
        upload: str | float | None = None,
        samples: int | None = None,
    ) -> Budget:
        """Read limits as people write them: a number is a fraction, a unit makes it absolute.

        >>> Budget.parse(time="30s", memory="0.5", samples=500)
        ... # doctest: +NORMALIZE_WHITESPACE
        Budget(time=inf, memory=0.5, upload=inf, time_s=30.0, memory_bytes=inf,
               upload_bytes=inf, samples=500)
        """
        limits: dict[str, float] = {}
        for (name, name_of_amount, units), text in zip(
            _LIMITS, (time, memory, upload), strict=True
        ):
            if text is not None and text != "":
                value, absolute = _quantity(name, text, units)
                limits[name_of_amount if absolute else name] = value
        return cls(**limits, samples=samples)

    def __str__(self) -> str:
        parts = []
        for name, fraction, absolute in (
            ("time", self.time, f"{self.time_s:g} s for {self.samples} samples"),
            ("memory", self.memory, bytes_text(self.memory_bytes)),
            ("upload", self.upload, bytes_text(self.upload_bytes)),
        ):
            if math.isfinite(fraction):
                parts.append(f"{name} ≤ {fraction:.3g}")
            elif not absolute.startswith("inf"):
                parts.append(f"{name} ≤ {absolute}")
        return ", ".join(parts) or "no limit"


def bytes_text(count: float) -> str:
    """Bytes for a person to read.

    >>> bytes_text(512), bytes_text(1_234_567)
    ('512 B', '1.23 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if math.isfinite(count) and count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def _quantity(name: str, text: str | float, units: dict[str, float]) -> tuple[float, bool]:
    """The value, in seconds or bytes if it has a unit, and whether it has one."""
    hint = f"30s (units: {', '.join(units)})" if units is SECONDS else "200MB (or kB, GB, MiB)"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InvalidBudget(f"{name} is {text!r}; expected a number or a text such as {hint}")
    if not isinstance(text, str):
        return float(text), False
    match = _QUANTITY.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in ("", "%", *units):
        raise InvalidBudget(
            f"cannot read {name} = {text!r}; expected a fraction of full training like 0.33, "
            f"or an amount like {hint}"
        )
    if unit == "%":
        return float(match[1]) / 100, False
    return float(match[1]) * units.get(unit, 1), unit in units
