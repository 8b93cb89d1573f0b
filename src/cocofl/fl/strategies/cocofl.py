"""CoCoFL (Pfeiffer et al., 2023): train a span of blocks that fits, freeze the rest in int8."""

from __future__ import annotations

from cocofl.errors import InvalidSetting
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import OVER, SELECTORS, feasible, select
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import PROPOSED, SPANS, StrategyFacts, declares
from cocofl.freeze import VARIANTS


@declares(
    StrategyFacts(
        label="CoCoFL",
        citation="Pfeiffer et al., TMLR 2023",
        role=PROPOSED,
        tables=SPANS,
        colour="#0072B2",
        order=3,
    )
)
def cocofl(
    tables: Tables,
    *,
    variant: str = "qff",
    costs: str = "",
    selector: str = "random",
    over: str = "maximal",
) -> Strategy:
    """Algorithm 1 on the devices, Algorithm 2 on the server.

    ``variant`` is how blocks are frozen; ``costs`` the variant whose table says what fits (its
    own; the paper's ablation sets another to see errors without gains); ``selector`` how a span
    is chosen ``over`` the maximal or all feasible ones.
    """
    for what, value, known in (
        ("variant", variant, VARIANTS),
        ("costs", costs or variant, VARIANTS),
        ("selector", selector, tuple(SELECTORS)),
        ("over", over, OVER),
    ):
        if value not in known:
            raise InvalidSetting(
                f"strategy.{what} is {value!r}; expected one of {', '.join(known)}"
            )
    table = tables.spans(costs or variant)

    def plan(situation: Situation) -> Plan | None:
        if not feasible(table, situation.budget):
            return None
        span = select(
            table,
            situation.budget,
            situation.rng,
            selector=selector,
            over=over,
            round_index=situation.round_index,
        )
        return Plan(SpanWork(span, variant), time_share(table, [span], situation.budget))

    return Strategy(plan, Mean("everyone"), integers=variant == "qff")
