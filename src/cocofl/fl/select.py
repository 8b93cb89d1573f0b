"""Which blocks a device trains this round (Algorithm 1 of the paper).

Feasible is what fits the budget; maximal is what is feasible and no part of another feasible
configuration. CoCoFL draws one maximal span at random; the other selectors are those of the
ablation, and one's own is ``package.module:function``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from cocofl.budget import Budget
from cocofl.checks import check_choice
from cocofl.errors import InvalidSetting, NoFeasibleSpan
from cocofl.named import lookup
from cocofl.profiling.configurations import Configuration
from cocofl.profiling.table import ProfileTable
from cocofl.span import Blocks

OVER = ("maximal", "all")

Selector = Callable[[Sequence[Blocks], np.random.Generator, int], Blocks]
"""From what a device could train, in order, to what it trains this round.

It is told a generator that belongs to the device and the round, and the round, counted from 0.
"""

_RESOURCES = ("time", "memory", "upload")
# Fractions come from divisions: what a strong device needs must not fail by a rounding error.
SLACK = 1e-9
_STEPS = 200


def feasible(table: ProfileTable, budget: Budget) -> list[Blocks]:
    """The sets of blocks that fit the budget in time, memory and upload, in order.

    Empty if nothing does; :func:`select` says then what is missing.
    """
    spans = table.spans
    return [spans[i] for i in np.flatnonzero(_fits(table, budget)).tolist()]


def feasible_widths(table: ProfileTable, budget: Budget) -> list[float]:
    """The widths that fit the budget, ascending: what HeteroFL and FjORD choose from."""
    widths = table.widths
    return [widths[i] for i in np.flatnonzero(_fits(table, budget)).tolist()]


def maximal(configurations: Iterable[Blocks]) -> list[Blocks]:
    """Those that are no proper part of another one, in order.

    >>> from cocofl import Span
    >>> [str(span) for span in maximal([Span(0, 2), Span(1, 2), Span(1, 4), Span(5, 6)])]
    ['0:2', '1:4', '5:6']
    """
    by_bits = {_bits(blocks): blocks for blocks in configurations}
    kept: list[int] = []
    for bits in sorted(by_bits, key=int.bit_count, reverse=True):
        if not any(bits & larger == bits for larger in kept):
            kept.append(bits)
    return sorted(by_bits[bits] for bits in kept)


@lru_cache(maxsize=4096)
def _bits(blocks: Blocks) -> int:
    """A set of blocks as a number: every device of every round asks for parts of others."""
    return sum(1 << block for block in blocks)


def select(
    table: ProfileTable,
    budget: Budget,
    rng: np.random.Generator,
    *,
    selector: str | Selector = "random",
    over: str = "maximal",
    round_index: int = 0,
    fitting: Sequence[Blocks] | None = None,
) -> Blocks:
    """What fits the budget; :class:`~cocofl.errors.NoFeasibleSpan` if nothing does.

    A device that everything fits trains everything, whatever the selector: in the paper's study
    of selectors the strong devices do. ``rng`` belongs to the device and the round;
    ``round_index`` is what ``round-robin`` counts. ``fitting`` is what fits, if that is known.
    """
    choose = selector_named(selector) if isinstance(selector, str) else selector
    check_choice("over", over, OVER)
    if fitting is None:
        fitting = feasible(table, budget)
    if not fitting:
        raise nothing_fits(table, budget)
    if table.everything in fitting:
        return table.everything
    offered = maximal(fitting) if over == "maximal" else fitting
    chosen = choose(offered, rng, round_index)
    if chosen not in offered:
        raise InvalidSetting(
            f"the selector {selector} chose {chosen!r}; expected one of the {len(offered)} "
            "configurations that it was given"
        )
    return chosen


def selector_named(name: str) -> Selector:
    """A selector by name, or the user's own as ``package.module:function``."""
    return lookup(name, SELECTORS, "selector", InvalidSetting)


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


def fits(needs: Sequence[float] | NDArray[np.float64], limits: Sequence[float]) -> bool:
    """Whether time, memory and upload are within limits."""
    return all(need <= limit * (1 + SLACK) for need, limit in zip(needs, limits, strict=True))


def _fits(table: ProfileTable, budget: Budget) -> NDArray[np.bool_]:
    time, memory, upload = (limit * (1 + SLACK) for limit in table.limits(budget))
    found: NDArray[np.bool_] = (
        (table.time <= time) & (table.memory <= memory) & (table.upload <= upload)
    )
    return found


def by_shares(
    evenness: float, offered: Sequence[Blocks], rng: np.random.Generator, _round: int
) -> Blocks:
    """One of them, drawn by the shares that train blocks evenly."""
    ends = np.cumsum(even_shares(tuple(offered), evenness))
    return offered[int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))]


@lru_cache(maxsize=4096)
def even_shares(offered: tuple[Blocks, ...], evenness: float) -> tuple[float, ...]:
    """How often to train each of several configurations, so that blocks have about equal turns.

    With c the share of rounds in which a block is trained, the sum over blocks of log c is made as
    large as it can be (``evenness`` 1), or else that of c^(1 − evenness) as small as it can be: the
    larger, the more the block counts that is trained least. It goes by what is offered alone, so
    every device finds its shares by itself. Found by the multiplicative algorithm for optimal
    designs (Silvey, Titterington and Torsney, 1978), which gets better with every step.

    >>> from cocofl.span import Span
    >>> two = (Span(0, 1), Span(1, 4))
    >>> [round(share, 3) for share in even_shares(two, 1.0)]
    [0.25, 0.75]
    >>> [round(share, 3) for share in even_shares(two, 4.0)]
    [0.432, 0.568]
    """
    blocks = sorted({block for one in offered for block in one})
    trains = np.array([[block in one for one in offered] for block in blocks], dtype=float)
    shares = np.full(len(offered), 1 / len(offered))
    for _ in range(_STEPS):
        gains = trains.T @ (trains @ shares) ** -evenness
        shares *= gains ** (1 / evenness)
        shares /= shares.sum()
    return tuple(shares.tolist())


SELECTORS: dict[str, Selector] = {
    "random": lambda offered, rng, _round: offered[int(rng.integers(len(offered)))],
    # Of equally long ones the first: nearest to the input.
    "max": lambda offered, _rng, _round: max(offered, key=len),
    "min": lambda offered, _rng, _round: min(offered, key=len),
    "round-robin": lambda offered, _rng, round_index: offered[round_index % len(offered)],
    # Blocks that few candidates have get their turn nearly as often as others,
    "coverage": partial(by_shares, 4.0),
    # or in proportion to what they cost others, which trains more blocks in all.
    "proportional": partial(by_shares, 1.0),
}
