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
     "process_bytes": 378000000,          // beside all that follows; null if nobody knows
     "error": {"time_median": 0.02, …},   // of predictions, as fractions; empty if measured
     "columns": ["start", "stop", "step_s", "rss_bytes", "tensor_bytes", "upload_bytes"],
     "rows": [[0, 1, 0.0712, 71234304, 61234176, 14620], …],
     "checksum": "…"                      // of all that; leave it out of a table made by hand
    }

``step_s`` is the time of one mini-batch. Memory is what training adds to a process that has
imported everything and loaded model and data: ``rss_bytes`` is the peak of resident memory above
that process (``null`` where it was not measured), ``tensor_bytes`` the peak of live tensor bytes.
What such a process holds by itself is ``process_bytes``. Tables of before have no such key, and
their ``rss_bytes`` count a part of the process, about 100 MB, in every row.

A width table has ``width`` in place of ``start`` and ``stop``, and a table with sets of blocks that
have gaps has ``blocks``, a text like ``"2:4+19:20"``. The row that trains every block (0:n_blocks,
or width 1) is what fractions refer to.

A table of low-rank adapters has their ``rank``, rows of blocks that have some, and as ``full`` the
costs of training every block whole: so a share of full training means the same in all tables. So
has one with ``"checkpoint": true``, of trained blocks that are computed again in the backward pass,
and one with ``"precision": "bfloat16"``, of trained blocks that are computed so.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cocofl.budget import Budget, bytes_text
from cocofl.checks import Check, check_of, in_short
from cocofl.errors import InvalidSpan, InvalidTable, OtherHardware, TableMismatch
from cocofl.files import parsed_json, read_limited, write_text
from cocofl.freeze.precision import FLOAT32
from cocofl.span import MOST_BLOCKS, Blocks, Span

FORMAT = "cocofl profile table 1"
METHODS = ("span", "width")
SOURCES = ("measured", "fast", "analytic", "published")
SHIPPED = Path(__file__).parent / "tables"
PREFIX = "measured:"
PUBLISHED_BATCH = 32  # the paper's, for all its tables
_FRACTIONS = ("time", "memory", "upload")
_TEXTS = ("model", "method", "variant", "backend")
_LEAST, _MOST = 1e-15, 1e18

Floats = NDArray[np.float64]
Configuration = Blocks | float


@dataclass(frozen=True)
class Hardware:
    """What step times depend on. ``plan`` is a short hash of the int8 kernel plan."""

    cpu: str
    threads: int
    torch: str
    plan: str = ""

    @classmethod
    def here(cls, threads: int | None = None, choices: Mapping[str, str] = {}) -> Hardware:
        """This machine, with the threads and the kernel plan in use."""
        used = torch.get_num_threads() if threads is None else threads
        text = "\n".join(f"{signature}={kernel}" for signature, kernel in sorted(choices.items()))
        plan = hashlib.sha256(text.encode()).hexdigest()[:8] if choices else ""
        return cls(cpu_name(), used, _release(torch.__version__), plan)

    def same_machine(self, other: Hardware) -> bool:
        """Whether step times can be compared: the processor and the PyTorch release agree."""
        return (self.cpu, _release(self.torch)) == (other.cpu, _release(other.torch))

    def __str__(self) -> str:
        return f"{self.cpu}, {self.threads} threads, torch {self.torch}"


