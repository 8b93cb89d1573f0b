"""FedAvg (McMahan et al., 2017) among the strong, among all, and with all data in one place."""

from __future__ import annotations

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.span import Span


def fedavg(tables: Tables) -> Strategy:
    """Asks only devices that can train everything in time; the data of the others is lost."""
    table, full = tables.spans(), Span(0, tables.n_blocks)
    work = SpanWork(full, variant="f")

    def plan(situation: Situation) -> Plan | None:
        if full not in feasible(table, situation.budget):
            return None
        return Plan(work, time_share(table, [full], situation.budget))

    return Strategy(plan, Mean("everyone"), only_able=True)


def fedavg_full(tables: Tables) -> Strategy:
    """All devices train everything, whatever their budgets say: an upper bound, not a rival."""
    work = SpanWork(Span(0, tables.n_blocks), variant="f")

    def plan(_situation: Situation) -> Plan | None:
        return Plan(work, 1.0)

    return Strategy(plan, Mean("everyone"))


def centralized(tables: Tables) -> Strategy:
    """Ordinary training on all data: an epoch stands for ten rounds, as in the paper."""
    work = SpanWork(Span(0, tables.n_blocks), variant="f")

    def plan(_situation: Situation) -> Plan | None:
        return Plan(work, 1.0)

    return Strategy(plan, Mean("everyone"), central=True)
