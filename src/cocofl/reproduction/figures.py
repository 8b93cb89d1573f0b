"""The figures of studies, drawn from results; each returns the files that were written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cocofl.experiment import Spread
from cocofl.fl.metrics import STATISTICS, recorded_metric
from cocofl.freeze import VARIANTS
from cocofl.profiling import ProfileTable
from cocofl.report import drawing
from cocofl.report.drawing import save
from cocofl.reproduction.collection import Collection
from cocofl.reproduction.plans import OVER_LIMITS, limited_label, strategy_of
from cocofl.reproduction.results import Result, spread
from cocofl.reproduction.tables import groups_of, in_one_place, labels_of, longest, tables_of


def fairness(collection: Collection, results: Sequence[Result], row: str, path: Path) -> list[Path]:
    """The accuracy of each group of devices under each strategy."""
    own = longest(one for one in results if one.row == row and not in_one_place(one))
    labels, groups = labels_of(own), groups_of(own)
    if not groups:
        return []
    ours = {g: [spread(own, row, one, STATISTICS[0], g) for one in labels] for g in groups}
    known = {
        g: [collection.published.get((row, strategy_of(one), g)) for one in labels] for g in groups
    }
    return save(drawing.groups_figure(labels, ours, known, recorded_metric("accuracy"), row), path)


def ablation(
    collection: Collection,
    results: Sequence[Result],
    limits: Sequence[float],
    path: Path,
) -> list[Path]:
    """Variants over the limit: without gains, with gains, and the blocks that fit."""
    over = partial(_over, collection.ablation, results, limits)
    panels = {
        "without gains": {v: over(variant=v, costs="f") for v in VARIANTS},
        "with gains": {v: over(variant=v) for v in VARIANTS},
    }
    tables = tables_of(collection.experiment(collection.ablation).model.name)
    spans = {one.variant: one for one in tables if one.method == "span"}
    return save(drawing.limits_figure(limits, panels, spans), path)


def selectors(
    collection: Collection, results: Sequence[Result], limits: Sequence[float], path: Path
) -> list[Path]:
    """Ways to select a span, over the limit."""
    over = partial(_over, collection.ablation, results, limits)
    series = {name: over(**options) for name, options in OVER_LIMITS["selectors"].options.items()}
    return save(drawing.selectors_figure(limits, series), path)


def profiling(tables: Sequence[ProfileTable], path: Path) -> list[Path]:
    """Int8 spans against widths, one figure per machine; and the blocks that a limit leaves."""
    widths = [one for one in tables if one.method == "width"]
    spans = [one for one in tables if one.method == "span"]
    written: list[Path] = []
    for one in (one for one in spans if one.variant == "qff"):
        figure = drawing.profiling_figure(
            [one, *widths], f"{one.model}: what each configuration costs"
        )
        mark = "-published" if one.source == "published" else ""
        written += save(figure, path.with_name(path.name + mark))
    ours = [one for one in spans if one.source != "published"]
    if ours:
        blocks = drawing.blocks_figure(ours, f"{ours[0].model}: what a limit leaves to train")
        written += save(blocks, path.with_name(f"{path.name}-blocks"))
    return written


def _over(
    row: str, results: Sequence[Result], limits: Sequence[float], **options: str
) -> list[Spread | None]:
    own = longest(one for one in results if one.row == row)
    return [
        spread(own, row, limited_label(limit, **options), STATISTICS[0], "accuracy")
        for limit in limits
    ]
