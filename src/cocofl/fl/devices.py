"""Who has how much: groups of devices, and each device's budget in each round.

A group says for each resource a fraction of what full training needs (``0.33``), an amount
(``"30s"``, ``"200MB"``), a uniform draw per device and round (``{"uniform": [0.5, 1.0]}``), or,
for all three, a trace: a CSV file with the columns device, round, time, memory, upload and, if
devices come and go, available; or one's own ``package.module:function``. What a group does not say
is unlimited.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocofl.budget import Budget
from cocofl.data.partition import equal_groups
from cocofl.errors import InvalidBudget, InvalidDevices
from cocofl.files import read_csv
from cocofl.named import import_function
from cocofl.rng import stream

RESOURCES = ("time", "memory", "upload")
_COLUMNS = ["device", "round", *RESOURCES]
_AVAILABLE = "available"
MOST_TRACE_BYTES = 64 * 2**20
_NUMBERS = ("power", "energy", "available", "rounds_per_day")
_DAY = 0.6
"""How far chances go up and down: 1.6 of the mean at night is four times 0.4 of it by day."""


@dataclass(frozen=True)
class Uniform:
    """A fraction drawn anew for every device and round."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise InvalidDevices(
                f"uniform draws need 0 <= low <= high, not [{self.low}, {self.high}]"
            )


Limit = float | str | Uniform | None
Trace = Callable[[int, int], Budget | None]
"""From a device and a round, both counted from 0, to what it has; None: it cannot be asked.

How many samples a time in seconds is for need not be right: the device's own number replaces it.
"""


class RecordedTrace(dict[int, list[tuple[int, Budget | None]]]):
    """A trace from a file, by device its rows: what one says holds until the device's next."""

    def __call__(self, device: int, round_index: int) -> Budget | None:
        """What a device has in a round; None where it cannot be asked."""
        rows = self[device]
        return rows[bisect_right(rows, round_index, key=itemgetter(0)) - 1][1]


@dataclass(frozen=True)
class Group:
    """Devices of one kind; ``share`` is how many of all they are, relative to other groups."""

    name: str
    share: float = 1.0
    time: Limit = None
    memory: Limit = None
    upload: Limit = None
    trace: Trace | None = field(default=None, repr=False)
    power: float = 0.0
    """Watts while it trains, as measured or stated; 0 where that is not known."""
    energy: float = math.inf
    """The most joules of a round; it needs the power."""
    available: float = 1.0
    """The mean share of rounds in which a device can be asked."""
    rounds_per_day: int = 0
    """Above 0, devices can be asked four times as often at night as by day."""

    def __post_init__(self) -> None:
        self._check_phone()
        if not (math.isfinite(self.share) and self.share > 0):
            raise InvalidDevices(
                f"group {self.name!r} has share {self.share}; expected a number above 0"
            )
        limits = {name: getattr(self, name) for name in RESOURCES}
        fixed = {n: v for n, v in limits.items() if not isinstance(v, Uniform)}
        try:
            Budget.parse(**fixed, samples=1)
        except InvalidBudget as error:
            raise InvalidDevices(f"group {self.name!r}: {error}") from error
        if self.trace is not None and any(value is not None for value in limits.values()):
            raise InvalidDevices(f"group {self.name!r} has a trace and limits beside it; give one")

    def _check_phone(self) -> None:
        for key, good, wanted in (
            ("power", 0 <= self.power < math.inf, "watts"),
            ("energy", self.energy > 0, "joules above 0"),
            ("available", 0 < self.available <= 1, "a share above 0 and at most 1"),
            ("rounds_per_day", 0 <= self.rounds_per_day < math.inf, "a number of rounds"),
        ):
            if not good:
                raise InvalidDevices(
                    f"group {self.name!r} has {key} {getattr(self, key)}; expected {wanted}"
                )
        if self.energy < math.inf and not self.power:
            raise InvalidDevices(
                f"group {self.name!r} has energy {self.energy:g} J a round, but no power; give "
                "also power, the watts that training takes"
            )

    def chance(self, round_index: int) -> float:
        """The probability that a device can be asked in a round; most at the start of a day."""
        if not self.rounds_per_day:
            return self.available
        hour = math.cos(2 * math.pi * round_index / self.rounds_per_day)
        return min(1.0, self.available * (1 + _DAY * hour))


