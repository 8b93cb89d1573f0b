"""HeteroFL (Diao et al., 2021): a device trains the widest network that fits."""

from __future__ import annotations

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible_widths
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import SLICES, WIDTHS, StrategyFacts, declares
from cocofl.fl.widths import WidthWork

# The paper's levels for Transformers; a CNN can have any width of the table.
TEXT_WIDTHS = (0.125, 0.4, 0.625, 0.8125, 1.0)


@declares(
    StrategyFacts(
        label="HeteroFL",
        citation="Diao et al., ICLR 2021",
        tables=WIDTHS,
        uploads=SLICES,
        colour="#D55E00",
        order=4,
    )
)
def heterofl(tables: Tables, *, scaler: bool = False, masked: bool = False) -> Strategy:
    """Nested averaging per coordinate, static BatchNorm; scaler and masked loss as options."""
    table = tables.widths()

    def plan(situation: Situation) -> Plan | None:
        widths = feasible_widths(table, situation.budget)
        if tables.is_text:
            widths = [width for width in widths if width in TEXT_WIDTHS]
        if not widths:
            return None
        time = time_share(table, [widths[-1]], situation.budget)
        return Plan(WidthWork(widths[-1], scaler, masked), time)

    return Strategy(plan, Mean("senders"), tracks_statistics=False)
