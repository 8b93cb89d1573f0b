"""Partial variable training (Yang et al., ICASSP 2022; Ro et al., 2022): random blocks are frozen.

"Partial Variable Training for Efficient On-Device Federated Learning" and "Scaling Language Model
Size in Cross-Device Federated Learning". Every device draws in every round what it trains, and
keeps the rest as the server sent it, in float32. What is frozen is neither differentiated nor sent.
"""

from __future__ import annotations

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import fits
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, share_of_deadline
from cocofl.fl.strategies.facts import SPANS, StrategyFacts, declares
from cocofl.profiling.block_costs import BlockCosts, blocks_of

VARIANT = "f"


@declares(
    StrategyFacts(
        label="PVT",
        citation="Yang et al., ICASSP 2022",
        tables=SPANS,
        variant=VARIANT,
        colour="#BF812D",
        order=25,
    )
)
def pvt(tables: Tables) -> Strategy:
    """In random order, a device takes every block that still fits beside those that it has.

    Each block is averaged over those who trained it. Blocks apart cost what the spans of the table
    say (:class:`~cocofl.profiling.block_costs.BlockCosts`).
    """
    costs = BlockCosts(tables.spans(VARIANT))

    def plan(situation: Situation) -> Plan | None:
        limits = costs.table.limits(situation.budget)
        chosen: list[int] = []
        for block in situation.rng.permutation(tables.n_blocks).tolist():
            if fits(costs.of([*chosen, block]), limits):
                chosen.append(block)
        if not chosen:
            return None
        time = share_of_deadline(float(costs.of(chosen)[0]), limits[0])
        return Plan(SpanWork(blocks_of(chosen), VARIANT), time)

    return Strategy(plan, Mean("senders"), only_able=True)