@dataclass(frozen=True, eq=False)
class Devices:
    """All devices of an experiment: ``group_of[device]`` is an index into ``groups``."""

    groups: tuple[Group, ...]
    group_of: NDArray[np.int64]
    seed: int

    def __len__(self) -> int:
        return len(self.group_of)

    def budget(self, device: int, round_index: int, samples: int | None = None) -> Budget:
        """What a device has in a round; ``samples`` is needed where a time is in seconds.

        Any device of any round can be asked alone: a draw belongs to (seed, round, device).
        """
        group = self.groups[self.group_of[device]]
        if group.trace is not None:
            found = _traced(group, device, round_index)
            assert found is not None, f"device {device} cannot be asked in round {round_index}"
            return replace(found, samples=samples)
        rng = stream(self.seed, "budget", round_index, device)
        limits = {name: getattr(group, name) for name in RESOURCES}
        for name, limit in limits.items():
            if isinstance(limit, Uniform):
                limits[name] = float(rng.uniform(limit.low, limit.high))
        return Budget.parse(**limits, samples=samples)

    def least(self, device: int, rounds: int, samples: int | None = None) -> list[Budget]:
        """What a device has at least in any of so many rounds.

        Of a draw that is its lower end; of a trace all that it says, as one may have more time and
        less memory in another round.
        """
        group = self.groups[self.group_of[device]]
        if group.trace is not None:
            found = (_traced(group, device, index) for index in range(rounds))
            return [*dict.fromkeys(replace(one, samples=samples) for one in found if one)]
        limits = {name: getattr(group, name) for name in RESOURCES}
        lower = {n: v.low if isinstance(v, Uniform) else v for n, v in limits.items()}
        return [Budget.parse(**lower, samples=samples)]

    def is_available(self, device: int, round_index: int) -> bool:
        """Whether a device can be asked in a round at all."""
        group = self.groups[self.group_of[device]]
        chance = group.chance(round_index)
        if chance < 1 and stream(self.seed, "available", round_index, device).random() >= chance:
            return False
        return group.trace is None or _traced(group, device, round_index) is not None


def _traced(group: Group, device: int, round_index: int) -> Budget | None:
    assert group.trace is not None
    found = group.trace(device, round_index)
    if found is not None and not isinstance(found, Budget):
        raise InvalidDevices(
            f"the trace of group {group.name!r} gave {found!r} for device {device} in round "
            f"{round_index}; expected a Budget, or None for a device that cannot be asked"
        )
    return found


PAPER_GROUPS = (
    Group("strong", time=1.0, memory=1.0, upload=1.0),
    Group("medium", time=2 / 3, memory=2 / 3, upload=Uniform(0.5, 1.0)),
    Group("weak", time=1 / 3, memory=1 / 3, upload=Uniform(0.5, 1.0)),
)
"""Three equally large groups, as in the paper's evaluation."""


PHONES_2024 = tuple(
    Group(name, 0.25, time, memory, Uniform(0.2, 1.0), None, power, 70.0, 0.08, 24)
    for name, time, memory, power in (
        ("flagship", 1.0, 1.0, 5.0),
        ("upper", 0.43, 0.84, 4.9),
        ("middle", 0.3, 0.55, 2.7),
        ("entry", 0.21, 0.49, 3.3),
    )
)
"""Quarters of phones sold in 2024; ``docs/reference/devices.md`` says where figures come from."""
POPULATIONS = {"paper": PAPER_GROUPS, "phones-2024": PHONES_2024}
"""Devices by name, for ``devices.groups``."""


def limited_groups(limit: float) -> tuple[Group, ...]:
    """10 % strong devices, 90 % limited to ``limit`` of time and memory: the paper's ablation."""
    return (
        Group("strong", share=0.1, time=1.0, memory=1.0, upload=1.0),
        Group("limited", share=0.9, time=limit, memory=limit, upload=1.0),
    )


def make_devices(n_devices: int, groups: Sequence[Group], seed: int) -> Devices:
    """Deal devices to groups at random, in the proportion of their shares.

    Equal shares give the groups that the data is correlated with by the same seed.
    """
    if not 1 <= len(groups) <= n_devices:
        raise InvalidDevices(
            f"{n_devices} devices cannot form {len(groups)} groups; there must be at least one "
            "group, and a device for each"
        )
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise InvalidDevices(f"two groups have one name: {', '.join(names)}")
    if len({group.share for group in groups}) == 1:
        group_of = equal_groups(n_devices, len(groups), seed)
    else:
        sizes = _sizes(n_devices, [group.share for group in groups])
        group_of = np.repeat(np.arange(len(groups)), sizes)
        group_of = stream(seed, "devices.groups").permutation(group_of)
    for index, group in enumerate(groups):
        _check_trace(group, np.flatnonzero(group_of == index).tolist())
    return Devices(tuple(groups), group_of, seed)


