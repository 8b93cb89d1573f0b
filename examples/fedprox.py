"""FedProx (Li et al., MLSys 2020): local training that is pulled back to the server's model.

cocofl run --set strategy.name=fedprox:fedprox --set strategy.mu=0.1

The rule works element by element, so it runs in a process, in a cohort on a GPU and on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cocofl.strategies import (
    LocalRule,
    LocalStep,
    Mean,
    Plan,
    Situation,
    Span,
    SpanWork,
    Strategy,
    Tables,
)


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds the gradient of ``mu / 2 · ‖w − w_server‖²``."""

    mu: float

    def correct(self, step: LocalStep) -> Tensor:
        """The gradient of the loss with the proximal term."""
        return step.gradient + self.mu * (step.parameter - step.start)


def fedprox(tables: Tables, *, mu: float = 0.1) -> Strategy:
    """All devices train everything."""
    work = SpanWork(Span(0, tables.n_blocks), variant="f", rule=Proximal(mu))

    def plan(_situation: Situation) -> Plan:
        return Plan(work, time=1.0)

    return Strategy(plan, Mean())
