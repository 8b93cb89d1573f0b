"""FedPart (Wang et al., NeurIPS 2024): all devices train the same block, one after the other.

"Why Go Full? Elevating Federated Learning Through Partial Network Updates". Full rounds come first.
Then cycles begin, in which each block has its turn, from the input to the output, while all others
are frozen in float32; after each cycle there are some full rounds again.
"""

from __future__ import annotations

from cocofl.checks import check_choice, check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import SPANS, StrategyFacts, declares
from cocofl.profiling.table import spans_alone
from cocofl.span import Span

VARIANT = "f"
ORDERS = ("forward", "backward")


def turn(
    round_index: int, n_blocks: int, *, warmup: int, each: int, between: int, order: str = "forward"
) -> Span:
    """What is trained in a round.

    >>> [str(turn(r, 2, warmup=1, each=2, between=1)) for r in range(7)]
    ['0:2', '0:1', '0:1', '1:2', '1:2', '0:2', '0:1']
    """
    since = (round_index - warmup) % (n_blocks * each + between)
    if round_index < warmup or since >= n_blocks * each:
        return Span(0, n_blocks)
    block = since // each if order == "forward" else n_blocks - 1 - since // each
    return Span(block, block + 1)


@declares(
    StrategyFacts(
        label="FedPart",
        citation="Wang et al., NeurIPS 2024",
        tables=SPANS,
        variant=VARIANT,
        colour="#B2182B",
        order=23,
    )
)
def fedpart(
    tables: Tables, *, warmup: int = 5, each: int = 2, between: int = 5, order: str = "forward"
) -> Strategy:
    """A device on which the block of the round does not fit is not asked.

    ``warmup`` is the number of full rounds in the beginning, ``each`` how many rounds a block has
    in a cycle, ``between`` the number of full rounds after a cycle, and ``order`` which block comes
    first: ``forward`` from the input, ``backward`` from the output.
    """
    check_number("strategy.warmup", warmup, least=0)
    check_number("strategy.each", each, least=1)
    check_number("strategy.between", between, least=0)
    check_choice("strategy.order", order, ORDERS)
    table = spans_alone(tables.spans(VARIANT))

    def plan(situation: Situation) -> Plan | None:
        span = turn(
            situation.round_index,
            tables.n_blocks,
            warmup=warmup,
            each=each,
            between=between,
            order=order,
        )
        if span not in feasible(table, situation.budget):
            return None
        return Plan(SpanWork(span, VARIANT), time_share(table, [span], situation.budget))

    return Strategy(plan, Mean("everyone"), only_able=True)
