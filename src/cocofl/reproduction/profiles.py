"""What the paper says about costs, asked of our tables: how much a configuration can save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cocofl.profiling import ProfileTable, shipped
from cocofl.reproduction.results import without_folder
from cocofl.reproduction.tables import TextTable

SAID = (
    "the paper, MobileNet on x64: time reduced by up to 90 %, memory by up to 89 %; against "
    "freezing alone, qff saves up to 75 % of the time and 60 % of the memory, ff 45 % and 28 %"
)


def tables_of(model: str, own: Path | None = None) -> list[ProfileTable]:
    """The tables of a model that ship with the package, and one's own before them."""
    names = [name for name in shipped() if name.partition("/")[0].endswith(f"-{model}")]
    theirs = [ProfileTable.load(own)] if own is not None else []
    return [*theirs, *(ProfileTable.load(name) for name in names)]


def savings(tables: Sequence[ProfileTable]) -> TextTable:
    """The cheapest configuration of each table, and whether time and upload can be chosen apart."""
    alone = next((table for table in tables if table.variant == "f"), None)
    lines = []
    for table in tables:
        kind = "width" if table.method == "width" else table.variant
        correlation = float(np.corrcoef(table.time, table.upload)[0, 1])
        lines.append(
            (
                without_folder(table.name),
                kind,
                str(len(table)),
                _saved(table.time),
                _saved(table.memory),
                *_against(table, alone),
                f"{correlation:.2f}",
            )
        )
    header = (
        *("table", "kind", "configurations", "time saved up to", "memory saved up to"),
        *("against f: time", "memory", "correlation of time and upload"),
    )
    notes = (SAID, *(without_folder(table.describe()) for table in tables))
    model = tables[0].model if tables else ""
    return TextTable(f"{model}: what configurations save", header, tuple(lines), notes)


def _saved(costs: np.ndarray) -> str:
    return f"{100 * (1 - float(costs.min())):.0f} %"


def _against(table: ProfileTable, alone: ProfileTable | None) -> tuple[str, str]:
    """The most that a span saves of what it costs with freezing alone."""
    if alone is None or alone is table or table.method == "width" or not _on_one(table, alone):
        return "–", "–"
    pairs = [(table.row(span), alone.row(span)) for span in table.spans if span in alone]
    time, memory = (max(1 - ours[i] / theirs[i] for ours, theirs in pairs) for i in (0, 1))
    return f"{100 * time:.0f} %", f"{100 * memory:.0f} %"


def _on_one(table: ProfileTable, other: ProfileTable) -> bool:
    """Whether both were measured on the same machine."""
    if table.hardware is None or other.hardware is None:
        return False
    return table.hardware.same_machine(other.hardware)
