"""What the paper says about costs, asked of our tables: how much a configuration can save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cocofl.profiling import ProfileTable, shipped
from cocofl.report.palette import kind_of
from cocofl.report.tables import TextTable
from cocofl.reproduction.results import without_folder

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
    against = [_against(table, alone) for table in tables]
    columns = {
        "table": [without_folder(table.name) for table in tables],
        "kind": [kind_of(table) for table in tables],
        "configurations": [str(len(table)) for table in tables],
        "time saved up to": [_saved(table.time) for table in tables],
        "memory saved up to": [_saved(table.memory) for table in tables],
        "against f: time": [time for time, _ in against],
        "memory": [memory for _, memory in against],
        "correlation of time and upload": [
            f"{float(np.corrcoef(table.time, table.upload)[0, 1]):.2f}" for table in tables
        ],
    }
    notes = (SAID, *(without_folder(table.describe()) for table in tables))
    return TextTable.of(f"{tables[0].model}: what configurations save", columns, notes)


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
