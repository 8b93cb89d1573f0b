"""The page's interactive charts, made with plotly.

A trace that belongs to a line says so in its ``meta``: the page shows and hides lines by that.
Names come from people's files, so they are escaped wherever plotly would read them as markup.
Fonts, grid and background belong to the page, which knows whether it is light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from cocofl.fl.metrics import MetricFacts
from cocofl.profiling import ProfileTable
from cocofl.report.findings import AXES, Curve, Trained, summary, thin
from cocofl.report.nodes import NodeHistory
from cocofl.report.palette import KIND_COLOURS, group_colour
from cocofl.report.runs import Line, Scene
from cocofl.report.sources import Holdings, printable

POINTS = 600
"""How many points of a curve are drawn at most; see :func:`~cocofl.report.findings.thin`."""
BUBBLES = 2400
"""How many bubbles are drawn at most."""
NODES = 24
"""How many nodes of a deployment are drawn at most."""
_LEAST_RATIO = 1e-3  # a logarithm has no zero

KIND_SYMBOLS = {"qff": "circle", "ff": "square", "f": "triangle-up", "width": "x"}


_HOVER = {
    "rounds": "round %{x}",
    "simulated_s": "%{x:.4g} s",
    "uploaded_mb": "%{x:.4g} MB",
    "energy_j": "%{x:.4g} J",
}


def curve_chart(
    lines: Sequence[Line],
    curves: Sequence[Curve],
    colours: Mapping[str, str],
    axis: str,
    group: str | None = None,
) -> go.Figure:
    """The metric of every line over rounds, simulated time, uploads or energy; or a group's.

    The band reaches from the worst to the best seed. Training with all data in one place has no
    rounds, devices or uploads: it is a level.
    """
    metric, figure = lines[0].metric, go.Figure()
    unit = " %" if metric.is_share else ""
    pairs = list(zip(lines, curves, strict=True))
    # Before anything is trained, everybody is at the same place; a curve begins at its first test.
    ends = [getattr(c, axis)[-1] for line, c in pairs if not line.facts.all_data_in_one_place]
    for line, one in pairs:
        colour, name = colours[line.label], escape(line.label)
        is_level = line.facts.all_data_in_one_place
        y = _rounded(metric.scale * one.of(group))
        if is_level:
            x, y = [0, max(ends, default=1)], [y[-1]] * 2
        else:
            x = _rounded(getattr(one, axis))
        if not is_level and group is None and len(line.runs) > 1:
            figure.add_trace(_band(x, one, line, colour))
        figure.add_scatter(
            x=x,
            y=y,
            name=name,
            mode="lines+markers" if one.is_short and not is_level else "lines",
            line={"color": colour, "width": 2, "dash": "dash" if line.is_bound else "solid"},
            marker={"size": 5},
            hovertemplate=f"<b>{name}</b> %{{y:.4g}}{unit}<br>{_HOVER[axis]}<extra></extra>",
            meta={"line": line.label},
        )
    figure.update_xaxes(title=AXES[axis], rangemode="tozero")
    if group is None:
        figure.update_yaxes(title=escape(metric.heading), rangemode="tozero")
    else:
        title = f"{metric.name} of {group}{metric.unit}"
        figure.update_yaxes(title=escape(title), **_whole_scale(metric, 100))
    return figure


def fairness_chart(scene: Scene) -> go.Figure:
    """What each group finally has under each line: the paper's fairness figure."""
    figure, metric = go.Figure(), scene.metric
    rows = [summary(line) for line in scene.lines]
    for index, group in enumerate(scene.groups):
        said = escape(group)
        for row in rows:
            found, name = row.groups[group], escape(row.label)
            figure.add_bar(
                x=[name],
                y=_rounded(np.array([metric.scale * found.mean])),
                error_y={
                    "type": "data",
                    "array": [metric.scale * (found.std or 0.0)],
                    "visible": found.std is not None,
                    "thickness": 1,
                    "width": 3,
                },
                name=said,
                legendgroup=said,
                showlegend=row is rows[0],
                offsetgroup=str(index),
                marker={"color": group_colour(index)},
                hovertemplate=f"<b>{name}</b><br>{said}: {found.text(metric)}<extra></extra>",
                meta={"line": row.label},
            )
    figure.update_layout(barmode="group", showlegend=True)
    figure.update_yaxes(title=escape(metric.heading), **_whole_scale(metric, 104))
    return figure


def _whole_scale(metric: MetricFacts, top: float) -> dict[str, Any]:
    """A share is shown on the whole scale, so that charts side by side compare."""
    return {"range": [0, top]} if metric.is_share else {"rangemode": "tozero"}


