"""The paper's data figure: which device holds how much of which class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from cocofl.errors import CocoflError

MAX_DEVICES_SHOWN = 120
ROW_IN = 0.22
FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def bubble_chart(
    counts: NDArray[np.int64],
    groups: NDArray[np.int64],
    class_names: Sequence[str],
    group_names: Sequence[str],
    title: str,
) -> Figure:
    """Device × class, area = samples, colour = group; devices of one group side by side.

    ``counts`` is (devices, classes). Of more devices than can be told apart, evenly spaced ones
    are shown, and the axis says so.
    """
    order = _shown(np.argsort(groups, kind="stable"))
    shown, group_of = counts[order], groups[order]
    chart_in = max(5.0, 0.1 * len(order))
    height_in = 1.0 + max(1.2, ROW_IN * counts.shape[1])
    # No pyplot: a figure made this way belongs to nobody and needs no display.
    figure = Figure(figsize=(chart_in + 2.0, height_in), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    device, label = np.nonzero(shown)
    largest = max(int(shown.max(initial=1)), 1)
    # Neighbours may touch, but each must be seen.
    diameter_pt = 72 * min(ROW_IN, 1.2 * chart_in / len(order))
    area_pt2 = diameter_pt**2 / largest
    colours = np.array([COLOURS[group % len(COLOURS)] for group in group_of])
    axes.scatter(
        device,
        label,
        s=shown[device, label] * area_pt2,
        c=colours[device],
        linewidths=0,
    )
    for boundary in np.flatnonzero(np.diff(group_of)) + 0.5:
        axes.axvline(boundary, color="0.8", linewidth=0.8, zorder=0)
    thinned = "" if len(order) == len(counts) else f" ({len(order)} of {len(counts)} shown)"
    axes.set_xlabel(f"device, by group{thinned}")
    axes.set_ylabel("class")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(-1, len(order))
    axes.set_xticks([])
    axes.set_yticks(range(counts.shape[1]), [_printable(name) for name in class_names], fontsize=7)
    axes.set_ylim(counts.shape[1] - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[*_group_handles(group_names), *_size_handles(largest, diameter_pt)],
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        labelspacing=0.8,
    )
    return figure


def save_bubble_chart(
    path: Path,
    counts: NDArray[np.int64],
    groups: NDArray[np.int64],
    class_names: Sequence[str],
    group_names: Sequence[str],
    title: str,
) -> None:
    """Draw the chart into a file, in the format its suffix names."""
    if path.suffix not in FORMATS:
        raise CocoflError(
            f"cannot draw into {path}: its name must end in {' or '.join(FORMATS)}, "
            "which says what kind of file it becomes"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    bubble_chart(counts, groups, class_names, group_names, title).savefig(path)


def _shown(order: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(order) <= MAX_DEVICES_SHOWN:
        return order
    return order[np.linspace(0, len(order) - 1, MAX_DEVICES_SHOWN).astype(np.int64)]


def _printable(name: str) -> str:
    """Characters are classes too, and some (newline, space, $) do not print or mean something."""
    return name.replace("$", r"\$") if name.strip() and name.isprintable() else repr(name)


def _group_handles(group_names: Sequence[str]) -> list[Line2D]:
    return [
        _handle(name, COLOURS[group % len(COLOURS)], 7.0) for group, name in enumerate(group_names)
    ]


def _size_handles(largest: int, diameter_pt: float) -> list[Line2D]:
    sizes = sorted({max(1, largest // 10), max(1, largest // 3), largest})
    return [
        _handle(f"{size} samples", "0.6", diameter_pt * (size / largest) ** 0.5) for size in sizes
    ]


def _handle(name: str, colour: str, size_pt: float) -> Line2D:
    return Line2D([], [], marker="o", linestyle="", color=colour, markersize=size_pt, label=name)
