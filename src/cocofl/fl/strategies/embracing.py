"""EmbracingFL (Lee et al., 2024): a device trains as many blocks at the output as fit.

"Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training".
Blocks near the output differ most between devices with different data, so weak devices train these;
the others are left to the strong. What a device does not train it only runs forward, block after
block, and keeps nothing of it.
"""

from __future__ import annotations

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import SPANS, StrategyFacts, declares
from cocofl.profiling.table import spans_alone

VARIANT = "f"


@declares(
    StrategyFacts(
        label="EmbracingFL",
        citation="Lee et al., IEEE TMC 2024",
        tables=SPANS,
        variant=VARIANT,
        colour="#762A83",
        order=22,
    )
)
def embracing(tables: Tables) -> Strategy:
    """The longest span that ends with the classifier and fits, frozen blocks in float32.

    Each block is averaged over those who trained it.
    """
    table = spans_alone(tables.spans(VARIANT))
    last = tables.n_blocks - 1

    def plan(situation: Situation) -> Plan | None:
        fitting = [blocks for blocks in feasible(table, situation.budget) if last in blocks]
        if not fitting:
            return None
        blocks = max(fitting, key=len)
        return Plan(SpanWork(blocks, VARIANT), time_share(table, [blocks], situation.budget))

    return Strategy(plan, Mean("senders"), only_able=True)
