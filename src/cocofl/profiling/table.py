"""The profile table: what each configuration costs.

Its file is described, read and written in :mod:`~cocofl.profiling.table_file`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocofl.budget import Budget, bytes_text
from cocofl.errors import InvalidTable, OtherHardware, TableMismatch
from cocofl.freeze.precision import FLOAT32
from cocofl.profiling import table_file
from cocofl.profiling.configurations import (
    Configuration,
    Cost,
    joined,
    spans_over,
    spans_with_head,
)
from cocofl.profiling.hardware import Hardware
from cocofl.span import Blocks, Span

__all__ = [
    "Configuration",
    "Floats",
    "ProfileTable",
    "beside_head",
    "checkpointed_beside",
    "shipped",
    "spans_alone",
]

SHIPPED = Path(__file__).parent / "tables"
PREFIX = "measured:"

Floats = NDArray[np.float64]


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
    def _of_fractions(
        cls, rows: Mapping[Configuration, Sequence[float]], **facts: Any
    ) -> ProfileTable:
        """A table that was published, of which costs are not known."""
        spans = sorted(rows)
        columns = _columns(spans, [rows[span] for span in spans])
        return cls(**columns, memory_kind="rss", **facts)

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
        facts, costs, fractions = table_file.read(path, str(source))
        table = cls.from_costs(costs, **facts) if costs else cls._of_fractions(fractions, **facts)
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
        facts = {key: getattr(self, key) for key in table_file.FACTS}
        costs = dict(zip(self.configurations, self.costs, strict=True))
        table_file.write(Path(path), costs, facts)

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
        """This table with the costs that ``other`` has beside ``plain``."""
        keys = self.configurations
        here, before, after = (np.array([t.row(key) for key in keys]) for t in (self, plain, other))
        rows = here * (after / np.maximum(before, 1e-12))
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
