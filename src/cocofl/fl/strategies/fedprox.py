"""FedProx (Li et al., MLSys 2020): a device takes the steps it has time for, near the server.

Every device trains the whole network. One that is too slow for all of its mini-batches stops when
its time is over, and what it has learned until then counts. A proximal term keeps devices that
take many steps from running away from those that take few.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cocofl.checks import check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import (
    Plan,
    Strategy,
    Tables,
    steps_in_time,
    time_share,
    without_deadline,
)
from cocofl.fl.strategies.facts import FULL_TRAINING, StrategyFacts, declares
from cocofl.local_rule import LocalRule, LocalStep
from cocofl.span import Span


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds the gradient of ``mu / 2 · ‖w − w_server‖²``."""

    mu: float

    def correct(self, step: LocalStep) -> Tensor:
        """The gradient of the loss with the proximal term."""
        return step.gradient + self.mu * (step.parameter - step.start)


@declares(
    StrategyFacts(
        label="FedProx",
        citation="Li et al., MLSys 2020",
        tables=FULL_TRAINING,
        colour="#8C510A",
        order=20,
    )
)
def fedprox(tables: Tables, *, mu: float = 0.1) -> Strategy:
    """Full training for as many mini-batches as fit; ``mu`` weighs the proximal term.

    Memory and upload cannot be had in parts: a device that lacks them is not asked, nor one that
    has no time for a single mini-batch. Updates count by the samples that devices have, whatever
    part of them they have seen.
    """
    check_number("strategy.mu", mu, least=0)
    table, full = tables.spans(), Span(0, tables.n_blocks)

    def plan(situation: Situation) -> Plan | None:
        fits = full in feasible(table, without_deadline(situation.budget))
        steps = steps_in_time(table, full, situation)
        if not fits or not steps:
            return None
        time = time_share(table, [full], situation.budget) * steps / situation.steps
        return Plan(SpanWork(full, "f", Proximal(mu), steps=steps), time)

    return Strategy(plan, Mean("everyone"), only_able=True)
