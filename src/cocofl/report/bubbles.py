"""The paper's data figure: which device holds how much of which class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cocofl.errors import CocoflError
from cocofl.report.drawing import bare, new_figure
from cocofl.report.palette import group_colour
from cocofl.report.sources import Holdings, printable

MAX_DEVICES_SHOWN = 120
ROW_IN = 0.22
FORMATS = (".png", ".svg", ".pdf")


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
    if path.suffix not in FORMATS:
        raise CocoflError(
            f"cannot draw into {path}: its name must end in {' or '.join(FORMATS)}, "
            "which says what kind of file it becomes"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    bubble_chart(held, title).savefig(path)