def trained_chart(found: Trained, most: float) -> go.Figure:
    """How often each group trained each block (or width); the scale ends at ``most``."""
    updates = "%{z:.2f} updates per round<br>%{text}<extra></extra>"
    figure = go.Figure()
    figure.add_heatmap(
        z=_rounded(found.updates),
        x=[escape(column) for column in found.columns],
        y=[escape(name) for name in found.groups],
        text=[[f"{one:.0%} of the group's updates" for one in shares] for shares in found.shares],
        zmin=0,
        zmax=most,
        xgap=1,
        ygap=1,
        colorbar={"thickness": 10, "title": {"text": "per round", "side": "right"}},
        hovertemplate=f"<b>%{{y}}</b>, {found.what} %{{x}}<br>{updates}",
    )
    figure.update_xaxes(title=found.what, type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return figure


def bubbles_chart(held: Holdings) -> tuple[go.Figure, str]:
    """Device × class, area = samples, colour = group; and a note where devices are left out."""
    shown = held.shown(max(1, BUBBLES // max(1, len(held.class_names))))
    largest = max(int(held.counts.max(initial=1)), 1)
    names = [escape(printable(name)) for name in held.class_names]
    of_class = "class %{y}: %{customdata[1]} samples<extra></extra>"
    figure = go.Figure()
    for index, group in enumerate(held.group_names):
        places = np.flatnonzero(held.group_of[shown] == index)
        device, label = np.nonzero(held.counts[shown[places]])
        samples = held.counts[shown[places]][device, label]
        figure.add_scatter(
            x=places[device].tolist(),
            y=[names[i] for i in label],
            customdata=np.stack([shown[places][device], samples], axis=1).tolist(),
            mode="markers",
            name=escape(group),
            marker={
                "color": group_colour(index),
                "size": samples.tolist(),
                "sizemode": "area",
                "sizeref": 2 * largest / 16**2,
                "line": {"width": 0},
                "opacity": 0.85,
            },
            hovertemplate=f"device %{{customdata[0]}} ({escape(group)})<br>{of_class}",
        )
    figure.update_xaxes(title="device, by group", showticklabels=False, zeroline=False)
    order = {"categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.4, -0.6]}
    figure.update_yaxes(title="class", type="category", **order)
    figure.update_layout(showlegend=True)
    count = len(held.group_of)
    note = "" if len(shown) == count else f"{len(shown)} of {count} devices are shown. "
    return figure, note


def profile_chart(tables: Sequence[ProfileTable], what: str) -> go.Figure:
    """Every configuration's time or memory over its upload, as fractions of full training."""
    costs = f"upload %{{x:.2f}}, {what} %{{y:.2f}} of full"
    figure = go.Figure()
    for table in tables:
        kind = table.kind
        name = "widths" if kind == "width" else f"spans, {escape(table.variant)}"
        figure.add_scatter(
            x=_rounded(table.upload),
            y=_rounded(getattr(table, what)),
            text=[str(item) for item in table.configurations],
            name=name,
            mode="markers",
            marker={
                "color": KIND_COLOURS.get(kind, "#6B7280"),
                "symbol": KIND_SYMBOLS.get(kind, "circle"),
                "size": 7,
                "opacity": 0.75,
            },
            hovertemplate=f"<b>{name} %{{text}}</b><br>{costs}<extra></extra>",
        )
    figure.update_xaxes(title="upload / full", range=[-0.03, 1.05])
    figure.update_yaxes(title=f"{what} / full", rangemode="tozero")
    figure.update_layout(showlegend=True)
    return figure


def nodes_chart(histories: Sequence[NodeHistory]) -> tuple[go.Figure, str]:
    """How far each node's updates are from the usual, over rounds; a note where some are left out.

    Who ever stood out has a colour; crosses mark the updates that did.
    """
    measured = [one for one in histories if one.figures]
    figure, crosses = go.Figure(), list[tuple[int, float, str]]()
    for index, one in enumerate(measured[:NODES]):
        rounds = np.array(list(one.figures), dtype=np.int64)
        values = np.array([max(f.against_median, _LEAST_RATIO) for f in one.figures.values()])
        kept = thin([values], POINTS) if len(rounds) > POINTS else np.arange(len(rounds))
        stands_out, name = bool(one.outlier_rounds), str(one.node)
        colour = group_colour(index) if stands_out else "#6B7280"
        figure.add_scatter(
            x=rounds[kept].tolist(),
            y=_rounded(values[kept]),
            name=name,
            mode="lines+markers" if len(kept) < 100 else "lines",
            line={"color": colour, "width": 2 if stands_out else 1},
            marker={"size": 4},
            opacity=1.0 if stands_out else 0.5,
            hovertemplate=f"<b>node {name}</b><br>{_HOVER['rounds']}: %{{y:.3g}} ×<extra></extra>",
        )
        marked = one.outlier_rounds[-POINTS:]
        crosses += [
            (number, max(one.figures[number].against_median, _LEAST_RATIO), name)
            for number in marked
        ]
    figure.add_scatter(
        x=[number for number, _, _ in crosses],
        y=[value for _, value, _ in crosses],
        text=[name for _, _, name in crosses],
        mode="markers",
        name="outlier",
        marker={"symbol": "x", "size": 10, "color": "#D55E00"},
        hovertemplate="<b>node %{text}</b> stood out<br>round %{x}: %{y:.3g} ×<extra></extra>",
    )
    figure.update_xaxes(title="round", rangemode="tozero")
    ticks = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
    figure.update_yaxes(title="norm of the change / median", type="log", tickvals=ticks)
    left = len(measured) - NODES
    return figure, f"{left} nodes that stand out less are not drawn. " if left > 0 else ""


def _band(x: list[Any], one: Curve, line: Line, colour: str) -> go.Scatter:
    scale = line.metric.scale
    return go.Scatter(
        x=x + x[::-1],
        y=_rounded(scale * one.low) + _rounded(scale * one.high)[::-1],
        fill="toself",
        fillcolor=colour,
        opacity=0.18,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        meta={"line": line.label},
    )


def _rounded(values: NDArray[Any]) -> list[Any]:
    """Six digits are more than can be seen, and half the bytes."""
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [value if isinstance(value, int) else float(f"{value:.6g}") for value in values.tolist()]
