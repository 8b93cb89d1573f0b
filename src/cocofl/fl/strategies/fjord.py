"""FjORD (Horváth et al., 2021): ordered dropout, a width drawn for every mini-batch."""

from __future__ import annotations

from cocofl.checks import check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible_widths
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import SLICES, StrategyFacts, declares
from cocofl.fl.strategies.facts import WIDTHS as WIDTH_TABLE
from cocofl.fl.strategies.heterofl import TEXT_WIDTHS
from cocofl.fl.widths import OrderedWork

WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)


@declares(
    StrategyFacts(
        label="FjORD",
        citation="Horváth et al., NeurIPS 2021",
        tables=WIDTH_TABLE,
        uploads=SLICES,
        colour="#CC79A7",
        order=5,
    )
)
def fjord(tables: Tables, *, distillation: float = 0.0) -> Strategy:
    """Of five widths those that fit; ``distillation`` is the teacher's share of the loss.

    A device that even the lowest does not fit trains at the widest of the table that does. A
    Transformer, whose widths have to suit its heads, has no others.
    """
    check_number("strategy.distillation", distillation, least=0, most=1)
    table = tables.widths()
    levels = TEXT_WIDTHS if tables.is_text else WIDTHS

    def plan(situation: Situation) -> Plan | None:
        fitting = feasible_widths(table, situation.budget)
        widths = tuple(width for width in levels if width in fitting)
        if not widths and not tables.is_text:
            widths = tuple(fitting[-1:])
        if not widths:
            return None
        # A device must be able to train at its widest; on average it is faster.
        return Plan(OrderedWork(widths, distillation), time_share(table, widths, situation.budget))

    return Strategy(plan, Mean("senders"))
