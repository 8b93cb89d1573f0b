"""FedAvg (McMahan et al., 2017) among the strong, among all, and with all data in one place."""

from __future__ import annotations

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import FULL_TRAINING, UPPER_BOUND, StrategyFacts, declares
from cocofl.fl.strategies.learning import LORA, WHOLE, check_learning
from cocofl.freeze.adapters import ALPHA, RANK

CITATION = "McMahan et al., AISTATS 2017"


@declares(
    StrategyFacts(
        label="FedAvg",
        citation=CITATION,
        tables=FULL_TRAINING,
        in_paper=True,
        colour="#E69F00",
        order=6,
    )
)
def fedavg(
    tables: Tables, *, train: str = WHOLE, rank: int = RANK, alpha: float = ALPHA
) -> Strategy:
    """Asks only devices that can train everything in time; the data of the others is lost.

    With ``train = "lora"`` everything are adapters of ``rank`` beside float32 maps.
    """
    check_learning(train, rank, alpha)
    # Of whole blocks full training is the same in every variant.
    table = tables.spans("f" if train == LORA else None)
    full = table.everything
    work = SpanWork(full, variant="f")

    def plan(situation: Situation) -> Plan | None:
        if full not in feasible(table, situation.budget):
            return None
        return Plan(work, time_share(table, [full], situation.budget))

    return Strategy(plan, Mean("everyone"), only_able=True)


@declares(
    StrategyFacts(
        label="FedAvg without limits",
        citation=CITATION,
        role=UPPER_BOUND,
        in_paper=True,
        colour="#009E73",
        order=2,
    )
)
def fedavg_full(
    tables: Tables, *, train: str = WHOLE, rank: int = RANK, alpha: float = ALPHA
) -> Strategy:
    """All devices train everything, whatever their budgets say: an upper bound, not a rival."""
    check_learning(train, rank, alpha)
    everything = Plan(SpanWork(tables.everything, variant="f"), 1.0)
    return Strategy(lambda _situation: everything, Mean("everyone"))


@declares(
    StrategyFacts(
        label="centralized training",
        role=UPPER_BOUND,
        in_paper=True,
        uploads="",
        all_data_in_one_place=True,
        colour="#6B7280",
        order=1,
    )
)
def centralized(
    tables: Tables, *, train: str = WHOLE, rank: int = RANK, alpha: float = ALPHA
) -> Strategy:
    """Ordinary training on all data: an epoch stands for ten rounds, as in the paper."""
    return fedavg_full(tables, train=train, rank=rank, alpha=alpha)
