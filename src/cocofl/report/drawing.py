"""What figures for a paper show, drawn from numbers (matplotlib): data, costs, accuracies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from cocofl.budget import Budget
from cocofl.errors import CocoflError
from cocofl.experiment import Spread
from cocofl.files import replacing
from cocofl.fl.metrics import MetricFacts
from cocofl.fl.select import feasible
from cocofl.profiling import ProfileTable
from cocofl.report.palette import KIND_COLOURS, group_colour
from cocofl.report.sources import Holdings, printable

FORMATS = (".png", ".svg")
BUBBLE_FORMATS = (*FORMATS, ".pdf")
MAX_DEVICES_SHOWN = 120
ROW_IN = 0.22
MARKERS = {"qff": "o", "ff": "s", "f": "^", "width": "x"}
LIMITS = np.linspace(0.02, 1.0, 99)
LIMIT_TITLE = "limit l on time and memory / full"
_TOGETHER = 0.8  # of the distance between two places

Floats = NDArray[np.float64]
Series = Mapping[str, Sequence[Spread | None]]


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure. It is not pyplot's: it belongs to nobody and needs no display."""
    return Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")


def save(figure: Figure, path: Path) -> list[Path]:
    """Draw a figure as PNG and as SVG; ``path`` is without an ending."""
    files = [path.with_name(path.name + kind) for kind in FORMATS]
    for file in files:
        _draw_into(figure, file)
    return files


def _draw_into(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))


def bare(axes: Axes, *, grid: bool = True) -> None:
    """Without a frame."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)


def legend_below(figure: Figure, axes: Axes, columns: int, **more: Any) -> None:
    """What the lines of ``axes`` (and of others like it) are, in so many columns at most."""
    handles, labels = axes.get_legend_handles_labels()
    more["ncols"] = max(1, min(columns, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", frameon=False, **more)


def plain(name: str) -> str:
    """Dollars begin formulas in matplotlib, and a leading underscore hides a name."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


# --- who holds what ------------------------------------------------------------------------------


