"""What all figures for a paper are drawn with (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cocofl.experiment import Spread

FORMATS = (".png", ".svg")
_TOGETHER = 0.8  # of the distance between two places


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure. It is not pyplot's: it belongs to nobody and needs no display."""
    return Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")


def save(figure: Figure, path: Path) -> list[Path]:
    """Draw a figure as PNG and as SVG; ``path`` is without an ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(path.name + kind) for kind in FORMATS]
    for file in files:
        figure.savefig(file)
    return files


def bare(axes: Axes, *, grid: bool = True) -> None:
    """Without a frame."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)


def plain(name: str) -> str:
    """Dollars begin formulas in matplotlib, and a leading underscore hides a name."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def grouped_bars(
    axes: Axes,
    series: Mapping[str, Sequence[Spread | None]],
    colours: Sequence[str],
    published: Mapping[str, Sequence[Spread | None]],
    scale: float,
) -> None:
    """One bar per series at every place, with the deviation over seeds.

    What was published is a line across the bar. A place without a value stays empty.
    """
    width = _TOGETHER / len(series)
    for index, (name, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        there = [(place + offset, one) for place, one in enumerate(values) if one is not None]
        axes.bar(
            [x for x, _ in there],
            [scale * one.mean for _, one in there],
            width,
            color=colours[index % len(colours)],
            label=name,
        )
        with_std = [(x, one) for x, one in there if one.std is not None]
        axes.errorbar(
            [x for x, _ in with_std],
            [scale * one.mean for _, one in with_std],
            yerr=[scale * (one.std or 0.0) for _, one in with_std],
            fmt="none",
            ecolor="black",
            elinewidth=0.8,
            capsize=2,
        )
        known = published.get(name, ())
        marks = [(place + offset, one) for place, one in enumerate(known) if one is not None]
        axes.hlines(
            [scale * one.mean for _, one in marks],
            np.array([x for x, _ in marks]) - width / 2,
            np.array([x for x, _ in marks]) + width / 2,
            colors="black",
            linewidth=1.6,
            label="published" if marks and index == 0 else "_",
        )
