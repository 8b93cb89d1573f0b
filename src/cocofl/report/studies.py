"""The paper's figures of accuracy: groups of devices, variants over limits, ways to select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cocofl.experiment import Spread
from cocofl.fl.metrics import MetricFacts
from cocofl.profiling import ProfileTable
from cocofl.report.drawing import bare, grouped_bars, new_figure, plain
from cocofl.report.palette import GROUPS, KIND_COLOURS
from cocofl.report.profiles import draw_blocks

Series = Mapping[str, Sequence[Spread | None]]


def groups_figure(
    strategies: Sequence[str],
    ours: Series,
    published: Series,
    metric: MetricFacts,
    title: str = "",
) -> Figure:
    """What each group has under each strategy; lines are what the paper says."""
    figure = new_figure(max(4.5, 1.0 + 1.2 * len(strategies)), 3.6)
    axes = figure.add_subplot()
    grouped_bars(axes, ours, GROUPS, published, metric.scale)
    unit = " / %" if metric.is_share else ""
    _bars_axes(axes, strategies, plain(f"{metric.name} of the group{unit}"))
    if metric.is_share:
        axes.set_ylim(0, 104)
    figure.legend(loc="outside lower center", ncols=len(ours) + 1, frameon=False, fontsize=8)
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
            there = [(x, one) for x, one in zip(limits, values, strict=True) if one is not None]
            _points(own, there, KIND_COLOURS[variant], label=variant)
        own.set_xlim(0, 1.03)
        own.set_xlabel("limit l on time and memory / full")
        own.set_title(title, loc="left", fontsize=9)
        bare(own)
        own.sharey(first)
    first.set_ylabel("accuracy / %")
    if tables:
        draw_blocks(axes[-1], tables)
        axes[-1].set_title("what fits", loc="left", fontsize=9)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def selectors_figure(limits: Sequence[float], series: Series) -> Figure:
    """The accuracy of each way to select a span, at each limit."""
    figure = new_figure(2.0 + 1.8 * len(limits), 3.6)
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(series.items()):
        shift = 0.1 * (index - (len(series) - 1) / 2)
        there = [(place + shift, one) for place, one in enumerate(values) if one is not None]
        _points(axes, there, GROUPS[index % len(GROUPS)], label=name, linestyle="none")
    _bars_axes(axes, [f"{limit:g}" for limit in limits], "accuracy / %")
    axes.set_xlabel("limit l on time and memory / full")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _points(
    axes: Axes, there: Sequence[tuple[float, Spread]], colour: str, label: str, linestyle: str = "-"
) -> None:
    """Means in %, with the deviation over seeds."""
    axes.errorbar(
        [x for x, _ in there],
        [100 * one.mean for _, one in there],
        yerr=[100 * (one.std or 0.0) for _, one in there],
        marker="o",
        markersize=4,
        linewidth=1.4,
        linestyle=linestyle,
        elinewidth=0.8,
        capsize=2,
        color=colour,
        label=label,
    )


def _bars_axes(axes: Axes, names: Sequence[str], quantity: str) -> None:
    axes.set_xticks(range(len(names)), list(names), fontsize=8)
    axes.set_ylabel(quantity)
    bare(axes)
