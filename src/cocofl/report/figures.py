"""The same figures for a paper: PNG and SVG, made with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cocofl.errors import CocoflError
from cocofl.experiment import Run
from cocofl.report.drawing import (
    bare,
    bubble_chart,
    groups_figure,
    legend_below,
    new_figure,
    plain,
    profiling_figure,
    save,
)
from cocofl.report.findings import curve, known_axes, most_updates, summary, trained
from cocofl.report.palette import line_colours
from cocofl.report.runs import Scene, arrange
from cocofl.report.sources import Sources


def save_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw every figure of every scene into a folder; the files that were written."""
    scenes = arrange(runs)
    colours = line_colours([line for scene in scenes for line in scene.lines])
    written: list[Path] = []
    for index, scene in enumerate(scenes):
        mark = f"-{_slug(scene.title)}" if len(scenes) > 1 else ""
        if len({_slug(other.title) for other in scenes}) < len(scenes):
            mark = f"-{index}"
        for name, figure in scene_figures(scene, colours).items():
            written += save(figure, folder / f"{name}{mark}")
    return written


def scene_figures(scene: Scene, colours: Mapping[str, str]) -> dict[str, Figure]:
    """The figures of a scene by name; without those whose data or tables are not here."""
    figures = {
        _slug(scene.metric.name): curve_figure(scene, colours),
        "blocks": trained_figure(scene),
    }
    if scene.groups:
        rows = {plain(line.label): summary(line) for line in scene.lines}
        shown = {plain(g): [row.groups[g] for row in rows.values()] for g in scene.groups}
        figures["fairness"] = groups_figure(list(rows), shown, {}, scene.metric)
    sources = Sources(scene)
    try:
        held = sources.holdings()
        figures["data"] = bubble_chart(held, plain(scene.title))
        tables = sources.tables()
        figures["profile"] = profiling_figure(tables, f"{tables[0].model}: what spans cost")
    except (CocoflError, OSError):
        pass  # the report says why
    return figures


def curve_figure(scene: Scene, colours: Mapping[str, str]) -> Figure:
    """The metric over rounds, simulated time, uploads and energy; bands are worst to best seed."""
    curves = {line.label: curve(line) for line in scene.lines}
    known = known_axes(scene.lines, list(curves.values()))
    figure, scale = new_figure(3.67 * len(known), 3.6), scene.metric.scale
    panels = figure.subplots(1, len(known), sharey=True)
    for axes, (axis, title) in zip(panels, known.items(), strict=True):
        for line in scene.lines:
            one, colour = curves[line.label], colours[line.label]
            style = "--" if line.is_bound else "-"
            if line.facts.all_data_in_one_place:
                level = scale * float(one.mean[-1])
                axes.axhline(level, color=colour, ls=style, label=plain(line.label))
                continue
            x, mean = getattr(one, axis), scale * one.mean
            marks = {"marker": "o" if one.is_short else "", "ms": 3}
            axes.plot(x, mean, color=colour, ls=style, lw=1.4, label=plain(line.label), **marks)
            if len(line.runs) > 1:
                band = {"color": colour, "alpha": 0.18, "linewidth": 0}
                axes.fill_between(x, scale * one.low, scale * one.high, **band)
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        bare(axes)
    panels[0].set_ylabel(plain(scene.metric.heading))
    if scene.metric.is_share:
        panels[0].set_ylim(bottom=0)
    legend_below(figure, panels[0], 6)
    return figure


def trained_figure(scene: Scene) -> Figure:
    """How often each group trained each block (or width) under each strategy."""
    found = [(line.label, trained(line, scene.groups)) for line in scene.lines]
    ratios = [0.75 + 0.22 * len(one.groups) for _, one in found]
    figure = new_figure(6.4, sum(ratios))
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=ratios)[:, 0]
    most = most_updates(one for _, one in found)
    for axes, (label, one) in zip(panels, found, strict=True):
        image = axes.imshow(one.updates, aspect="auto", cmap="Blues", vmin=0, vmax=most)
        axes.set_yticks(range(len(one.groups)), [plain(name) for name in one.groups], fontsize=7)
        axes.set_xticks(range(len(one.columns)), one.columns, fontsize=7)
        axes.set_title(f"{plain(label)}: updates per round, by {one.what}", loc="left", fontsize=8)
        figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=6)
    return figure


def _slug(title: str) -> str:
    """A part of a file's name.

    >>> _slug("split rc, alpha 0.1")
    'split-rc-alpha-0.1'
    """
    kept = "".join(sign if sign.isalnum() or sign in "._" else "-" for sign in title)
    return "-".join(part for part in kept.split("-") if part)
