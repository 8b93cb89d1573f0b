"""Bars side by side: several series over the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from cocofl.report.findings import Spread

_TOGETHER = 0.8  # of the distance between two places


def grouped_bars(
    axes: Axes,
    series: Mapping[str, Sequence[Spread | None]],
    colours: Sequence[str],
    published: Mapping[str, Sequence[Spread | None]] | None = None,
) -> None:
    """One bar per series at every place, in %, with the deviation over seeds.

    What was published is a line across the bar. A place without a value stays empty.
    """
    width = _TOGETHER / len(series)
    for index, (name, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        there = [(place + offset, one) for place, one in enumerate(values) if one is not None]
        axes.bar(
            [x for x, _ in there],
            [100 * one.mean for _, one in there],
            width,
            color=colours[index % len(colours)],
            label=name,
        )
        with_std = [(x, one) for x, one in there if one.std is not None]
        axes.errorbar(
            [x for x, _ in with_std],
            [100 * one.mean for _, one in with_std],
            yerr=[100 * (one.std or 0.0) for _, one in with_std],
            fmt="none",
            ecolor="black",
            elinewidth=0.8,
            capsize=2,
        )
        known = (published or {}).get(name, ())
        marks = [(place + offset, one) for place, one in enumerate(known) if one is not None]
        axes.hlines(
            [100 * one.mean for _, one in marks],
            np.array([x for x, _ in marks]) - width / 2,
            np.array([x for x, _ in marks]) + width / 2,
            colors="black",
            linewidth=1.6,
            label="published" if marks and index == 0 else "_",
        )