def groups_from(tables: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Groups from the tables of a TOML file.

    >>> groups_from([{"name": "phones", "upload": {"uniform": [0.1, 0.3]}}])[0].upload
    Uniform(low=0.1, high=0.3)
    """
    groups = []
    for i, table in enumerate(tables):
        unknown = set(table) - {"name", "share", "trace", *RESOURCES, *_NUMBERS}
        if unknown or "name" not in table:
            wrong = f"unknown {', '.join(sorted(unknown))}" if unknown else "no name"
            raise InvalidDevices(
                f"device group {i}: {wrong}; expected name, share, {', '.join(RESOURCES)} "
                f"or trace, and {', '.join(_NUMBERS)}"
            )
        name, share = str(table["name"]), table.get("share", 1.0)
        numbers = {"share": share, **{key: table[key] for key in _NUMBERS if key in table}}
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidDevices(f"group {name!r}: {key} is {value!r}; expected a number")
        limits = {key: _limit(table[key], name, key) for key in RESOURCES if key in table}
        trace: Trace | None = None
        if "trace" in table:
            named = str(table["trace"])
            is_own = ":" in named and not os.path.exists(named)
            trace = import_function(named, InvalidDevices) if is_own else read_trace(Path(named))
        given: dict[str, Any] = {**limits, **numbers}
        groups.append(Group(name, trace=trace, **given))
    return groups


def read_trace(path: Path) -> RecordedTrace:
    """Read device, round, time, memory, upload; a row holds until the device's next one.

    An empty cell is unlimited. Every device needs a row for round 0. With a column ``available``
    a device whose row has 0 there cannot be asked.
    """
    rows: dict[int, dict[int, Budget | None]] = {}
    number = 1
    try:
        for number, line in enumerate(read_csv(path, MOST_TRACE_BYTES), start=2):
            if list(line) not in (_COLUMNS, [*_COLUMNS, _AVAILABLE]):
                raise InvalidDevices(
                    f"{path}: columns are {str(list(line))[:200]}; expected {','.join(_COLUMNS)}, "
                    f"and {_AVAILABLE} if devices come and go"
                )
            device, round_index = _whole(line["device"]), _whole(line["round"])
            if round_index in rows.setdefault(device, {}):
                raise InvalidDevices(
                    f"{path}, line {number}: device {device} has two rows for round {round_index}"
                )
            limits = {name: line[name].strip() for name in RESOURCES}
            budget = Budget.parse(**limits, samples=1) if _can_be_asked(line) else None
            rows[device][round_index] = budget
    except OSError as error:
        raise InvalidDevices(f"cannot read the trace {path}: {error}") from error
    except (ValueError, InvalidBudget) as error:
        where = f"{path}, line {number}" if rows else f"cannot read the trace {path}"
        raise InvalidDevices(f"{where}: {error}") from error
    if not rows:
        raise InvalidDevices(f"{path} has no rows")
    for device, found in rows.items():
        if min(found) != 0:
            raise InvalidDevices(
                f"{path}: device {device} has no row for round 0 (its first is for round "
                f"{min(found)}), so nobody knows what it begins with"
            )
    return RecordedTrace({device: sorted(own.items()) for device, own in rows.items()})


def _whole(text: str) -> int:
    """A device or a round."""
    if not (text.strip().isdecimal() and len(text) < 20):
        raise ValueError(f"{text[:40]!r} is no device or round; expected a number from 0")
    return int(text)


def _can_be_asked(line: Mapping[str, str]) -> bool:
    """What the column says, if there is one; an empty cell is a yes."""
    text = (line.get(_AVAILABLE) or "1").strip()
    if text not in ("0", "1"):
        raise ValueError(f"{_AVAILABLE} is {text[:40]!r}; expected 1, or 0 if it cannot be asked")
    return text == "1"


def _limit(value: Any, group: str, resource: str) -> Limit:
    match value:
        case {"uniform": [int() | float() as low, int() | float() as high], **more} if not more:
            return Uniform(float(low), float(high))
        case int() | float() | str() if not isinstance(value, bool):
            return value
    raise InvalidDevices(
        f"group {group!r}: {resource} is {value!r}; expected a fraction, an amount with a unit, or "
        "{uniform = [low, high]}"
    )


def _check_trace(group: Group, devices: Sequence[int]) -> None:
    trace = group.trace
    if isinstance(trace, RecordedTrace) and (missing := [d for d in devices if d not in trace]):
        shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise InvalidDevices(
            f"the trace of group {group.name!r} lacks device {shown}: it must have every device "
            f"of the group ({len(devices)} here), counted from 0"
        )


def _sizes(n_devices: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the shares, at least one each.

    >>> _sizes(10, [0.1, 0.9]), _sizes(3, [0.01, 0.99])
    ([1, 9], [1, 2])
    """
    exact = [n_devices * share / sum(shares) for share in shares]
    sizes = [max(1, int(size)) for size in exact]
    while sum(sizes) != n_devices:
        step = 1 if sum(sizes) < n_devices else -1
        candidates = [i for i in range(len(sizes)) if sizes[i] + step >= 1]
        furthest = max(candidates, key=lambda i: step * (exact[i] - sizes[i]))
        sizes[furthest] += step
    return sizes
