"""Results beside what was published, as tables: for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cocofl.fl.local import STATISTICS
from cocofl.report.findings import Spread
from cocofl.reproduction.collection import ABLATION, Collection, on_one_place
from cocofl.reproduction.plans import (
    SELECTIONS,
    STRATEGY_ORDER,
    VARIANTS,
    limited_label,
)
from cocofl.reproduction.results import Result, spread

RIVALS = ("heterofl", "fjord", "fedavg")
_NOTHING = "–"


@dataclass(frozen=True)
class TextTable:
    """A table of texts with a title above and notes below."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *["--:"] * (len(self.header) - 1)]
        cells = [self.header, rule, *self.lines]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"## {self.title}\n\n{table}\n" + (f"\n{notes}" if notes else "")


def of_row(collection: Collection, results: Sequence[Result], row: str) -> TextTable | None:
    """A column of the paper's Table 2: its numbers, ours, and the difference; None without ours."""
    # What was trained with all data in one place stands for every split.
    own = [
        replace(one, row=row, groups={} if one.row != row else one.groups)
        for one in results
        if one.row == row or (one.row == on_one_place(row) and one.strategy == "centralized")
    ]
    rounds = max((one.rounds for one in own), default=0)
    own = [one for one in own if one.rounds == rounds]
    if not own:
        return None
    metric = collection.metric(row)
    groups = list(dict.fromkeys(group for one in own for group in one.groups))
    shown = [kind for kind in STATISTICS if any(one.statistics == kind for one in own)]
    header = ("", "paper", *(f"{kind} statistics" for kind in shown))
    header += ("difference", *groups, "seeds") if collection.published else (*groups, "seeds")
    lines = []
    for label in _ordered({one.strategy for one in own}):
        paper = collection.published.get((row, label.partition(".")[0], metric))
        ours = [spread(own, row, label, kind, metric) for kind in shown]
        seeds = {one.seed for one in own if one.strategy == label}
        by_group = [_percent(spread(own, row, label, shown[0], group)) for group in groups]
        difference = [_points(ours[0], paper)] if collection.published else []
        cells = [_percent(paper), *map(_percent, ours), *difference, *by_group, str(len(seeds))]
        lines.append((label, *cells))
    if not collection.published:
        header = (header[0], *header[2:])
        lines = [(line[0], *line[2:]) for line in lines]
    title = f"{row}: {'macro F1' if metric == 'f1' else 'accuracy'} in %, {rounds} rounds"
    notes = (*_ahead(collection, own, row, metric), *_groups_note(collection, row), *origins(own))
    return TextTable(title, header, tuple(lines), notes)


def fairness(collection: Collection, results: Sequence[Result], row: str) -> TextTable | None:
    """The accuracy of each group of devices, beside what the paper's text says."""
    own = [one for one in results if one.row == row and one.strategy != "centralized"]
    rounds = max((one.rounds for one in own), default=0)
    own = [one for one in own if one.rounds == rounds]
    if not own:
        return None
    groups = list(dict.fromkeys(group for one in own for group in one.groups))
    shown = [kind for kind in STATISTICS if any(one.statistics == kind for one in own)]
    lines = []
    for label in _ordered({one.strategy for one in own}):
        strategy = label.partition(".")[0]
        known = [collection.published.get((row, strategy, group)) for group in groups]
        if any(known):
            lines.append((f"{label}, paper", "", *map(_percent, known), _NOTHING))
        for kind in shown:
            found = [spread(own, row, label, kind, group) for group in groups]
            mine = {one.seed for one in own if one.strategy == label and one.statistics == kind}
            gap = _points(found[0], found[-1])
            lines.append((label, kind, *map(_percent, found), gap) if mine else (label,))
    header = ("", "statistics", *groups, f"{groups[0]} – {groups[-1]}")
    title = f"{row}: accuracy of each group in %, {rounds} rounds"
    return TextTable(title, header, tuple(lines), tuple(origins(own)))


def ablation(results: Sequence[Result], limits: Sequence[float]) -> TextTable | None:
    """Variants over the limit: what errors cost without gains, and what the gains are worth."""
    columns = [
        (f"{variant}, {'with' if costs == variant else 'without'} gains", variant, costs)
        for costs_of in ("f", "")
        for variant in VARIANTS
        for costs in [costs_of or variant]
        if not (costs_of and variant == "f")
    ]
    labels = [[limited_label(x, variant=v, costs=c) for _, v, c in columns] for x in limits]
    header = ("limit", *(name for name, _, _ in columns))
    return _over_limits("Ablation: variants over the limit", header, limits, labels, results)


