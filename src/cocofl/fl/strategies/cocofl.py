"""CoCoFL (Pfeiffer et al., 2023): train a span of blocks that fits, freeze the rest in int8."""

from __future__ import annotations

from cocofl.checks import check_choice, check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import OVER, feasible, select, selector_named
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import PROPOSED, SPANS, StrategyFacts, declares
from cocofl.fl.strategies.learning import WHOLE, check_learning
from cocofl.freeze import VARIANTS
from cocofl.freeze.adapters import ALPHA, RANK
from cocofl.profiling.table import beside_head, spans_alone


@declares(
    StrategyFacts(
        label="CoCoFL",
        citation="Pfeiffer et al., TMLR 2023",
        role=PROPOSED,
        tables=SPANS,
        in_paper=True,
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
    head: bool = False,
    lr_power: float = 0.0,
    train: str = WHOLE,
    rank: int = RANK,
    alpha: float = ALPHA,
) -> Strategy:
    """Algorithm 1 on the devices, Algorithm 2 on the server.

    ``variant`` is how blocks are frozen; ``costs`` the variant whose table says what fits (its
    own; the paper's ablation sets another to see errors without gains); ``selector`` how a span
    is chosen ``over`` the maximal or all feasible ones, by name or one's own as
    ``package.module:function`` (:data:`~cocofl.fl.select.Selector`). With ``head`` every device
    also trains the classifier, the last block, beside its span. A device that trains k of n blocks
    multiplies its learning rate by ``(n / k) ** lr_power``. With ``train = "lora"`` adapters of
    ``rank`` learn in place of a span's weights, which are int8 there, too.
    """
    check_learning(train, rank, alpha)
    check_choice("strategy.variant", variant, VARIANTS)
    check_choice("strategy.costs", costs or variant, VARIANTS)
    check_choice("strategy.over", over, OVER)
    check_number("strategy.lr_power", lr_power, least=-4, most=4)
    choose = selector_named(selector)
    table = (beside_head if head else spans_alone)(tables.spans(costs or variant))

    def plan(situation: Situation) -> Plan | None:
        if not feasible(table, situation.budget):
            return None
        blocks = select(
            table,
            situation.budget,
            situation.rng,
            selector=choose,
            over=over,
            round_index=situation.round_index,
        )
        factor = (table.n_blocks / len(blocks)) ** lr_power
        work = SpanWork(blocks, variant, lr_factor=factor)
        return Plan(work, time_share(table, [blocks], situation.budget))

    return Strategy(plan, Mean("everyone"), integers=variant == "qff")
