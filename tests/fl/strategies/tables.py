"""Tables with costs that a person can follow, and devices that ask them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cocofl import Budget, ProfileTable
from cocofl.fl.federation import Situation
from cocofl.freeze import FLOAT32
from cocofl.profiling import Cost
from cocofl.span import all_spans

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
        return ProfileTable.from_costs(
            costs, n_blocks=n, model="toy", method="span", variant=variant or "f", source="measured"
        )

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