def selectors(results: Sequence[Result], limits: Sequence[float]) -> TextTable | None:
    """Ways to select a span over the limit."""
    labels = [[limited_label(x, selector=s, over=o) for s, o in SELECTIONS] for x in limits]
    header = ("limit", *(f"{selector}+{over}" for selector, over in SELECTIONS))
    return _over_limits("Selection over the limit", header, limits, labels, results)


def ordering(collection: Collection, results: Sequence[Result], row: str) -> str:
    """Who is ahead of whom among all that obey budgets, best first."""
    metric, statistics = collection.metric(row), STATISTICS[0]
    found = {
        label: spread(results, row, label, statistics, metric) for label in ("cocofl", *RIVALS)
    }
    means = {label: one.mean for label, one in found.items() if one is not None}
    best_first = sorted(means, key=lambda label: -means[label])
    return f"{row}: " + " > ".join(f"{label} {100 * means[label]:.1f}" for label in best_first)


def origins(results: Iterable[Result]) -> list[str]:
    """Where numbers come from, each said once: tables, machines, versions, other settings."""
    notes: list[str] = []
    for result in results:
        if result.table:
            notes.append(f"table of {result.strategy}: {result.table}")
        version = f"cocofl {result.cocofl} {result.commit or '(commit unknown)'}"
        notes.append(
            f"{result.engine or 'engine unknown'} on {result.hardware}; {version}, "
            f"torch {result.torch}, Python {result.python}"
        )
        if result.changes:
            notes.append(f"{result.strategy}, seed {result.seed}, other settings: {result.changes}")
    return list(dict.fromkeys(notes))


def _over_limits(
    title: str,
    header: tuple[str, ...],
    limits: Sequence[float],
    labels: Sequence[Sequence[str]],
    results: Sequence[Result],
) -> TextTable | None:
    used = [one for one in results if any(one.strategy in line for line in labels)]
    rounds = max((one.rounds for one in used), default=0)
    used = [one for one in used if one.rounds == rounds]
    if not used:
        return None
    lines = []
    for kind in STATISTICS:
        for limit, names in zip(limits, labels, strict=True):
            found = [spread(used, ABLATION, name, kind, "accuracy") for name in names]
            if any(found):
                shown = f"{limit:g}" + ("" if kind == STATISTICS[0] else f" ({kind} statistics)")
                lines.append((shown, *map(_percent, found)))
    seeds = sorted({one.seed for one in used})
    title = f"{title}: accuracy in %, {rounds} rounds, seeds {', '.join(map(str, seeds))}"
    return TextTable(title, header, tuple(lines), tuple(origins(used)))


def _ordered(labels: Iterable[str]) -> list[str]:
    """In the order of the paper, one's own strategies last."""

    def place(label: str) -> tuple[int, str]:
        name = label.partition(".")[0]
        known = name in STRATEGY_ORDER
        return (STRATEGY_ORDER.index(name) if known else len(STRATEGY_ORDER), label)

    return sorted(labels, key=place)


def _ahead(collection: Collection, results: Sequence[Result], row: str, metric: str) -> list[str]:
    """How far CoCoFL is ahead of those that obey the same budgets, here and in the paper."""
    notes = []
    labels = {one.strategy for one in results}
    for label in _ordered(label for label in labels if label.partition(".")[0] == "cocofl"):
        ours = spread(results, row, label, STATISTICS[0], metric)
        parts = []
        for rival in RIVALS:
            theirs = spread(results, row, rival, STATISTICS[0], metric)
            if ours is None or theirs is None:
                continue
            known = [collection.published.get((row, name, metric)) for name in ("cocofl", rival)]
            paper = f" (paper {_points(*known)})" if all(known) else ""
            parts.append(f"{rival} {_points(ours, theirs)}{paper}")
        if parts:
            notes.append(f"{label} is ahead, in points: {', '.join(parts)}")
    return notes


def _groups_note(collection: Collection, row: str) -> list[str]:
    has_groups = any((row, "cocofl", group) in collection.published for group in ("strong", "weak"))
    return ["accuracies of groups beside the paper's: `cocofl reproduce fairness`"] * has_groups


def _percent(found: Spread | None) -> str:
    return found.percent() if found is not None else _NOTHING


def _points(one: Spread | None, other: Spread | None) -> str:
    if one is None or other is None:
        return _NOTHING
    return f"{100 * (one.mean - other.mean):+.1f}"
