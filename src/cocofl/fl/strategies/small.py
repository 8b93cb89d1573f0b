"""One small network for all: as wide as the weakest device can train, trained by FedAvg.

The simplest answer to unequal devices, and the one that others have to beat: nobody is left out,
nothing is frozen, and the strong do no more than the weak.
"""

from __future__ import annotations

from cocofl.checks import check_number
from cocofl.errors import InvalidSetting
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible_widths
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import WIDTHS, StrategyFacts, declares
from cocofl.fl.strategies.widths import TEXT_WIDTHS
from cocofl.span import Span


@declares(
    StrategyFacts(
        label="one small network",
        tables=WIDTHS,
        own_network=True,
        colour="#1B7837",
        order=21,
    )
)
def small(tables: Tables, *, width: float = 0.0) -> Strategy:
    """All devices train, and the server tests, the network at one ``width`` of the table.

    By default that is the widest that every device can train in every round; devices on which no
    width fits at all are left out of that, and sit out.
    """
    check_number("strategy.width", width, least=0, most=1)
    table, everything = tables.widths(), Span(0, tables.n_blocks)
    known = [one for one in table.widths if not tables.is_text or one in TEXT_WIDTHS]
    if width and width not in known:
        raise InvalidSetting(
            f"strategy.width is {width:g}, of which {table.name} says nothing; expected one of "
            f"{', '.join(f'{one:g}' for one in known)}"
        )
    chosen = width or min(
        (
            max(fitting)
            for budget in tables.least_budgets()
            if (fitting := [w for w in feasible_widths(table, budget) if w in known])
        ),
        default=known[0],
    )

    def plan(situation: Situation) -> Plan | None:
        if chosen not in feasible_widths(table, situation.budget):
            return None
        time = time_share(table, [chosen], situation.budget)
        return Plan(SpanWork(everything, "f"), time)

    return Strategy(plan, Mean("everyone"), width=chosen)
