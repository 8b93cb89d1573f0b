"""Adaptive parameter freezing (Chen et al., ICDCS 2021): what has become stable is not sent.

"Communication-Efficient Federated Learning with Adaptive Parameter Freezing". A parameter that
moves to and fro without getting anywhere is frozen for some rounds: devices keep it where it is,
and nobody sends it. When it thaws and is still stable it is frozen for longer, else for half as
long (additive increase, multiplicative decrease).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cocofl.checks import check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import ServerOptimizer
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.state import Tensors
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import FULL_TRAINING, SLICES, StrategyFacts, declares
from cocofl.local_rule import LocalRule, LocalStep
from cocofl.span import Span


@dataclass(frozen=True)
class KeepFrozen(LocalRule):
    """Devices leave alone what the server has frozen."""

    server_memory: ClassVar = ("frozen",)

    def correct(self, step: LocalStep) -> Tensor:
        """As it is."""
        return step.gradient

    def stays(self, start: LocalStep) -> Tensor:
        """What is frozen in this round."""
        return start.server["frozen"] > 0


@dataclass(frozen=True)
class FreezeStable(ServerOptimizer):
    """FedAvg that remembers, of each parameter, how far it gets by its moves.

    ``mean`` and ``size`` are moving averages of its moves and of their sizes, whose ratio is the
    effective perturbation; ``moved`` what it moved since the last check; ``period`` for how many
    rounds it is frozen when it is stable, ``thaw`` the round before which it does not move, and
    ``frozen`` whether the next round is before that.
    """

    threshold: float
    memory_share: float
    every: int
    remembers: ClassVar = ("mean", "size", "moved", "period", "thaw", "frozen")
    follows_another: ClassVar = True

    def move(self, old: Tensor, agreed: Tensor, memory: Tensors, round_index: int) -> Tensor:
        """What was agreed on, but for what is frozen."""
        was_frozen = memory["frozen"] > 0
        new, next_round = torch.where(was_frozen, old, agreed), round_index + 1
        memory["moved"] = memory["moved"] + (new - old)
        if next_round % self.every == 0:
            self._check(memory, was_frozen, next_round)
        memory["frozen"] = (memory["thaw"] > next_round).to(old.dtype)
        return new

    def _check(self, memory: Tensors, was_frozen: Tensor, next_round: int) -> None:
        """Freeze what is stable, of all that could move."""
        keep, moved = self.memory_share, memory["moved"]
        mean = keep * memory["mean"] + (1 - keep) * moved
        size = keep * memory["size"] + (1 - keep) * moved.abs()
        # What has never moved may not have been reached by a gradient yet.
        stable = (mean.abs() <= self.threshold * size) & (size > 0)
        period = memory["period"]
        period = torch.where(stable, period + self.every, (period / 2).floor())
        found = {"mean": mean, "size": size, "period": period, "thaw": next_round + period}
        for name, value in found.items():
            memory[name] = torch.where(was_frozen, memory[name], value)
        memory["moved"] = torch.zeros_like(moved)


@declares(
    StrategyFacts(
        label="APF",
        citation="Chen et al., ICDCS 2021",
        tables=FULL_TRAINING,
        uploads=SLICES,
        colour="#C51B7D",
        order=27,
    )
)
def apf(tables: Tables, *, threshold: float = 0.05, ema: float = 0.9, every: int = 1) -> Strategy:
    """FedAvg of those who can train everything, with what is stable frozen and not sent.

    A parameter is stable when its effective perturbation is at most ``threshold``; that is looked
    at ``every`` so many rounds and averaged with the share ``ema`` of what was before. When
    devices plan they do not know yet what is frozen: the whole upload must fit.
    """
    check_number("strategy.threshold", threshold, least=0, most=1)
    check_number("strategy.ema", ema, least=0, below=1)
    check_number("strategy.every", every, least=1)
    table, full = tables.spans(), Span(0, tables.n_blocks)
    work = SpanWork(full, "f", KeepFrozen())

    def plan(situation: Situation) -> Plan | None:
        if full not in feasible(table, situation.budget):
            return None
        return Plan(work, time_share(table, [full], situation.budget))

    return Strategy(plan, FreezeStable(threshold, ema, every), only_able=True)
