"""The paper's figures of profiling: what configurations cost, and what a limit leaves to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cocofl.budget import Budget
from cocofl.errors import CocoflError
from cocofl.fl.select import feasible
from cocofl.profiling import ProfileTable
from cocofl.report.drawing import FORMATS, bare, new_figure, save
from cocofl.report.palette import KIND_COLOURS, kind_of

MARKERS = {"qff": "o", "ff": "s", "f": "^", "width": "x"}
LIMITS = np.linspace(0.02, 1.0, 99)


def profiling_figure(tables: Sequence[ProfileTable], title: str) -> Figure:
    """Every configuration's time and memory over its upload, spans against widths.

    All are fractions of training everything. Spans fill the plane: time and upload can be chosen
    apart. Widths lie on a line: less time is less upload.
    """
    figure = new_figure(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    for table in tables:
        _scatter(left, table, "time")
        _scatter(right, table, "memory")
    left.set_ylabel("training time / full")
    kinds = sorted({table.memory_kind for table in tables})
    right.set_ylabel(f"peak memory / full ({' and '.join(kinds)})")
    handles, labels = left.get_legend_handles_labels()
    columns = min(4, max(1, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def blocks_figure(tables: Sequence[ProfileTable], title: str) -> Figure:
    """How many blocks some feasible span trains when time and memory are limited to l."""
    figure = new_figure(5.6, 3.8)
    axes = figure.add_subplot()
    draw_blocks(axes, {_label(table): table for table in tables})
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    return figure


def draw_blocks(axes: Axes, tables: Mapping[str, ProfileTable]) -> None:
    """A staircase for each table, under its name."""
    for name, table in tables.items():
        counts = [trainable_blocks(table, float(limit)) for limit in LIMITS]
        axes.step(LIMITS, counts, where="post", color=KIND_COLOURS[table.variant], label=name)
    axes.set_xlabel("limit l on time and memory / full")
    axes.set_ylabel("blocks that can be trained")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    bare(axes, grid=False)


def trainable_blocks(table: ProfileTable, limit: float) -> int:
    """The number of blocks that can be trained with time and memory within the limit."""
    fitting = feasible(table, Budget(time=limit, memory=limit))
    return len({block for blocks in fitting for block in blocks})


def save_profile_figures(path: Path, tables: Sequence[ProfileTable]) -> list[Path]:
    """Draw both figures as PNG and SVG beside ``path``; the files that were written."""
    if path.suffix not in ("", *FORMATS):
        raise CocoflError(
            f"cannot draw into {path}: its name must end in .png or .svg; both are made"
        )
    models = " and ".join(dict.fromkeys(table.model for table in tables))
    spans = [table for table in tables if table.method == "span"]
    figures = {"": profiling_figure(tables, f"{models}: what each configuration costs")}
    if spans:
        figures["-blocks"] = blocks_figure(spans, f"{models}: what a limit leaves to train")
    return [
        file
        for suffix, figure in figures.items()
        for file in save(figure, path.with_name(path.stem + suffix))
    ]


def _scatter(axes: Axes, table: ProfileTable, what: str) -> None:
    kind = kind_of(table)
    axes.scatter(
        table.upload,
        table.time if what == "time" else table.memory,
        s=14,
        marker=MARKERS[kind],
        color=KIND_COLOURS[kind],
        alpha=0.7,
        linewidths=1.0 if kind == "width" else 0,
        label=_label(table),
    )
    axes.set_xlabel("upload / full")
    axes.set_xlim(-0.03, 1.05)
    axes.set_ylim(bottom=0)
    bare(axes, grid=False)


def _label(table: ProfileTable) -> str:
    name = "HeteroFL, FjORD (width)" if table.method == "width" else f"CoCoFL {table.variant}"
    return f"{name}, {table.source}"
