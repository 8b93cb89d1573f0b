"""FedAvg (McMahan et al., 2017) among the strong, among all, and with all data in one place."""

from __future__ import annotations

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import FULL_TRAINING, UPPER_BOUND, StrategyFacts, declares
from cocofl.span import Span

CITATION = "McMahan et al., AISTATS 2017"


@declares(
    StrategyFacts(
        label="FedAvg", citation=CITATION, tables=FULL_TRAINING, colour="#E69F00", order=6
    )
)
def fedavg(tables: Tables) -> Strategy:
    """Asks only devices that can train everything in time; the data of the others is lost."""
    table, full = tables.spans(), Span(0, tables.n_blocks)
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
        colour="#009E73",
        order=2,
    )
)
def fedavg_full(tables: Tables) -> Strategy:
    """All devices train everything, whatever their budgets say: an upper bound, not a rival."""
    everything = Plan(SpanWork(Span(0, tables.n_blocks), variant="f"), 1.0)
    return Strategy(lambda _situation: everything, Mean("everyone"))


@declares(
    StrategyFacts(
        label="centralized training",
        role=UPPER_BOUND,
        uploads="",
        all_data_in_one_place=True,
        colour="#6B7280",
        order=1,
    )
)
def centralized(tables: Tables) -> Strategy:
    """Ordinary training on all data: an epoch stands for ten rounds, as in the paper."""
    return fedavg_full(tables)
