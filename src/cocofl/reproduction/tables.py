"""Results and costs beside what was published, as tables: for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from cocofl.experiment import Spread
from cocofl.fl.metrics import STATISTICS, MetricFacts
from cocofl.fl.strategies import StrategyFacts, facts_of, recorded_facts
from cocofl.fl.strategies.facts import BASELINE, PROPOSED
from cocofl.profiling import ProfileTable, shipped
from cocofl.report.tables import NOTHING, TextTable
from cocofl.reproduction.collection import Collection, on_one_place
from cocofl.reproduction.plans import OVER_LIMITS, STRATEGY_ORDER, limited_label, strategy_of
from cocofl.reproduction.results import LATE, Result, spread, without_folder

SAID = (
    "the paper, MobileNet on x64: time reduced by up to 90 %, memory by up to 89 %; against "
    "freezing alone, qff saves up to 75 % of the time and 60 % of the memory, ff 45 % and 28 %"
)
_SHARE = MetricFacts("", is_share=True)
"""What the paper reports, accuracy and F1, are shares; so are those of groups."""


def of_row(collection: Collection, results: Sequence[Result], row: str) -> TextTable | None:
    """A column of the paper's Table 2: its numbers, ours, and the difference; None without ours."""
    # What was trained with all data in one place stands for every split.
    own = longest(
        one if one.row == row else replace(one, row=row, groups={})
        for one in results
        if one.row == row or (one.row == on_one_place(row) and in_one_place(one))
    )
    if not own:
        return None
    metric, kinds, labels = collection.metric(row), _kinds(own), labels_of(own)
    published = [collection.published.get((row, strategy_of(one), metric)) for one in labels]
    columns = {"": labels}
    if collection.published:
        columns["paper"] = [*map(_percent, published)]
    for kind in kinds:
        found = [spread(own, row, label, kind, metric) for label in labels]
        columns[kind if kind == LATE else f"{kind} statistics"] = [*map(_percent, found)]
    if collection.published:
        found = [spread(own, row, label, kinds[0], metric) for label in labels]
        columns["difference"] = [*map(_points, found, published)]
    for group in groups_of(own):
        of_group = (spread(own, row, label, kinds[0], group) for label in labels)
        columns[group] = [*map(_percent, of_group)]
    seeds = {label: {one.seed for one in own if one.strategy == label} for label in labels}
    columns["seeds"] = [str(len(seeds[label])) for label in labels]
    title = f"{row}: {'macro F1' if metric == 'f1' else metric} in %, {own[0].rounds} rounds"
    notes = (*_ahead(collection, own, row, metric), *origins(own))
    return TextTable.of(title, columns, notes)


def fairness(collection: Collection, results: Sequence[Result], row: str) -> TextTable | None:
    """The accuracy of each group of devices, beside what the paper's text says."""
    own = longest(one for one in results if one.row == row and not in_one_place(one))
    groups = groups_of(own)
    if not groups:
        return None
    lines = []
    for label in labels_of(own):
        known = [collection.published.get((row, strategy_of(label), group)) for group in groups]
        found = {
            kind: [spread(own, row, label, kind, group) for group in groups] for kind in _kinds(own)
        }
        for source, values in {"paper": known, **found}.items():
            if any(values):
                gap = _points(values[0], values[-1])
                lines.append((label, source, *map(_percent, values), gap))
    header = ("", "statistics", *groups, f"{groups[0]} – {groups[-1]}")
    title = f"{row}: accuracy of each group in %, {own[0].rounds} rounds"
    return TextTable(title, header, tuple(lines), tuple(origins(own)))


def over_limits(
    collection: Collection, results: Sequence[Result], study: str, limits: Sequence[float]
) -> TextTable | None:
    """Variants, or ways to select a span, over the limit."""
    row, (what, _, options) = collection.ablation, OVER_LIMITS[study]
    labels = {x: [limited_label(x, **one) for one in options.values()] for x in limits}
    used = longest(one for one in results if any(one.strategy in line for line in labels.values()))
    if not used:
        return None
    lines = []
    for kind, (limit, names) in product(STATISTICS, labels.items()):
        found = [spread(used, row, name, kind, "accuracy") for name in names]
        if any(found):
            shown = f"{limit:g}" + ("" if kind == STATISTICS[0] else f" ({kind} statistics)")
            lines.append((shown, *map(_percent, found)))
    seeds = sorted({one.seed for one in used})
    length = f"{used[0].rounds} rounds, seeds {', '.join(map(str, seeds))}"
    title = f"{row}, {what} over the limit: accuracy in %, {length}"
    return TextTable(title, ("limit", *options), tuple(lines), tuple(origins(used)))


def ordering(collection: Collection, results: Sequence[Result], row: str) -> str:
    """Who is ahead of whom among all that obey budgets, best first."""
    metric, statistics = collection.metric(row), STATISTICS[0]
    obeying = [name for name in STRATEGY_ORDER if not facts_of(name).is_bound]
    found = {label: spread(results, row, label, statistics, metric) for label in obeying}
    means = {label: one.mean for label, one in found.items() if one is not None}
    best_first = sorted(means, key=lambda label: -means[label])
    return f"{row}: " + " > ".join(f"{label} {100 * means[label]:.1f}" for label in best_first)


def origins(results: Sequence[Result]) -> list[str]:
    """Where numbers come from, each said once: machines, versions, tables, other settings."""
    said: dict[str, dict[str, None]] = {}
    for one in results:
        version = f"cocofl {one.cocofl} {one.commit or '(commit unknown)'}, torch {one.torch}"
        notes = [
            f"made with {version}, Python {one.python}, engine {one.engine} on {one.hardware}",
            f"table {one.table}" if one.table else "",
            f"settings other than the file's: {one.changes}" if one.changes else "",
        ]
        for note in filter(None, notes):
            said.setdefault(note, {})[one.strategy] = None
    everyone = {one.strategy for one in results}
    return [
        f"{note} ({'all' if set(who) == everyone else ', '.join(who)})"
        for note, who in said.items()
    ]


