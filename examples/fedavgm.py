"""FedAvgM (Hsu et al., 2019): the server remembers in which direction its model moved.

cocofl run --set strategy.name=fedavgm:fedavgm --set strategy.beta=0.9
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from cocofl.strategies import STRATEGIES, ServerOptimizer, Strategy, Tables, Tensors


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """The mean change of a round is added to ``beta`` times what was done before."""

    beta: float
    remembers: ClassVar = ("velocity",)

    def move(self, old: Tensor, agreed: Tensor, memory: Tensors, _round: int) -> Tensor:
        """The next value of one tensor of parameters."""
        memory["velocity"] = self.beta * memory["velocity"] + (agreed - old)
        return old + memory["velocity"]


def fedavgm(tables: Tables, *, beta: float = 0.9) -> Strategy:
    """FedAvg over all devices, with momentum on the server."""
    return replace(STRATEGIES["fedavg-full"](tables), merge=Momentum(beta))
