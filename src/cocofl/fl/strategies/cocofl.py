"""CoCoFL (Pfeiffer et al., 2023): train a span of blocks that fits, freeze the rest in int8."""

from __future__ import annotations

from collections.abc import Mapping

from cocofl.budget import Budget
from cocofl.checks import check_choice, check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import OVER, feasible, select, selector_named
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import PROPOSED, SPANS, StrategyFacts, declares
from cocofl.fl.strategies.learning import WHOLE, check_learning
from cocofl.freeze import FLOAT32, PRECISIONS, VARIANTS
from cocofl.freeze.adapters import ALPHA, RANK
from cocofl.profiling import ProfileTable
from cocofl.profiling.table import beside_head, spans_alone
from cocofl.span import Blocks

NEVER, AUTO, ALWAYS = CHECKPOINT = ("never", "auto", "always")
"""When a device computes its trained blocks again in the backward pass."""


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
    checkpoint: str = NEVER,
    precision: str = FLOAT32,
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
    multiplies its learning rate by ``(n / k) ** lr_power``. With ``checkpoint = "auto"`` a device
    whose memory is too small for a span computes its trained blocks again in the backward pass,
    where that fits: the same numbers for more time (``"always"``: every device does). With
    ``precision = "bfloat16"`` trained blocks are computed so on CPUs that can. With
    ``train = "lora"`` adapters of ``rank`` learn in place of a span's weights, which are int8
    there, too.
    """
    check_learning(train, rank, alpha)
    check_choice("strategy.variant", variant, VARIANTS)
    check_choice("strategy.costs", costs or variant, VARIANTS)
    check_choice("strategy.over", over, OVER)
    check_number("strategy.lr_power", lr_power, least=-4, most=4)
    choose = selector_named(selector)
    check_choice("strategy.precision", precision, PRECISIONS)
    levers = _levers(tables, costs or variant, precision, checkpoint, head=head)

    def plan(situation: Situation) -> Plan | None:
        budget = situation.budget
        fitting = _fitting(levers, budget)
        if not fitting:
            return None
        chosen = select(
            levers[fitting[min(fitting)]],
            budget,
            situation.rng,
            selector=choose,
            over=over,
            round_index=situation.round_index,
            fitting=sorted(fitting),
        )
        table, again = levers[fitting[chosen]], fitting[chosen]
        factor = (table.n_blocks / len(chosen)) ** lr_power
        work = SpanWork(chosen, variant, lr_factor=factor, checkpoint=again, precision=precision)
        return Plan(work, time_share(table, [chosen], budget))

    return Strategy(plan, Mean("everyone"), integers=variant == "qff")


def _levers(
    tables: Tables, variant: str, precision: str, checkpoint: str, *, head: bool
) -> dict[bool, ProfileTable]:
    """What spans cost, by whether trained blocks are computed again in the backward pass."""
    check_choice("strategy.checkpoint", checkpoint, CHECKPOINT)
    of_spans, found = beside_head if head else spans_alone, dict[bool, ProfileTable]()
    if checkpoint != ALWAYS:
        found[False] = of_spans(tables.spans(variant, precision))
    if checkpoint != NEVER:
        found[True] = of_spans(tables.checkpointed(variant, precision))
    return found


def _fitting(levers: Mapping[bool, ProfileTable], budget: Budget) -> dict[Blocks, bool]:
    """What fits, and whether only where it is computed again."""
    fitting: dict[Blocks, bool] = {}
    for again, table in levers.items():
        for blocks in feasible(table, budget):
            fitting.setdefault(blocks, again)
    return fitting
