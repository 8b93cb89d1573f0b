"""The profile table: what each configuration costs. Read and written here and nowhere else.

A table file is JSON::

    {
     "format": "cocofl profile table 1",
     "model": "mobilenet",
     "method": "span",                    // or "width"
     "variant": "qff", "backend": "auto", // of the frozen blocks; "" for widths
     "source": "measured",                // "fast": partly predicted, "analytic": not measured
     "n_blocks": 20, "batch": 32,
     "hardware": {"cpu": "…", "threads": 2, "torch": "2.13.0", "plan": "1a2b3c4d"},
     "error": {"time_median": 0.02, …},   // of predictions, as fractions; empty if measured
     "columns": ["start", "stop", "step_s", "rss_bytes", "tensor_bytes", "upload_bytes"],
     "rows": [[0, 1, 0.0712, 91234304, 61234176, 14620], …],
     "checksum": "…"                      // of the rows; leave it out of a table made by hand
    }

``step_s`` is the time of one mini-batch, ``rss_bytes`` the peak of resident memory above the
process's own start (``null`` where it was not measured), ``tensor_bytes`` the peak of live tensor
bytes. A width table has ``width`` in place of ``start`` and ``stop``, and a table with sets of
blocks that have gaps has ``blocks``, a text like ``"2:4+19:20"``. The row that trains every block
(0:n_blocks, or width 1) is what fractions refer to.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocofl.budget import Budget, bytes_text
from cocofl.errors import InvalidSpan, InvalidTable, OtherHardware, TableMismatch
from cocofl.profiling.hardware import Hardware
from cocofl.span import Blocks, Span, all_spans

FORMAT = "cocofl profile table 1"
METHODS = ("span", "width")
SOURCES = ("measured", "fast", "analytic", "published")
SHIPPED = Path(__file__).parent / "tables"
PREFIX = "measured:"
PUBLISHED_BATCH = 32  # the paper's, for all its tables

Floats = NDArray[np.float64]
Configuration = Blocks | float


class Cost(NamedTuple):
    """What one configuration costs; ``rss_bytes`` is None where it was not measured."""

    step_s: float
    rss_bytes: int | None
    tensor_bytes: int
    upload_bytes: int


@dataclass(frozen=True, eq=False)
class ProfileTable:
    """Time, memory and upload of every configuration, as fractions of training everything.

    ``configurations`` are sets of blocks, or widths as floats, beside ``time``, ``memory`` and
    ``upload`` in the same order. ``memory_kind`` says which peak ``memory`` is: ``rss`` or
    ``tensor``. The ``full_…`` values turn fractions into seconds and bytes; None where nobody said.
    """

    model: str
    method: str
    variant: str
    source: str
    n_blocks: int
    configurations: tuple[Configuration, ...]
    time: Floats
    memory: Floats
    upload: Floats
    memory_kind: str
    backend: str = ""
    batch: int | None = None
    hardware: Hardware | None = None
    full_step_s: float | None = None
    full_memory_bytes: float | None = None
    full_upload_bytes: float | None = None
    error: Mapping[str, float] = field(default_factory=dict)
    costs: tuple[Cost, ...] = ()
    name: str = "(not saved)"

    @classmethod
    def from_costs(
        cls, costs: Mapping[Configuration, Cost], *, n_blocks: int, **facts: Any
    ) -> ProfileTable:
        """A table of absolute costs; it must have every configuration up to the full one."""
        widths = facts["method"] == "width"
        configurations = tuple(sorted(costs))
        rows = tuple(costs[key] for key in configurations)
        full = costs[1.0 if widths else Span(0, n_blocks)]
        by_rss = all(row.rss_bytes is not None for row in rows)
        memory = [row.rss_bytes if by_rss else row.tensor_bytes for row in rows]
        full_memory = full.rss_bytes if by_rss else full.tensor_bytes
        assert full_memory is not None
        return cls(
            configurations=configurations,
            time=_array(row.step_s for row in rows) / full.step_s,
            memory=_array(memory) / full_memory,
            upload=_array(row.upload_bytes for row in rows) / full.upload_bytes,
            memory_kind="rss" if by_rss else "tensor",
            n_blocks=n_blocks,
            full_step_s=full.step_s,
            full_memory_bytes=float(full_memory),
            full_upload_bytes=float(full.upload_bytes),
            costs=rows,
            **facts,
        )

    @classmethod
    def load(cls, source: str | Path, *, n_blocks: int | None = None) -> ProfileTable:
        """Read a table: a file in our format, a published one, or ``measured:<cpu>-<model>``.

        The tables that ship with the package are one per variant, and one for widths:
        ``measured:epyc-mobilenet`` is short for ``measured:epyc-mobilenet/qff``. With
        ``n_blocks`` a table for another number of blocks is refused. A table file measured on
        other hardware than this gives an :class:`~cocofl.errors.OtherHardware` warning.
        """
        named = str(source).startswith(PREFIX)
        path = _shipped_path(str(source)) if named else Path(source)
        table = _parse(_read_json(path), str(source))
        if n_blocks is not None:
            table.check_fits(n_blocks)
        if not named:
            table.warn_of_other_hardware(Hardware.here())
        return table

    def save(self, path: str | Path) -> None:
        """Write the table, whole or not at all."""
        if not self.costs:
            raise InvalidTable(f"{self.name} holds fractions only; it stays in its own format")
        write_whole(path, _to_text(self))

    def check_fits(self, n_blocks: int) -> None:
        """Refuse a model with another number of blocks."""
        if self.method == "span" and self.n_blocks != n_blocks:
            raise TableMismatch(
                f"{self.name} is for {self.n_blocks} blocks ({self.model}), but the model has "
                f"{n_blocks}; profile it with `cocofl profile`, or use the table of this model"
            )

    def warn_of_other_hardware(self, here: Hardware) -> None:
        """Warn where step times were measured on a machine other than ``here``."""
        if self.hardware is not None and not self.hardware.same_machine(here):
            warnings.warn(
                f"{self.name} was measured on {self.hardware}, but this is {here}: "
                "its seconds and fractions need not hold here",
                OtherHardware,
                stacklevel=3,
            )

    def limits(self, budget: Budget) -> tuple[float, float, float]:
        """The budget's time, memory and upload as fractions of this table's full training."""
        return (
            min(budget.time, self._step_fraction(budget)),
            min(budget.memory, self._fraction("memory", budget.memory_bytes)),
            min(budget.upload, self._fraction("upload", budget.upload_bytes)),
        )

    def _step_fraction(self, budget: Budget) -> float:
        if math.isinf(budget.time_s):
            return math.inf
        if self.full_step_s is None or self.batch is None:
            raise TableMismatch(
                f"{self.name} gives times as fractions only, so {budget.time_s:g} s cannot be "
                "compared with it; give the time as a fraction of full training, like 0.33"
            )
        assert budget.samples is not None
        return budget.time_s / (math.ceil(budget.samples / self.batch) * self.full_step_s)

    def _fraction(self, what: str, limit_bytes: float) -> float:
        if math.isinf(limit_bytes):
            return math.inf
        full = self.full_memory_bytes if what == "memory" else self.full_upload_bytes
        if full is None:
            raise TableMismatch(
                f"{self.name} gives {what} as fractions only, so {bytes_text(limit_bytes)} cannot "
                f"be compared with it; give the {what} as a fraction of full training, like 0.33"
            )
        return limit_bytes / full

    @cached_property
    def spans(self) -> tuple[Blocks, ...]:
        """The configurations of a span table; it may have sets of blocks with gaps, too."""
        found = tuple(item for item in self.configurations if isinstance(item, Blocks))
        if len(found) != len(self.configurations):
            raise TableMismatch(f"{self.name} holds widths, not spans")
        return found

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """The configurations of a width table, ascending."""
        found = tuple(item for item in self.configurations if isinstance(item, float))
        if len(found) != len(self.configurations):
            raise TableMismatch(f"{self.name} holds spans, not widths")
        return found

    def row(self, configuration: Configuration) -> tuple[float, float, float]:
        """Time, memory and upload of one configuration, as fractions."""
        if configuration not in self._index:
            raise TableMismatch(f"{self.name} has no row for {configuration}")
        i = self._index[configuration]
        return float(self.time[i]), float(self.memory[i]), float(self.upload[i])

    def __contains__(self, configuration: object) -> bool:
        return configuration in self._index

    def only(self, configurations: Sequence[Configuration]) -> ProfileTable:
        """The table of some of its configurations; fractions are of full training as before."""
        at = [self._index[item] for item in configurations]
        return replace(
            self,
            configurations=tuple(configurations),
            time=self.time[at],
            memory=self.memory[at],
            upload=self.upload[at],
            costs=tuple(self.costs[i] for i in at) if self.costs else (),
        )

    @cached_property
    def _index(self) -> dict[Configuration, int]:
        return {item: i for i, item in enumerate(self.configurations)}

    def __len__(self) -> int:
        return len(self.configurations)

    def describe(self) -> str:
        """One line that says what this table is, for every report that rests on it."""
        how = {
            "measured": "measured",
            "fast": "measured in part, the rest predicted",
            "analytic": "analytic: nothing was measured",
            "published": "published by the paper's authors",
        }[self.source]
        kind = {"rss": "resident memory", "tensor": "tensor memory"}[self.memory_kind]
        where = f" on {self.hardware}" if self.hardware else ""
        method = "widths" if self.method == "width" else f"spans, variant {self.variant}"
        return f"{self.name}: {self.model}, {len(self)} {method}; {how}{where}; {kind}"


def spans_with_head(n_blocks: int) -> list[Blocks]:
    """Every span with the last block, the classifier, beside it or in it.

    >>> [str(blocks) for blocks in spans_with_head(3)]
    ['0:1+2:3', '0:3', '1:3', '2:3']
    """
    head = Span(n_blocks - 1, n_blocks)
    return sorted({span | head for span in all_spans(n_blocks)})


def shipped() -> list[str]:
    """The names of the tables that come with the package."""
    return [PREFIX + path.stem.replace("+", "/") for path in sorted(SHIPPED.glob("*.json"))]


def write_whole(path: str | Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    folder = Path(path).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _array(values: Iterable[Any]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def _shipped_path(name: str) -> Path:
    stem, _, kind = name.removeprefix(PREFIX).partition("/")
    path = SHIPPED / f"{stem}+{kind or 'qff'}.json"
    if not path.exists():
        known = ", ".join(shipped()) or "none"
        raise InvalidTable(f"there is no table {name!r} in the package; there are: {known}")
    return path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidTable(
            f"there is no profile table at {path}; make one with `cocofl profile MODEL --out FILE`"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidTable(
            f"{path} cannot be read as a profile table: {error}. The file may be truncated; "
            "make it anew with `cocofl profile MODEL --out FILE`"
        ) from error


def _parse(content: Any, name: str) -> ProfileTable:
    """Tell the three formats apart."""
    if isinstance(content, list):
        return _published_list(content, name)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return _own(content, name)
    if isinstance(content, dict) and "unit" in content and "rows" in content:
        return _published_rows(content, name)
    raise InvalidTable(
        f"{name} is not a profile table: expected {FORMAT!r} as written by `cocofl profile`, "
        "or a list of objects with freeze, time, data and memory as the paper's authors publish"
    )


def _own(content: Mapping[str, Any], name: str) -> ProfileTable:
    method = content.get("method")
    if method not in METHODS:
        raise InvalidTable(f"{name}: method is {method!r}; expected one of {', '.join(METHODS)}")
    columns = content.get("columns")
    # The last is the one that a wrong table is told of.
    kinds = [["width"]] if method == "width" else [["blocks"], ["start", "stop"]]
    for key_columns in kinds:
        wanted = [*key_columns, *Cost._fields]
        if columns == wanted:
            break
    else:
        raise InvalidTable(f"{name}: columns are {columns}; expected {wanted}")
    rows = _rows(content, name, len(wanted))
    if content.get("source") not in SOURCES:
        raise InvalidTable(
            f"{name}: source is {content.get('source')!r}; expected one of {', '.join(SOURCES)}"
        )
    checksum = content.get("checksum")
    if checksum is not None and checksum != _checksum(rows):
        raise InvalidTable(
            f"{name} was changed after it was written: its rows do not match its checksum. "
            'Profile again, or remove the "checksum" line if the change is meant'
        )
    n_blocks = _whole(content, "n_blocks", name)
    costs: dict[Configuration, Cost] = {}
    for row in rows:
        key = _configuration(row[: len(key_columns)], method, n_blocks, name)
        if key in costs:
            raise InvalidTable(f"{name} has two rows for {key}")
        costs[key] = _cost(row[len(key_columns) :], key, name)
    _check_complete(costs, method, n_blocks, name)
    hardware = content.get("hardware")
    try:
        error = {
            str(key): value if isinstance(value, int) else float(value)
            for key, value in content.get("error", {}).items()
        }
        return ProfileTable.from_costs(
            costs,
            n_blocks=n_blocks,
            model=str(content["model"]),
            method=method,
            variant=str(content["variant"]),
            backend=str(content["backend"]),
            source=content["source"],
            batch=_whole(content, "batch", name),
            hardware=None if hardware is None else Hardware(**hardware),
            error=error,
            name=name,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise InvalidTable(f"{name} is not a complete profile table: {problem!r}") from problem


def _rows(content: Mapping[str, Any], name: str, n_columns: int) -> list[list[Any]]:
    rows = content.get("rows")
    if not isinstance(rows, list) or not rows:
        raise InvalidTable(f"{name} has no rows")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != n_columns:
            raise InvalidTable(f"{name}: row {i} is {row!r}; expected {n_columns} numbers")
    return rows


def _whole(content: Mapping[str, Any], key: str, name: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidTable(f"{name}: {key} is {value!r}; expected a whole number from 1")
    return value


def _configuration(key: Sequence[Any], method: str, n_blocks: int, name: str) -> Configuration:
    if method == "width":
        (width,) = key
        if not isinstance(width, int | float) or not 0 < width <= 1:
            raise InvalidTable(f"{name}: width {width!r} is not a ratio in (0, 1]")
        return float(width)
    text = key[0] if len(key) == 1 else f"{key[0]!r}:{key[1]!r}"
    try:
        blocks = Blocks.parse(str(text))
        blocks.check_fits(n_blocks)
    except InvalidSpan:
        raise InvalidTable(
            f"{name}: {text} is not a span of a chain of {n_blocks} blocks"
        ) from None
    return blocks


def _cost(values: Sequence[Any], key: Configuration, name: str) -> Cost:
    for column, value in zip(Cost._fields, values, strict=True):
        if column == "rss_bytes" and value is None:
            continue
        _check_number(value, f"{name}: {column} of {key}", positive=column != "upload_bytes")
    return Cost(*values)


def _check_number(value: Any, what: str, *, positive: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        expected = "a number above 0" if positive else "a number that is not negative"
        raise InvalidTable(f"{what} is {value!r}; expected {expected}")


def _check_complete(found: Collection[Any], method: str, n_blocks: int, name: str) -> None:
    if method == "width":
        if 1.0 not in found:
            raise InvalidTable(f"{name} lacks width 1, to which all fractions refer")
        return
    missing = [str(span) for span in all_spans(n_blocks) if span not in found]
    if missing and any(blocks not in found for blocks in spans_with_head(n_blocks)):
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise InvalidTable(
            f"{name} has {len(found)} of the {len(found) + len(missing)} spans of {n_blocks} "
            f"blocks; missing are {shown}"
        )


def _published_rows(content: Mapping[str, Any], name: str) -> ProfileTable:
    """The eight tables beside the paper: fractions of full training, and what full training is."""
    wanted = ["start", "stop", "time", "memory", "upload"]
    if content.get("columns") != wanted:
        raise InvalidTable(f"{name}: columns are {content.get('columns')}; expected {wanted}")
    n_blocks = _whole(content, "n_blocks", name)
    rows: dict[Configuration, tuple[float, float, float]] = {}
    for start, stop, *values in _rows(content, name, len(wanted)):
        _add_fractions(rows, _configuration((start, stop), "span", n_blocks, name), values, name)
    _check_complete(rows, "span", n_blocks, name)
    for key in ("full_step_seconds", "full_peak_gb"):
        _check_number(content.get(key), f"{name}: {key}", positive=True)
    return _of_fractions(
        rows,
        n_blocks,
        model=f"{content.get('network')} on {content.get('platform')}",
        name=name,
        full_step_s=float(content["full_step_seconds"]),
        full_memory_bytes=float(content["full_peak_gb"]) * 1e9,
    )


def _published_list(content: Sequence[Any], name: str) -> ProfileTable:
    """The authors' own form: a list of {freeze: frozen blocks, time, data, memory}."""
    if not content:
        raise InvalidTable(f"{name} has no rows")
    entries = []
    for i, entry in enumerate(content):
        try:
            frozen = [int(block) for block in entry["freeze"]]
            entries.append((frozen, [entry["time"], entry["memory"], entry["data"]]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidTable(
                f"{name}: entry {i} is not an object with freeze, time, data and memory: {error!r}"
            ) from error
    n_blocks = 1 + max((block for frozen, _ in entries for block in frozen), default=0)
    rows: dict[Configuration, tuple[float, float, float]] = {}
    for frozen, values in entries:
        trained = sorted(set(range(n_blocks)) - set(frozen))
        found = Blocks.parse("+".join(f"{i}:{i + 1}" for i in trained)) if trained else None
        if not isinstance(found, Span) or min(frozen, default=0) < 0:
            raise InvalidTable(
                f"{name}: with blocks {frozen} frozen of {n_blocks}, the trained ones are "
                f"{trained}; expected one contiguous range"
            )
        _add_fractions(rows, found, values, name)
    return _of_fractions(rows, n_blocks, model=Path(name).stem, name=name)


def _add_fractions(
    rows: dict[Configuration, tuple[float, float, float]],
    key: Configuration,
    values: Sequence[Any],
    name: str,
) -> None:
    if key in rows:
        raise InvalidTable(f"{name} has two rows for {key}")
    for column, value in zip(("time", "memory", "upload"), values, strict=True):
        _check_number(value, f"{name}: {column} of {key}", positive=column != "upload")
    time, memory, upload = map(float, values)
    rows[key] = (time, memory, upload)


def _of_fractions(
    rows: Mapping[Configuration, tuple[float, float, float]], n_blocks: int, **facts: Any
) -> ProfileTable:
    spans = tuple(sorted(rows))
    time, memory, upload = np.array([rows[span] for span in spans], dtype=np.float64).T
    return ProfileTable(
        method="span",
        variant="qff",
        source="published",
        n_blocks=n_blocks,
        configurations=spans,
        time=time,
        memory=memory,
        upload=upload,
        memory_kind="rss",
        batch=PUBLISHED_BATCH,
        **facts,
    )


def _to_text(table: ProfileTable) -> str:
    keys: list[list[Any]] = [[key] for key in table.configurations]
    columns = ["width"]
    if table.method == "span":
        columns, keys = ["blocks"], [[str(key)] for key in table.configurations]
        spans = [key for key in table.configurations if isinstance(key, Span)]
        if len(spans) == len(keys):
            columns, keys = ["start", "stop"], [[span.start, span.stop] for span in spans]
    rows = [[*key, *cost] for key, cost in zip(keys, table.costs, strict=True)]
    head = {
        "format": FORMAT,
        "model": table.model,
        "method": table.method,
        "variant": table.variant,
        "backend": table.backend,
        "source": table.source,
        "n_blocks": table.n_blocks,
        "batch": table.batch,
        "hardware": None if table.hardware is None else asdict(table.hardware),
        "error": dict(table.error),
        "columns": [*columns, *Cost._fields],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    checksum = json.dumps(_checksum(rows))
    return (
        "\n".join(["{", *lines, ' "rows": [', body, " ],", f' "checksum": {checksum}', "}"]) + "\n"
    )


def _checksum(rows: Sequence[Sequence[Any]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
