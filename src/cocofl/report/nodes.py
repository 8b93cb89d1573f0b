"""What the nodes of a deployment did, round by round: whom an operator should look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from cocofl.experiment import Run
from cocofl.report.tables import NOTHING, TextTable
from cocofl.runlog import FATES, DeviceFigures

_MOST_REASONS = 200


@dataclass
class NodeHistory:
    """One node over the rounds of a run."""

    node: int
    fates: Counter[str] = field(default_factory=Counter)
    figures: dict[int, DeviceFigures] = field(default_factory=dict)
    """By round, where its update was merged."""
    refused: dict[int, str] = field(default_factory=dict)
    """By round, why there was no update to merge."""
    quarantined: int | None = None
    """The first round in which it was not asked any more."""

    @property
    def outlier_rounds(self) -> list[int]:
        """When its update stood out."""
        return [number for number, one in self.figures.items() if one.outlier]

    @property
    def suspicion(self) -> tuple[bool, int, int, float]:
        """Whom to look at first: larger is worse."""
        largest = max((one.against_median for one in self.figures.values()), default=0.0)
        rejected = self.fates["rejected"]
        return self.quarantined is not None, len(self.outlier_rounds), rejected, largest


def node_histories(run: Run) -> list[NodeHistory]:
    """Every node that took part, the most conspicuous first."""
    found: dict[int, NodeHistory] = {}

    def of(node: int) -> NodeHistory:
        return found.setdefault(node, NodeHistory(node))

    for record in run.rounds:
        for one in record.devices:
            of(one.device).fates[one.fate] += 1
        for figures in record.figures or ():
            of(figures.device).figures[record.round] = figures
        for node, reason in record.reasons or ():
            of(node).refused[record.round] = reason
        for node in record.quarantined or ():
            of(node).quarantined = of(node).quarantined or record.round
    return sorted(found.values(), key=lambda one: one.suspicion, reverse=True)


def node_table(histories: Sequence[NodeHistory]) -> TextTable:
    """A row per node: what became of its updates, and how they compare."""
    fates = [fate for fate in FATES if any(one.fates[fate] for one in histories)]
    rows = [[*one.figures.values()] for one in histories]

    def each(name: str, pick: Callable[[list[float]], float] = median) -> list[str]:
        values = ([float(getattr(one, name)) for one in figures] for figures in rows)
        return [f"{pick(found):.3g}" if found else NOTHING for found in values]

    columns = {
        "node": [str(one.node) for one in histories],
        "outlier": [str(len(one.outlier_rounds)) for one in histories],
        "norm / median": each("against_median"),
        "largest": each("against_median", max),
        "scales ×": each("scale_change", max),
        "samples": each("samples"),
        "loss": each("loss"),
        **{fate: [str(one.fates[fate]) for one in histories] for fate in fates},
    }
    if any(one.quarantined is not None for one in histories):
        since = (one.quarantined for one in histories)
        columns["quarantined"] = [NOTHING if one is None else f"round {one}" for one in since]
    return TextTable.of("", columns)


def reason_table(histories: Iterable[NodeHistory]) -> TextTable:
    """Why updates were refused or did not come: a row for each reason of a node."""
    counts = Counter((one.node, reason) for one in histories for reason in one.refused.values())
    last = {
        (one.node, reason): number for one in histories for number, reason in one.refused.items()
    }
    shown = counts.most_common(_MOST_REASONS)
    columns = {
        "node": [str(node) for (node, _), _ in shown],
        "times": [str(count) for _, count in shown],
        "last in round": [str(last[key]) for key, _ in shown],
        "why": [reason for (_, reason), _ in shown],
    }
    left = len(counts) - len(shown)
    return TextTable.of("", columns, [f"{left} more are in metrics.jsonl."] * (left > 0))
