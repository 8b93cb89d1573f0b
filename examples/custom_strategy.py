"""A strategy of your own: how a device plans, and how the server merges.

python examples/custom_strategy.py

Here a device trains the longest span that fits *at the output*, as fine-tuning does. It is
compared with CoCoFL's random choice among all maximal spans.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from cocofl import Experiment, simulate
from cocofl.strategies import (
    Mean,
    Plan,
    Situation,
    SpanWork,
    Strategy,
    Tables,
    feasible,
    time_share,
)


def output_side(tables: Tables, *, variant: str = "qff") -> Strategy:
    """The tables come from the experiment; keyword arguments are options of its [strategy]."""
    table = tables.spans(variant)

    def plan(situation: Situation) -> Plan | None:
        spans = [s for s in feasible(table, situation.budget) if tables.n_blocks - 1 in s]
        if not spans:
            return None  # the device sits this round out, and is counted
        span = max(spans, key=len)
        return Plan(SpanWork(span, variant), time_share(table, [span], situation.budget))

    return Strategy(plan, Mean(), integers=variant == "qff")


def main() -> None:
    """Run it next to CoCoFL for two rounds on digits."""
    base = Experiment(rounds=2).changed({"devices.per_round": 4, "engine.workers": 1})
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cocofl", "custom_strategy:output_side"):
            out = Path(folder) / name.partition(":")[0]
            run = simulate(base.with_strategy(name), out=out)
            spans = [span for record in run.rounds for _, _, span, _ in record.devices]
            print(f"{name}: accuracy {run.final.scores['accuracy']:.1%}; spans {', '.join(spans)}")


if __name__ == "__main__":
    main()