def labels_of(results: Iterable[Result]) -> list[str]:
    """In the order of the paper, one's own strategies last."""

    labels = {one.strategy for one in results}
    return sorted(labels, key=lambda label: (_facts(label).order, label))


def in_one_place(result: Result) -> bool:
    """Whether all data was in one place."""
    return _facts(result.strategy).all_data_in_one_place


def _facts(label: str) -> StrategyFacts:
    return recorded_facts(strategy_of(label))


def _ahead(collection: Collection, results: Sequence[Result], row: str, metric: str) -> list[str]:
    """How far what is proposed is ahead of others with the same budgets, here and in the paper.

    Compared are runs with the same seed and the same changes of settings: a split that a seed
    draws can be an easy one.
    """
    by_label = {label: [o for o in results if o.strategy == label] for label in labels_of(results)}
    rivals = [own for label, own in by_label.items() if _facts(label).role == BASELINE]
    notes = []
    for label, ours in by_label.items():
        if _facts(label).role != PROPOSED:
            continue
        measures = {
            metric: "",
            **{group: f" for {group} devices" for group in groups_of(ours)[-1:]},
        }
        for which, whom in measures.items():
            leads = filter(None, (_lead(collection, ours, own, row, which) for own in rivals))
            if said := ", ".join(leads):
                notes.append(f"{label} is ahead{whom}, in points: {said}")
    return notes


def _lead(
    collection: Collection, ours: Sequence[Result], theirs: Sequence[Result], row: str, which: str
) -> str | None:
    def by_run(results: Sequence[Result]) -> dict[tuple[int, str], float]:
        return {
            (one.seed, one.changes): value
            for one in results
            if one.statistics == STATISTICS[0] and (value := one.value(which)) is not None
        }

    own, others = by_run(ours), by_run(theirs)
    both = sorted(own.keys() & others.keys())
    if not both:
        return None
    lead = _points(*(Spread.of([found[run] for run in both]) for found in (own, others)))
    label = theirs[0].strategy
    names = [strategy_of(results[0].strategy) for results in (ours, theirs)]
    known = [collection.published.get((row, name, which)) for name in names]
    remarks = [f"paper {_points(*known)}"] if all(known) else []
    if len(both) < len(own):
        remarks.append(f"of seed {', '.join(str(seed) for seed, _ in both)} only")
    return f"{label} {lead}" + (f" ({'; '.join(remarks)})" if remarks else "")


def longest(results: Iterable[Result]) -> list[Result]:
    """Those with the most rounds: runs of other lengths do not compare."""
    found = list(results)
    rounds = max((one.rounds for one in found), default=0)
    return [one for one in found if one.rounds == rounds]


def _kinds(results: Sequence[Result]) -> list[str]:
    known = (*STATISTICS, LATE)
    return [kind for kind in known if any(one.statistics == kind for one in results)]


def groups_of(results: Sequence[Result]) -> list[str]:
    """The groups of devices, in their order."""
    return list(dict.fromkeys(group for one in results for group in one.groups))


def _percent(found: Spread | None) -> str:
    return found.text(_SHARE) if found is not None else NOTHING


def _points(one: Spread | None, other: Spread | None) -> str:
    if one is None or other is None:
        return NOTHING
    return f"{100 * (one.mean - other.mean):+.1f}"


# --- what configurations cost -------------------------------------------------------------------


def tables_of(model: str, own: Path | None = None) -> list[ProfileTable]:
    """The tables of a model that ship with the package, and one's own before them."""
    names = [name for name in shipped() if name.partition("/")[0].endswith(f"-{model}")]
    theirs = [ProfileTable.load(own)] if own is not None else []
    return [*theirs, *(ProfileTable.load(name) for name in names)]


def savings(tables: Sequence[ProfileTable]) -> TextTable:
    """The cheapest configuration of each table, and whether time and upload can be chosen apart."""
    alone = next((table for table in tables if table.variant == "f"), None)
    against = [_against(table, alone) for table in tables]
    columns = {
        "table": [without_folder(table.name) for table in tables],
        "kind": [table.kind for table in tables],
        "configurations": [str(len(table)) for table in tables],
        "time saved up to": [_saved(table.time) for table in tables],
        "memory saved up to": [_saved(table.memory) for table in tables],
        "against f: time": [time for time, _ in against],
        "memory": [memory for _, memory in against],
        "correlation of time and upload": [
            f"{float(np.corrcoef(table.time, table.upload)[0, 1]):.2f}" for table in tables
        ],
    }
    notes = (SAID, *(without_folder(table.describe()) for table in tables))
    return TextTable.of(f"{tables[0].model}: what configurations save", columns, notes)


def _saved(costs: np.ndarray) -> str:
    return f"{100 * (1 - float(costs.min())):.0f} %"


def _against(table: ProfileTable, alone: ProfileTable | None) -> tuple[str, str]:
    """The most that a span saves of what it costs with freezing alone."""
    if alone is None or alone is table or table.method == "width":
        return NOTHING, NOTHING
    here, there = table.hardware, alone.hardware
    if here is None or there is None or not here.same_machine(there):
        return NOTHING, NOTHING
    pairs = [(table.row(span), alone.row(span)) for span in table.spans if span in alone]
    time, memory = (max(1 - ours[i] / theirs[i] for ours, theirs in pairs) for i in (0, 1))
    return f"{100 * time:.0f} %", f"{100 * memory:.0f} %"
