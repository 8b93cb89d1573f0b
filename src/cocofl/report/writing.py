"""``report.html``: everything about one run or many, in one file that requests nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from cocofl.errors import CocoflError
from cocofl.experiment import Run
from cocofl.files import write_text
from cocofl.profiling import ProfileTable
from cocofl.report import charts
from cocofl.report.findings import (
    WORST,
    ahead,
    curve,
    known_axes,
    most_updates,
    summary,
    trained,
)
from cocofl.report.nodes import node_histories, node_table, reason_table
from cocofl.report.pages import as_json, template
from cocofl.report.palette import ON_DARK, line_colours
from cocofl.report.ranking import overall_table, ranking_table
from cocofl.report.runs import Line, Scene, arrange
from cocofl.report.sources import Sources
from cocofl.report.tables import highlights, summary_table

Card = dict[str, Any]
"""A chart in its frame; ``of`` names the line that it belongs to, if it is one line's."""


class Drawings:
    """The charts of a page, by the id of their place."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def add(self, figure: Any, title: str, height_px: int, caption: str = "", **more: Any) -> Card:
        """Keep a chart; the card that shows it."""
        name = f"chart-{len(self.figures)}"
        content = json.loads(figure.to_json())
        # The page has a style of its own; plotly's would be in every chart once more.
        content["layout"].pop("template", None)
        self.figures[name] = content
        card = {"chart": name, "title": title, "height_px": height_px, "caption": caption}
        return {**card, "of": "", "wide": False, **more}


def write_report(runs: Sequence[Run], path: Path) -> Path:
    """Write the page about runs into a file."""
    write_text(path, report_page(runs))
    return path


def report_page(runs: Sequence[Run]) -> str:
    """The page as text."""
    scenes = arrange(runs)
    lines = [line for scene in scenes for line in scene.lines]
    colours = line_colours(lines)
    bounds = {line.label for line in lines if line.is_bound}
    drawings = Drawings()
    sources = [Sources(scene) for scene in scenes]
    stages = [
        _stage(scene, one, colours, drawings) for scene, one in zip(scenes, sources, strict=True)
    ]
    profiles, missing_profiles = _profile_cards(sources, drawings)
    reported = [run for line in lines for run in line.runs]
    skipped = [str(run.path) for run in runs if run not in reported]
    page = {
        "title": " and ".join(dict.fromkeys(run.experiment.name for run in reported)),
        "subtitle": _subtitle(reported),
        "stages": stages,
        "ranking": overall_table(scenes),
        "chips": [
            {"label": label, "colour": colour, "bound": label in bounds}
            for label, colour in colours.items()
        ],
        "several_seeds": any(len(line.runs) > 1 for line in lines),
        "unfinished": [str(run.path) for run in reported if not run.folder.is_complete],
        "skipped": skipped,
        "profiles": profiles,
        "missing_profiles": missing_profiles,
        "settings": _settings(reported),
        "tomls": [(str(one.runs[0].path), one.runs[0].folder.experiment) for one in lines],
        "tables": _tables(lines),
        "made_with": _made_with(reported),
        "commands": _commands(reported),
        "charts": as_json(drawings.figures),
        "on_dark": as_json(ON_DARK),
        "library": Markup(get_plotlyjs().replace("</script", "<\\/script")),
    }
    return template("report.html").render(page)


_OVER = {
    "rounds": "rounds",
    "simulated_s": "simulated time",
    "uploaded_mb": "uploaded bytes",
    "energy_j": "energy",
}


def _stage(
    scene: Scene, sources: Sources, colours: Mapping[str, str], drawings: Drawings
) -> dict[str, Any]:
    """What the page shows of a scene."""
    lines, groups, metric = scene.lines, scene.groups, scene.metric
    found = [curve(line, charts.POINTS) for line in lines]
    band = "The band reaches from the worst to the best seed."
    several = any(len(line.runs) > 1 for line in lines)
    name = metric.name[:1].upper() + metric.name[1:]
    ranking, curves = ranking_table(scene), []
    for axis in known_axes(lines, found):
        chart = charts.curve_chart(lines, found, colours, axis)
        caption = band if several and axis == "rounds" else ""
        curves.append(drawings.add(chart, f"{name} over {_OVER[axis]}", 330, caption))
        if groups and ranking and axis != "rounds":
            chart = charts.curve_chart(lines, found, colours, axis, WORST)
            title = f"{name} of the worst-off group over {_OVER[axis]}"
            curves.append(drawings.add(chart, title, 330))
    fairness = []
    for group in groups:
        chart = charts.curve_chart(lines, found, colours, "rounds", group)
        fairness.append(drawings.add(chart, f"{name} of {group} devices", 280))
    if groups:
        title = f"Final {metric.name} of each group"
        caption = "Classes weighted as often as the group's devices have them."
        bars = drawings.add(charts.fairness_chart(scene), title, 330, caption, wide=True)
        fairness.insert(0, bars)
    data, missing_data = _data_cards(sources, drawings)
    table = summary_table(scene)
    return {
        "title": scene.title,
        "metric": name,
        "rows": list(zip(lines, table.lines, strict=True)),
        "header": table.header,
        "tiles": highlights(scene) if len(lines) == 1 else {},
        "headline": _headline(scene),
        "ranking": ranking,
        "curves": curves,
        "fairness": fairness,
        "trained": _trained_cards(lines, groups, drawings),
        "data": data,
        "missing_data": missing_data,
        "nodes": [_nodes(run, drawings) for line in lines for run in line.runs if run.is_deployed],
    }


def _nodes(run: Run, drawings: Drawings) -> dict[str, Any]:
    """Who the nodes of a deployment are, and what an operator should know of them."""
    histories = node_histories(run)
    chart, note = charts.nodes_chart(histories)
    caption = f"{note}Crosses mark outliers; who was never one is grey."
    title = "How far updates are from the usual"
    return {
        "title": str(run.path),
        "table": node_table(histories),
        "reasons": reason_table(histories),
        "suspects": [one for one in histories if one.outlier_rounds or one.quarantined],
        "cards": [drawings.add(chart, title, 360, caption, wide=True)],
    }


def _trained_cards(lines: Sequence[Line], groups: Sequence[str], drawings: Drawings) -> list[Card]:
    """Heat maps with one scale, so that a colour means the same in all."""
    found = {line.label: trained(line, groups) for line in lines}
    most = most_updates(found.values())
    return [
        drawings.add(charts.trained_chart(one, most), label, 110 + 34 * len(one.groups), of=label)
        for label, one in found.items()
    ]


def _data_cards(sources: Sources, drawings: Drawings) -> tuple[list[Card], str]:
    """Who holds what, or why that is not shown."""
    if sources.are_on_devices:
        return [], "the devices of a deployment have their data, and tell nobody about it"
    try:
        held = sources.holdings()
    except (CocoflError, OSError) as error:
        return [], str(error)
    figure, note = charts.bubbles_chart(held)
    caption = f"{note}Area = samples; the split of seed {held.seed}."
    height_px = 120 + max(160, min(1400, 22 * len(held.class_names)))
    return [drawings.add(figure, "Who holds what", height_px, caption)], ""


def _profile_cards(sources: Sequence[Sources], drawings: Drawings) -> tuple[list[Card], list[str]]:
    """What the tables say, each once, and why some are not shown."""
    shown: dict[str, Sequence[ProfileTable]] = {}
    missing: dict[str, None] = {}
    for one in sources:
        try:
            tables = one.tables()
            shown["; ".join(table.describe() for table in tables)] = tables
        except (CocoflError, OSError) as error:
            missing[str(error)] = None
    cards = []
    for (first, *others), what in product(filter(None, shown.values()), ("time", "memory")):
        chart, title = charts.profile_chart([first, *others], what), f"{what} and upload"
        caption = f"Memory: {first.describe_memory()}." if what == "memory" else ""
        cards.append(drawings.add(chart, f"{first.model}: {title}", 330, caption))
    return cards, list(missing)


def _headline(scene: Scene) -> str:
    found, metric = ahead(scene), scene.metric
    if found is None:
        return ""
    ours, margins = found
    label, lead = min(margins.items(), key=lambda pair: pair[1])
    reached = summary(ours).scores[metric.name].text(metric)
    points = f"{abs(lead):.1f} points" if metric.is_share else f"{abs(lead):.4g}"
    where = "ahead of" if lead >= 0 else "behind"
    return (
        f"{ours.label} reaches {reached}{' %' if metric.is_share else f' {metric.name}'}, {points} "
        f"{where} the best other method that obeys the same budgets ({label})."
    )


def _subtitle(runs: Sequence[Run]) -> str:
    settings = [run.experiment.by_key() for run in runs]

    def each(key: str) -> str:
        return ", ".join(dict.fromkeys(str(one[key]) for one in settings))

    seeds = len({run.experiment.seed for run in runs})
    devices = (
        f"split {each('data.split')}; {each('devices.per_round')} of {each('devices.count')} "
        "devices a round"
    )
    if all(run.is_deployed for run in runs):
        nodes = {one.device for run in runs for record in run.rounds for one in record.devices}
        devices = f"a deployment of {len(nodes)} nodes"
    count = f"{seeds} {'seed' if seeds == 1 else 'seeds'}"
    titles = dict.fromkeys(run.experiment.data.title for run in runs)
    models = dict.fromkeys(run.experiment.model.title for run in runs)
    what = f"{', '.join(models)} on {', '.join(titles)}"
    # A server that does not wait merges more often, and has as many rounds.
    lengths = sorted({run.experiment.rounds for run in runs})
    rounds = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{what}, {devices}, {rounds} rounds, {count}"


def _settings(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Each setting with the values it takes among the runs."""
    flat = [run.experiment.by_key() for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [
        (key, ", ".join(dict.fromkeys(_plain(one[key]) for one in flat if key in one)))
        for key in keys
        if key != "name"
    ]


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if value != "" else "–"


def _tables(lines: Sequence[Line]) -> list[tuple[str, list[str]]]:
    """Which profile table served which line."""
    served: dict[str, dict[str, None]] = {}
    for line in lines:
        for run in line.runs:
            found = run.folder.about.get("tables")
            names = map(str, found.values()) if isinstance(found, dict) else ()
            served.setdefault(line.label, {}).update(dict.fromkeys(names))
    return [(label, list(names) or ["none was asked"]) for label, names in served.items()]


def _made_with(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return [
        (key, "; ".join(filter(None, dict.fromkeys(run.folder.origin(key) for run in runs))))
        for key in ("cocofl", "torch", "python", "hardware")
    ]


def _commands(runs: Sequence[Run]) -> list[str]:
    """As it was run, where that was a command; else the file that says everything."""
    typed = dict.fromkeys(str(run.folder.about.get("command", "")) for run in runs)
    commands = [one for one in typed if one.startswith(("cocofl run", "cocofl compare"))]
    if commands:
        return commands
    return [
        shlex.join(["cocofl", "run", str(run.path / "experiment.toml"), "--out", "runs/again"])
        for run in runs
    ]