def bubble_chart(held: Holdings, title: str) -> Figure:
    """Device × class, area = samples, colour = group; devices of one group side by side.

    Of more devices than can be told apart some are shown, and the axis says so.
    """
    order = held.shown(MAX_DEVICES_SHOWN)
    shown, group_of = held.counts[order], held.group_of[order]
    n_devices, n_classes = held.counts.shape
    chart_in = max(5.0, 0.1 * len(order))
    figure = new_figure(chart_in + 2.0, 1.0 + max(1.2, ROW_IN * n_classes))
    axes = figure.add_subplot()
    device, label = np.nonzero(shown)
    largest = max(int(shown.max(initial=1)), 1)
    # Neighbours may touch, but each must be seen.
    diameter_pt = 72 * min(ROW_IN, 1.2 * chart_in / len(order))
    areas_pt2 = shown[device, label] * diameter_pt**2 / largest
    colours = [group_colour(group) for group in group_of[device]]
    axes.scatter(device, label, s=areas_pt2, c=colours, linewidths=0)
    for boundary in np.flatnonzero(np.diff(group_of)) + 0.5:
        axes.axvline(boundary, color="0.8", linewidth=0.8, zorder=0)
    thinned = "" if len(order) == n_devices else f" ({len(order)} of {n_devices} shown)"
    axes.set_xlabel(f"device, by group{thinned}")
    axes.set_ylabel("class")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(-1, len(order))
    axes.set_xticks([])
    names = [printable(name).replace("$", r"\$") for name in held.class_names]
    axes.set_yticks(range(n_classes), names, fontsize=7)
    axes.set_ylim(n_classes - 0.4, -0.6)
    bare(axes, grid=False)
    sizes = sorted({max(1, largest // 10), max(1, largest // 3), largest})
    handles = [(name, group_colour(i), 7.0) for i, name in enumerate(held.group_names)]
    handles += [(f"{n} samples", "0.6", diameter_pt * (n / largest) ** 0.5) for n in sizes]
    figure.legend(
        handles=[
            Line2D([], [], marker="o", linestyle="", color=colour, markersize=size_pt, label=name)
            for name, colour, size_pt in handles
        ],
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        labelspacing=0.8,
    )
    return figure


def save_bubble_chart(path: Path, held: Holdings, title: str) -> None:
    """Draw the chart into a file, in the format its suffix names."""
    if path.suffix not in BUBBLE_FORMATS:
        raise CocoflError(
            f"cannot draw into {path}: its name must end in {' or '.join(BUBBLE_FORMATS)}, "
            "which says what kind of file it becomes"
        )
    _draw_into(bubble_chart(held, title), path)


# --- what configurations cost -------------------------------------------------------------------


def profiling_figure(tables: Sequence[ProfileTable], title: str) -> Figure:
    """Every configuration's time and memory over its upload, spans against widths.

    All are fractions of training everything. Spans fill the plane: time and upload can be chosen
    apart. Widths lie on a line: less time is less upload.
    """
    figure = new_figure(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    for axes, what in ((left, "time"), (right, "memory")):
        for table in tables:
            kind = table.kind
            axes.scatter(
                table.upload,
                getattr(table, what),
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
    left.set_ylabel("training time / full")
    kinds = sorted({table.memory_kind for table in tables})
    right.set_ylabel(f"peak memory / full ({' and '.join(kinds)})")
    legend_below(figure, left, 4)
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
    axes.set_xlabel(LIMIT_TITLE)
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


def _label(table: ProfileTable) -> str:
    name = "HeteroFL, FjORD (width)" if table.method == "width" else f"CoCoFL {table.variant}"
    return f"{name}, {table.source}"


# --- accuracies ---------------------------------------------------------------------------------


def groups_figure(
    strategies: Sequence[str], ours: Series, published: Series, metric: MetricFacts, title: str = ""
) -> Figure:
    """What each group has under each strategy, with the deviation over seeds.

    What was published is a line across the bar. A place without a value stays empty.
    """
    figure = new_figure(max(4.5, 1.0 + 1.2 * len(strategies)), 3.6)
    axes = figure.add_subplot()
    width = _TOGETHER / len(ours)
    for index, (name, values) in enumerate(ours.items()):
        places = np.arange(len(strategies)) + (index - (len(ours) - 1) / 2) * width
        x, means, stds = _known(places, values, metric.scale)
        axes.bar(x, means, width, color=group_colour(index), label=name)
        axes.errorbar(x, means, stds, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        x, said, _ = _known(places, published.get(name, ()), metric.scale)
        label = "published" if len(x) and index == 0 else "_"
        axes.hlines(said, x - width / 2, x + width / 2, "black", linewidth=1.6, label=label)
    _name_places(axes, strategies, plain(f"{metric.name} of the group{metric.unit}"))
    if metric.is_share:
        axes.set_ylim(0, 104)
    legend_below(figure, axes, len(ours) + 1, fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def limits_figure(
    limits: Sequence[float], panels: Mapping[str, Series], tables: Mapping[str, ProfileTable]
) -> Figure:
    """Accuracy of each variant over the limit, a panel each without and with gains; and blocks.

    ``tables`` are by variant; the last panel counts the blocks that each leaves to train.
    """
    n_panels = len(panels) + bool(tables)
    figure = new_figure(4.0 * n_panels, 3.6)
    axes = figure.subplots(1, n_panels, squeeze=False)[0]
    first = axes[0]
    for own, (title, series) in zip(axes, panels.items(), strict=False):
        for variant, values in series.items():
            _points(own, limits, values, color=KIND_COLOURS[variant], label=variant)
        own.set_xlim(0, 1.03)
        own.set_xlabel(LIMIT_TITLE)
        own.set_title(title, loc="left", fontsize=9)
        bare(own)
        own.sharey(first)
    first.set_ylabel("accuracy / %")
    if tables:
        draw_blocks(axes[-1], tables)
        axes[-1].set_title("what fits", loc="left", fontsize=9)
    legend_below(figure, first, 3)
    return figure


def selectors_figure(limits: Sequence[float], series: Series) -> Figure:
    """The accuracy of each way to select a span, at each limit."""
    figure = new_figure(2.0 + 1.8 * len(limits), 3.6)
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(series.items()):
        places = np.arange(len(limits)) + 0.1 * (index - (len(series) - 1) / 2)
        _points(axes, places, values, color=group_colour(index), label=name, linestyle="none")
    _name_places(axes, [f"{limit:g}" for limit in limits], "accuracy / %")
    axes.set_xlabel(LIMIT_TITLE)
    legend_below(figure, axes, 4, fontsize=8)
    return figure


def _points(
    axes: Axes, places: Iterable[float], values: Sequence[Spread | None], **style: Any
) -> None:
    """Means in %, with the deviation over seeds."""
    style |= {"marker": "o", "markersize": 4, "linewidth": 1.4, "elinewidth": 0.8, "capsize": 2}
    axes.errorbar(*_known(places, values, 100), **style)


def _known(
    places: Iterable[float], values: Sequence[Spread | None], scale: float
) -> tuple[Floats, Floats, Floats]:
    """Places that have a value, its mean and its deviation; that of one seed is not a number."""
    pairs = [(x, one) for x, one in zip(places, values, strict=False) if one is not None]
    rows = [(x, scale * one.mean, scale * (one.std or np.nan)) for x, one in pairs]
    x, means, stds = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return x, means, stds


def _name_places(axes: Axes, names: Sequence[str], quantity: str) -> None:
    axes.set_xticks(range(len(names)), list(names), fontsize=8)
    axes.set_ylabel(quantity)
    bare(axes)
