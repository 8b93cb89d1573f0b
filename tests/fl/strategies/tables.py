"""Tables with costs that a person can follow, and devices that ask them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cocofl import Budget, ProfileTable
from cocofl.fl.federation import Situation
from cocofl.freeze import FLOAT32
from cocofl.profiling import Cost
from cocofl.span import Span, all_spans

WIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class PlainTables:
    """Of three blocks: forward costs 1 each, passing gradients 1, those of weights 2.

    A trained block keeps 30 bytes and sends 10.
    """

    n_blocks: int = 3
    is_text: bool = False
    labels: str = "classes"
    least: tuple[Budget, ...] = ()

    def spans(self, variant: str | None = None, precision: str = FLOAT32) -> ProfileTable:
        n = self.n_blocks
        costs: dict[Any, Cost] = {
            span: Cost(2 * n - 1 - min(span) + 2 * size, None, 30 * size, 10 * size)
            for span in all_spans(n)
            if (size := len(span))
        }
        return self._of_spans(costs, variant)

    def first_blocks(self, variant: str) -> ProfileTable:
        """As if the first blocks were all there is."""
        costs: dict[Any, Cost] = {
            Span(0, depth): Cost(4 * depth - 1, None, 30 * depth, 10 * depth)
            for depth in range(1, self.n_blocks + 1)
        }
        return self._of_spans(costs, variant)

    def narrow_ends(self, variant: str) -> dict[float, ProfileTable]:
        """A narrow block counts as so much of one."""
        n, whole = self.n_blocks, self.spans(variant)
        full = whole.costs[whole.configurations.index(Span(0, n))]

        def cost(first: int, width: float) -> Cost:
            passing = width * (n - first - 1)
            step_s = (first + 1 + passing) + passing + 2 * (1 + passing)
            return Cost(step_s, None, round(30 * (1 + passing)), round(10 * (1 + passing)))

        found: dict[float, dict[Any, Cost]] = {
            width: {Span(first, n): cost(first, width) for first in range(n)} for width in WIDTHS
        }
        return {width: self._of_spans(rows, variant, full) for width, rows in found.items()}

    def _of_spans(
        self, costs: dict[Any, Cost], variant: str | None, full: Cost | None = None
    ) -> ProfileTable:
        facts = {"model": "toy", "method": "span", "source": "measured", "full": full}
        n = self.n_blocks
        return ProfileTable.from_costs(costs, n_blocks=n, variant=variant or "f", **facts)

    def widths(self) -> ProfileTable:
        costs: dict[Any, Cost] = {
            width: Cost(width, None, round(1000 * width), 100) for width in WIDTHS
        }
        return ProfileTable.from_costs(
            costs, n_blocks=3, model="toy", method="width", variant="none", source="measured"
        )

    def least_budgets(self) -> tuple[Budget, ...]:
        return self.least


def situation(
    round_index: int = 0, *, steps: int = 10, seed: int = 0, **budget: float
) -> Situation:
    """A device with a budget of fractions."""
    return Situation(0, round_index, Budget(**budget), np.random.default_rng(seed), steps)