@cache
def cpu_name() -> str:
    """The processor as the system calls it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _release(version: str) -> str:
    """Without the build: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]


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
    ``tensor``, and counts what training adds to ``process_bytes``, which the process holds anyway.
    The ``full_…`` values turn fractions into seconds and bytes; None where nobody said.
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
    process_bytes: int | None = None
    full_step_s: float | None = None
    full_memory_bytes: float | None = None
    full_upload_bytes: float | None = None
    error: Mapping[str, float] = field(default_factory=dict)
    costs: tuple[Cost, ...] = ()
    rank: int = 0
    """Of the low-rank adapters that are trained; 0 where whole blocks are."""
    checkpoint: bool = False
    """Whether trained blocks are computed again in the backward pass."""
    precision: str = FLOAT32
    """Of trained blocks."""
    full: Cost | None = None
    """What training every block whole costs, where no row says so."""
    name: str = "(not saved)"

    @classmethod
    def from_costs(
        cls, costs: Mapping[Configuration, Cost], *, n_blocks: int, **facts: Any
    ) -> ProfileTable:
        """A table of absolute costs; it must have every configuration up to the full one.

        Full training is that of all blocks, or what ``facts`` say is ``full``.
        """
        configurations = tuple(sorted(costs))
        rows = tuple(costs[key] for key in configurations)
        everything = 1.0 if facts["method"] == "width" else Span(0, n_blocks)
        whole: Cost = facts.get("full") or costs[everything]
        by_rss = all(row.rss_bytes is not None for row in (*rows, whole))
        peak = "rss_bytes" if by_rss else "tensor_bytes"
        amounts = np.array(
            [(r.step_s, getattr(r, peak), r.upload_bytes) for r in (*rows, whole)], float
        )
        full = amounts[-1]
        return cls(
            **_columns(configurations, amounts[:-1] / full),
            memory_kind="rss" if by_rss else "tensor",
            n_blocks=n_blocks,
            full_step_s=float(full[0]),
            full_memory_bytes=float(full[1]),
            full_upload_bytes=float(full[2]),
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
        here = Hardware.here()
        if not named and table.hardware and not table.hardware.same_machine(here):
            warnings.warn(
                f"{table.name} was measured on {table.hardware}, but this is {here}: "
                "its seconds and fractions need not hold here",
                OtherHardware,
                stacklevel=2,
            )
        return table

    def save(self, path: str | Path) -> None:
        """Write the table, whole or not at all."""
        if not self.costs:
            raise InvalidTable(f"{self.name} holds fractions only; it stays in its own format")
        write_text(Path(path), _to_text(self))

    def check_fits(self, n_blocks: int) -> None:
        """Refuse a model with another number of blocks."""
        if self.method == "span" and self.n_blocks != n_blocks:
            raise TableMismatch(
                f"{self.name} is for {self.n_blocks} blocks ({self.model}), but the model has "
                f"{n_blocks}; profile it with `cocofl profile`, or use the table of this model"
            )

    def limits(self, budget: Budget) -> tuple[float, float, float]:
        """The budget's time, memory and upload as fractions of this table's full training."""
        full_s = None
        if budget.samples is not None and self.batch is not None and self.full_step_s is not None:
            full_s = math.ceil(budget.samples / self.batch) * self.full_step_s
        return (
            self._limit("time", budget.time, budget.time_s, full_s),
            self._limit("memory", budget.memory, budget.memory_bytes, self.full_memory_bytes),
            self._limit("upload", budget.upload, budget.upload_bytes, self.full_upload_bytes),
        )

    def _limit(self, what: str, fraction: float, amount: float, full: float | None) -> float:
        if math.isinf(amount):
            return fraction
        if full is None:
            text = f"{amount:g} s" if what == "time" else bytes_text(amount)
            raise TableMismatch(
                f"{self.name} gives {what} as fractions only, so {text} cannot be compared with "
                f"it; give the {what} as a fraction of full training, like 0.33"
            )
        return min(fraction, amount / full)

    @cached_property
    def spans(self) -> tuple[Blocks, ...]:
        """The configurations of a span table; it may have sets of blocks with gaps, too."""
        if self.method != "span":
            raise TableMismatch(f"{self.name} holds widths, not spans")
        return tuple(item for item in self.configurations if isinstance(item, Blocks))

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """The configurations of a width table, ascending."""
        if self.method != "width":
            raise TableMismatch(f"{self.name} holds spans, not widths")
        return tuple(item for item in self.configurations if isinstance(item, float))

    @cached_property
    def learning(self) -> tuple[int, ...]:
        """The blocks that have something to learn: all, or those with low-rank adapters."""
        return tuple(sorted({block for blocks in self.spans for block in blocks}))

    @cached_property
    def everything(self) -> Blocks:
        """The configuration that trains them all."""
        return joined(self.learning)

    def check_rank(self, rank: int) -> None:
        """Refuse a strategy that trains something else than this table is about."""
        if self.rank == rank:
            return
        about = f"low-rank adapters of rank {self.rank}" if self.rank else "whole blocks"
        wanted = f'train = "lora" with rank {rank}' if rank else 'train = "blocks"'
        how = f" --train lora --rank {rank}" if rank else ""
        raise TableMismatch(
            f"{self.name} says what training {about} costs, but the strategy has {wanted}; make a "
            f"table with `cocofl profile MODEL{how}`, or set tables.spans to analytic"
        )

    def check_precision(self, precision: str, key: str) -> None:
        """Refuse a strategy that trains in another; ``key`` is where the table was named."""
        if self.precision == precision:
            return
        if self.rank:
            raise TableMismatch(
                f"strategy.precision is {precision!r}, but low-rank adapters are trained in "
                "float32; leave it out"
            )
        raise TableMismatch(
            f"{self.name} says what training in {self.precision} costs, but the strategy has "
            f"precision = {precision!r}; make a table with `cocofl profile MODEL --precision "
            f"{precision}`, and name it in {key}"
        )

    def scaled(self, plain: ProfileTable, other: ProfileTable) -> ProfileTable:
        """This table with the times and peaks that ``other`` has beside ``plain``."""
        keys = self.configurations
        here, before, after = (np.array([t.row(key) for key in keys]) for t in (self, plain, other))
        rows = here * after / np.maximum(before, 1e-12)
        rows[:, 2] = self.upload
        name = f"{self.name}, as {other.name} is beside {plain.name}"
        columns = _columns(keys, rows)
        return replace(self, **columns, costs=(), checkpoint=other.checkpoint, name=name)

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
        columns = _columns(configurations, [self.row(item) for item in configurations])
        costs = [self.costs[self._index[item]] for item in configurations if self.costs]
        return replace(self, **columns, costs=tuple(costs))

    @cached_property
    def _index(self) -> dict[Configuration, int]:
        return {item: i for i, item in enumerate(self.configurations)}

    def __len__(self) -> int:
        return len(self.configurations)

    @property
    def kind(self) -> str:
        """The variant of spans, or ``width``."""
        return "width" if self.method == "width" else self.variant

    def describe(self) -> str:
        """One line that says what this table is, for every report that rests on it."""
        how = {
            "measured": "measured",
            "fast": "measured in part, the rest predicted",
            "analytic": "analytic: nothing was measured",
            "published": "published by the paper's authors",
        }[self.source]
        where = f" on {self.hardware}" if self.hardware else ""
        method = "widths" if self.method == "width" else f"spans, variant {self.variant}"
        method += f", low-rank adapters of rank {self.rank}" if self.rank else ""
        method += ", trained blocks checkpointed" * self.checkpoint
        method += f", trained in {self.precision}" * (self.precision != FLOAT32)
        what = f"{self.name}: {self.model}, {len(self)} {method}"
        return f"{what}; {how}{where}; {self.describe_memory()}"

    def describe_memory(self) -> str:
        """Which memory this is, and what the process holds beside it."""
        kind = {"rss": "resident memory", "tensor": "tensor memory"}[self.memory_kind]
        if self.process_bytes is not None:
            return f"{kind} that training adds to the process's {bytes_text(self.process_bytes)}"
        counts_process = self.memory_kind == "rss" and self.source != "published"
        return kind + ", part of the process's own counted in" * counts_process


def _columns(configurations: Sequence[Configuration], rows: Any) -> dict[str, Any]:
    time, memory, upload = np.array(rows, dtype=np.float64).T.copy()
    keys = tuple(configurations)
    return {"configurations": keys, "time": time, "memory": memory, "upload": upload}


def joined(blocks: Sequence[int]) -> Blocks:
    """Single blocks as one set."""
    return Blocks.parse("+".join(f"{block}:{block + 1}" for block in blocks))


def spans_over(learning: Sequence[int]) -> list[Blocks]:
    """What spans come to where only these blocks have something to learn, each once.

    >>> [str(blocks) for blocks in spans_over([1, 3])]
    ['1:2', '1:2+3:4', '3:4']
    """
    ends = combinations(range(len(learning) + 1), 2)
    return sorted(joined(learning[start:stop]) for start, stop in ends)


def spans_with_head(learning: Sequence[int]) -> list[Blocks]:
    """Every span with the last block, the classifier, beside it or in it.

    >>> [str(blocks) for blocks in spans_with_head(range(3))]
    ['0:1+2:3', '0:3', '1:3', '2:3']
    """
    head = joined(learning[-1:])
    return sorted({span | head for span in spans_over(learning)})


def spans_alone(table: ProfileTable) -> ProfileTable:
    """The table of all spans."""
    wanted = spans_over(table.learning)
    if any(span not in table for span in wanted):
        raise TableMismatch(
            f"{table.name} has spans with the classifier beside them only; set strategy.head = "
            "true, or give a table made without --head"
        )
    return table if len(table) == len(wanted) else table.only(wanted)


def beside_head(table: ProfileTable) -> ProfileTable:
    """The table of all spans with the last block beside them.

    A table made with ``cocofl profile --head`` has them. Else they are derived: what the last
    block adds when it is trained instead of passed through is there to see, in the spans that
    reach it and those that end just before it. Time grows by what it adds in the median, if that
    can be seen at all: a linear layer is soon lost in the noise of a measurement. Memory, a peak,
    grows by the most that it ever adds, but not beyond that of training everything up to the last
    block: it errs on the high side. Uploads add up.
    """
    learning, n = table.learning, len(table.learning)
    if learning[-1] != table.n_blocks - 1:
        raise TableMismatch(
            "strategy.head lets every device train the last block, but that has no adapter and no "
            "head of its own to learn; leave it out"
        )
    wanted = spans_with_head(learning)
    if all(blocks in table for blocks in wanted):
        return table.only(wanted)
    spans_alone(table)  # refuses a table that has neither
    reaching = np.array([table.row(joined(learning[i:])) for i in range(n - 1)])
    before = np.array([table.row(joined(learning[i:-1])) for i in range(n - 1)])
    more_time = max(0.0, float(np.median((reaching - before)[:, 0])))
    more_memory = max(0.0, float((reaching - before)[:, 1].max()))
    upload_of_head = table.row(joined(learning[-1:]))[2]

    def row(blocks: Blocks) -> tuple[float, float, float]:
        if blocks in table:
            return table.row(blocks)
        own = [block for block in blocks if block != learning[-1]]
        time, memory, upload = table.row(joined(own))
        most = max(memory, table.row(joined(learning[learning.index(own[0]) :]))[1])
        return time + more_time, min(memory + more_memory, most), upload + upload_of_head

    columns = _columns(wanted, [row(blocks) for blocks in wanted])
    return replace(table, **columns, costs=(), name=f"{table.name}, the classifier's part derived")


def checkpointed_beside(path: Path) -> Path:
    """Where the table goes that is the same but for checkpointing.

    >>> checkpointed_beside(Path("own.json")).name
    'own-checkpoint.json'
    """
    return path.with_name(f"{path.stem}-checkpoint{path.suffix}")


def shipped() -> list[str]:
    """The names of the tables that come with the package."""
    return [PREFIX + path.stem.replace("+", "/") for path in sorted(SHIPPED.glob("*.json"))]


def _shipped_path(name: str) -> Path:
    stem, _, kind = name.removeprefix(PREFIX).partition("/")
    path = SHIPPED / f"{stem}+{kind or 'qff'}.json"
    if not path.exists():
        known = ", ".join(shipped()) or "none"
        raise InvalidTable(f"there is no table {name!r} in the package; there are: {known}")
    return path


def _read_json(path: Path) -> Any:
    try:
        return parsed_json(read_limited(path))
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


_SHAPES: dict[str, Check] = {
    **dict.fromkeys(("format", *_TEXTS, "source", "checksum"), check_of(str)),
    **dict.fromkeys(("n_blocks", "batch", "rank"), check_of(int)),
    "checkpoint": check_of(bool),
    "precision": check_of(Literal["float32", "bfloat16"]),
    "hardware": check_of(dict[str, str | int] | None),
    "process_bytes": check_of(int | None),
    "error": check_of(dict[str, float]),
    "columns": check_of(list[str]),
    "rows": check_of(list[list[str | float | None]]),
    "full": check_of(list[float | None]),
}
_NOT_NEEDED = (
    "hardware", "process_bytes", "error", "checksum", "rank", "checkpoint", "precision", "full",
)  # fmt: skip


def _own(content: Mapping[str, Any], name: str) -> ProfileTable:
    for key, choices in (("method", METHODS), ("source", SOURCES)):
        if content.get(key) not in choices:
            raise InvalidTable(
                f"{name}: {key} is {in_short(content.get(key))}; expected one of "
                f"{', '.join(choices)}"
            )
    kinds = [["width"]] if content["method"] == "width" else [["blocks"], ["start", "stop"]]
    rows = _rows(content, kinds, Cost._fields, name)
    incomplete = f"{name} is not a complete profile table"
    for key in content.keys() | _SHAPES.keys() - _NOT_NEEDED:
        if key not in content or key not in _SHAPES:
            raise InvalidTable(f"{incomplete}: {'unknown' if key in content else 'no'} {key[:40]}")
        if not _SHAPES[key](content[key]):
            raise InvalidTable(f"{incomplete}: {key} is {in_short(content[key])}")
    try:
        hardware = None if content.get("hardware") is None else Hardware(**content["hardware"])
    except TypeError as problem:
        raise InvalidTable(f"{incomplete}: {problem}") from problem
    for key, value in (asdict(hardware) if hardware else {}).items():
        if isinstance(value, int) != (key == "threads"):
            raise InvalidTable(f"{incomplete}: hardware.{key} is {in_short(value)}")
    rank, checkpoint = content.get("rank", 0), content.get("checkpoint", False)
    precision = content.get("precision", FLOAT32)
    is_compared = rank > 0 or checkpoint or precision != FLOAT32
    if is_compared != ("full" in content) or (is_compared and content["method"] == "width"):
        raise InvalidTable(
            f"{incomplete}: spans of a rank, with checkpoint or in bfloat16, and only they, have a "
            "row full"
        )
    return ProfileTable.from_costs(
        {key: Cost(*values) for key, values in rows.items()},
        n_blocks=content["n_blocks"],
        source=content["source"],
        batch=_whole(content, "batch", name),
        hardware=hardware,
        process_bytes=content.get("process_bytes"),
        error=content.get("error", {}),
        rank=rank,
        checkpoint=checkpoint,
        precision=precision,
        full=_full(content, name) if is_compared else None,
        name=name,
        **{key: content[key] for key in _TEXTS},
    )


def _full(content: Mapping[str, Any], name: str) -> Cost:
    """What training every block whole costs, beside rows of something else."""
    values = content["full"]
    if len(values) != len(Cost._fields):
        raise InvalidTable(
            f"{name}: full is {in_short(values)}; expected {len(Cost._fields)} numbers"
        )
    everything: Configuration = Span(0, content["n_blocks"])
    return Cost(*_checked([(everything, values)], Cost._fields, name)[everything])


def _rows(
    content: Mapping[str, Any], kinds: Sequence[list[str]], fields: Sequence[str], name: str
) -> dict[Configuration, Sequence[Any]]:
    """What a file says of every configuration, which one of the kinds of columns names."""
    columns, rows = content.get("columns"), content.get("rows")
    # The last is the one that a wrong table is told of.
    keys = next((kind for kind in kinds if columns == [*kind, *fields]), None)
    if keys is None:
        raise InvalidTable(
            f"{name}: columns are {str(columns)[:200]}; expected {[*kinds[-1], *fields]}"
        )
    if not isinstance(rows, list) or not rows:
        raise InvalidTable(f"{name} has no rows")
    n_columns = len(keys) + len(fields)
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != n_columns:
            raise InvalidTable(f"{name}: row {i} is {in_short(row)}; expected {n_columns} numbers")
    # Of tables of before, of their rows only.
    if content.get("checksum") not in (None, _checksum(content), _checksum(rows)):
        raise InvalidTable(
            f"{name} was changed after it was written: it does not match its checksum. "
            'Profile again, or remove the "checksum" line if the change is meant'
        )
    n_blocks = _whole(content, "n_blocks", name, MOST_BLOCKS)
    read = _width if keys == ["width"] else partial(_blocks, n_blocks)
    pairs = ((read(row[: len(keys)], name), row[len(keys) :]) for row in rows)
    found = _checked(pairs, fields, name)
    if keys == ["width"]:
        if 1.0 not in found:
            raise InvalidTable(f"{name} lacks width 1, to which all fractions refer")
        return found
    _check_complete(found, n_blocks, name, adapters=bool(content.get("rank")))
    return found


def _check_complete(
    found: Mapping[Configuration, Sequence[Any]], n_blocks: int, name: str, *, adapters: bool
) -> None:
    """Refuse a table that lacks spans; of adapters, those of blocks that have some."""
    learning: Sequence[int] = range(n_blocks)
    if adapters:
        learning = sorted({block for own in found if isinstance(own, Blocks) for block in own})
    k = len(learning)
    ends = combinations(range(k + 1), 2)
    every = (joined(learning[start:stop]) for start, stop in ends)
    missing = (str(blocks) for blocks in every if blocks not in found)
    # Counted first: whoever says that there are a thousand blocks need not be asked for all spans.
    few = len(found) <= k * (k - 1) // 2
    if (first := [*islice(missing, 6)]) and (
        few or any(blocks not in found for blocks in spans_with_head(learning))
    ):
        shown = ", ".join(first[:5]) + (", …" if len(first) > 5 else "")
        raise InvalidTable(
            f"{name} has {len(found)} of the {k * (k + 1) // 2} spans of {k} "
            f"blocks; missing are {shown}"
        )


def _whole(content: Mapping[str, Any], key: str, name: str, most: int = 2**31) -> int:
    value = content.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidTable(
            f"{name}: {key} is {in_short(value)}; expected a whole number from 1 to {most}"
        )
    return value


def _width(key: Sequence[Any], name: str) -> float:
    (width,) = key
    if type(width) not in (int, float) or not 0 < width <= 1:
        raise InvalidTable(f"{name}: width {in_short(width)} is not a ratio in (0, 1]")
    return float(width)


def _blocks(n_blocks: int, key: Sequence[Any], name: str) -> Blocks:
    text = str(key[0]) if len(key) == 1 else ":".join(map(in_short, key))
    try:
        blocks = Blocks.parse(text)
        blocks.check_fits(n_blocks)
    except InvalidSpan:
        raise InvalidTable(
            f"{name}: {text[:60]} is not a span of a chain of {n_blocks} blocks"
        ) from None
    return blocks


def _checked(
    rows: Iterable[tuple[Configuration, Sequence[Any]]], fields: Sequence[str], name: str
) -> dict[Configuration, Sequence[Any]]:
    """Each configuration once, with numbers that can be costs."""
    found: dict[Configuration, Sequence[Any]] = {}
    for key, values in rows:
        if key in found:
            raise InvalidTable(f"{name} has two rows for {key}")
        for column, value in zip(fields, values, strict=True):
            if column != "rss_bytes" or value is not None:
                positive = not column.startswith("upload")
                _check_number(value, f"{name}: {column} of {key}", positive=positive)
        found[key] = values
    return found


def _check_number(value: Any, what: str, *, positive: bool = True) -> None:
    # So large or small that their fractions are still numbers.
    if type(value) not in (int, float) or not (
        _LEAST <= value <= _MOST or (value == 0 and not positive)
    ):
        expected = "a number above 0" if positive else "a number that is not negative"
        raise InvalidTable(f"{what} is {in_short(value)}; expected {expected}")


def _published_rows(content: Mapping[str, Any], name: str) -> ProfileTable:
    """The eight tables beside the paper: fractions of full training, and what full training is."""
    rows = _rows(content, [["start", "stop"]], _FRACTIONS, name)
    for key in ("full_step_seconds", "full_peak_gb"):
        _check_number(content.get(key), f"{name}: {key}")
    return _of_fractions(
        rows,
        content["n_blocks"],
        model=f"{content.get('network')} on {content.get('platform')}",
        name=name,
        full_step_s=float(content["full_step_seconds"]),
        full_memory_bytes=content["full_peak_gb"] * 1e9,
    )


def _published_list(content: Sequence[Any], name: str) -> ProfileTable:
    """The authors' own form: a list of {freeze: frozen blocks, time, data, memory}."""
    if not content:
        raise InvalidTable(f"{name} has no rows")
    entries = []
    for i, entry in enumerate(content):
        try:
            frozen = [int(block) for block in entry["freeze"]]
            if any(block >= MOST_BLOCKS for block in frozen):
                raise ValueError(f"no chain has more than {MOST_BLOCKS} blocks")
            entries.append((frozen, [entry["time"], entry["memory"], entry["data"]]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidTable(
                f"{name}: entry {i} is not an object with freeze, time, data and memory: {error!r}"
            ) from error
    n_blocks = 1 + max((block for frozen, _ in entries for block in frozen), default=0)
    pairs = ((_span_beside(frozen, n_blocks, name), values) for frozen, values in entries)
    rows = _checked(pairs, _FRACTIONS, name)
    return _of_fractions(rows, n_blocks, model=Path(name).stem, name=name)


def _span_beside(frozen: list[int], n_blocks: int, name: str) -> Span:
    """The span that is trained where these blocks are frozen."""
    trained = sorted(set(range(n_blocks)) - set(frozen))
    if not trained or len(trained) != trained[-1] - trained[0] + 1 or min(frozen, default=0) < 0:
        raise InvalidTable(
            f"{name}: with blocks {str(frozen)[:60]} frozen of {n_blocks}, the trained ones are "
            f"{str(trained)[:60]}; expected one contiguous range"
        )
    return Span(trained[0], trained[-1] + 1)


def _of_fractions(
    rows: Mapping[Configuration, Sequence[float]], n_blocks: int, **facts: Any
) -> ProfileTable:
    spans = sorted(rows)
    return ProfileTable(
        **_columns(spans, [rows[span] for span in spans]),
        method="span",
        variant="qff",
        source="published",
        n_blocks=n_blocks,
        memory_kind="rss",
        batch=PUBLISHED_BATCH,
        **facts,
    )


def _to_text(table: ProfileTable) -> str:
    columns = ["width"]
    keys: list[list[Any]] = [[key] for key in table.configurations]
    if table.method == "span":
        columns, keys = ["blocks"], [[str(key)] for key in table.configurations]
        spans = [key for key in table.configurations if isinstance(key, Span)]
        if len(spans) == len(keys):
            columns, keys = ["start", "stop"], [[span.start, span.stop] for span in spans]
    rows = [[*key, *cost] for key, cost in zip(keys, table.costs, strict=True)]
    facts = {key: getattr(table, key) for key in (*_TEXTS, "source", "n_blocks", "batch")}
    head = {
        "format": FORMAT,
        **facts,
        **({"rank": table.rank} if table.rank else {}),
        **({"checkpoint": True} if table.checkpoint else {}),
        **({"precision": table.precision} if table.precision != FLOAT32 else {}),
        **({"full": list(table.full)} if table.full else {}),
        "hardware": None if table.hardware is None else asdict(table.hardware),
        **({} if table.process_bytes is None else {"process_bytes": table.process_bytes}),
        "error": dict(table.error),
        "columns": [*columns, *Cost._fields],
    }
    checksum = _checksum({**head, "rows": rows})
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    end = f' ],\n "checksum": "{checksum}"\n}}\n'
    return "\n".join(["{", *lines, ' "rows": [', body, end])


def _checksum(content: Mapping[str, Any] | Sequence[Any]) -> str:
    """Of rows, or of all that a table says."""
    if isinstance(content, Mapping):
        content = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
