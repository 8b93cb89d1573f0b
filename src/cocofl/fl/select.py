"""Which span a device trains this round (Algorithm 1 of the paper).

Feasible is what fits the budget; maximal is what is feasible and no part of another feasible
span. CoCoFL draws one maximal span at random; the other selectors are those of the ablation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cocofl.budget import Budget
from cocofl.errors import InvalidSetting, NoFeasibleSpan
from cocofl.profiling.table import Configuration, ProfileTable
from cocofl.span import Span

OVER = ("maximal", "all")

Selector = Callable[[Sequence[Span], np.random.Generator, int], Span]
"""From spans in order, a generator and the round to one span."""

_RESOURCES = ("time", "memory", "upload")
# Fractions come from divisions: what a strong device needs must not fail by a rounding error.
_SLACK = 1e-9


def feasible(table: ProfileTable, budget: Budget) -> list[Span]:
    """The spans that fit the budget in time, memory and upload, in order.

    Empty if nothing does; :func:`select` says then what is missing.
    """
    spans = table.spans
    return [spans[i] for i in np.flatnonzero(_fits(table, budget)).tolist()]


def feasible_widths(table: ProfileTable, budget: Budget) -> list[float]:
    """The widths that fit the budget, ascending: what HeteroFL and FjORD choose from."""
    widths = table.widths
    return [widths[i] for i in np.flatnonzero(_fits(table, budget)).tolist()]


def maximal(spans: Sequence[Span]) -> list[Span]:
    """The spans that are no proper part of another one, in order.

    >>> [str(span) for span in maximal([Span(0, 2), Span(1, 2), Span(1, 4), Span(5, 6)])]
    ['0:2', '1:4', '5:6']
    """
    kept: list[Span] = []
    reached = 0
    # Of spans in this order one is a part of another iff an earlier one reaches as far.
    for span in sorted(set(spans), key=lambda span: (span.start, -span.stop)):
        if span.stop > reached:
            kept.append(span)
            reached = span.stop
    return kept


def select(
    table: ProfileTable,
    budget: Budget,
    rng: np.random.Generator,
    *,
    selector: str = "random",
    over: str = "maximal",
    round_index: int = 0,
) -> Span:
    """One span that fits the budget; :class:`~cocofl.errors.NoFeasibleSpan` if none does.

    A device that everything fits trains everything, whatever the selector: in the paper's study
    of selectors the strong devices do. ``rng`` belongs to the device and the round;
    ``round_index`` is what ``round-robin`` counts.
    """
    choose = SELECTORS.get(selector)
    if choose is None or over not in OVER:
        raise InvalidSetting(
            f"unknown selector {selector!r} over {over!r}; expected one of "
            f"{', '.join(SELECTORS)} over {' or '.join(OVER)}"
        )
    spans = feasible(table, budget)
    if not spans:
        raise nothing_fits(table, budget)
    if (everything := Span(0, table.n_blocks)) in spans:
        return everything
    return choose(maximal(spans) if over == "maximal" else spans, rng, round_index)


def nothing_fits(table: ProfileTable, budget: Budget) -> NoFeasibleSpan:
    """The error that names the configuration that comes nearest, and what it needs."""
    limits = table.limits(budget)
    needs = np.stack([table.time, table.memory, table.upload])
    over = np.max(needs / np.maximum(np.array(limits), 1e-12)[:, None], axis=0)
    nearest: Configuration = table.configurations[int(np.argmin(over))]
    lacking = [
        f"{what} {need:.3f} (there is {limit:.3f})"
        for what, need, limit in zip(_RESOURCES, table.row(nearest), limits, strict=True)
        if need > limit
    ]
    kind = "width" if table.method == "width" else "span"
    return NoFeasibleSpan(
        f"nothing in {table.name} fits {budget}: the nearest, {kind} {nearest}, needs of full "
        f"training {' and '.join(lacking)}. Raise the budget; in a run such a device sits "
        "the round out."
    )


def _fits(table: ProfileTable, budget: Budget) -> NDArray[np.bool_]:
    time, memory, upload = (limit * (1 + _SLACK) for limit in table.limits(budget))
    fits: NDArray[np.bool_] = (
        (table.time <= time) & (table.memory <= memory) & (table.upload <= upload)
    )
    return fits


def _at_random(spans: Sequence[Span], rng: np.random.Generator, _round: int) -> Span:
    return spans[int(rng.integers(len(spans)))]


def _most_blocks(spans: Sequence[Span], _rng: np.random.Generator, _round: int) -> Span:
    return max(spans, key=len)  # of equally long ones the first: nearest to the input


def _fewest_blocks(spans: Sequence[Span], _rng: np.random.Generator, _round: int) -> Span:
    return min(spans, key=len)


def _in_turn(spans: Sequence[Span], _rng: np.random.Generator, round_index: int) -> Span:
    return spans[round_index % len(spans)]


SELECTORS: dict[str, Selector] = {
    "random": _at_random,
    "max": _most_blocks,
    "min": _fewest_blocks,
    "round-robin": _in_turn,
}
