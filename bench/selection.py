"""How long one selection takes on the largest table, 253 spans (at most 1 ms).

python bench/selection.py
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from cocofl import Budget, ProfileTable, all_spans
from cocofl.fl.select import OVER, SELECTORS, select
from cocofl.profiling import Cost
from cocofl.profiling.configurations import Configuration

REPEATS = 2000


def main() -> None:
    rng = np.random.default_rng(0)
    costs: dict[Configuration, Cost] = {
        span: Cost(len(span) * rng.uniform(0.5, 1), None, 100 * len(span), 10 * len(span))
        for span in all_spans(22)
    }
    table = ProfileTable.from_costs(
        costs, n_blocks=22, model="densenet40", method="span", variant="qff", source="measured"
    )
    print(f"{len(table)} spans, milliseconds per selection: median, largest of {REPEATS}")
    for over in OVER:
        for selector in SELECTORS:
            taken = []
            for i in range(REPEATS):
                budget = Budget(time=rng.uniform(0.1, 1.1), memory=1.0, upload=rng.uniform(0.5, 1))
                begin = time.perf_counter()
                select(table, budget, rng, selector=selector, over=over, round_index=i)
                taken.append(1e3 * (time.perf_counter() - begin))
            print(f"{selector:>12} over {over:<8} {statistics.median(taken):.3f} {max(taken):.3f}")


if __name__ == "__main__":
    main()
