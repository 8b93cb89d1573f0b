"""LayerOut (Goutam et al., 2020): in every mini-batch, blocks are frozen at random.

"LayerOut: Freezing Layers in Deep Neural Networks". A frozen block runs forward, and its parameters
get no gradient in that mini-batch. So steps are cheaper on average, and every block learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import SLACK, feasible
from cocofl.fl.state import Contribution, ServerState
from cocofl.fl.strategies.base import Plan, Strategy, Tables, share_of_deadline, without_deadline
from cocofl.fl.strategies.facts import SPANS, StrategyFacts, declares
from cocofl.fl.trainer import Task, Trainer, norms_of
from cocofl.freeze import FrozenNet
from cocofl.profiling.block_costs import BlockCosts
from cocofl.span import Blocks, Span

VARIANT = "f"
SHARES = tuple(round(0.05 * step, 2) for step in range(1, 21))


@dataclass(frozen=True)
class LayerOutWork:
    """Train ``blocks``, in each mini-batch those that a coin with the chance ``share`` picks."""

    blocks: Blocks
    share: float

    def __str__(self) -> str:
        return str(self.blocks)

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends everything."""
        net = trainer.whole_network(state.tensors).train()
        losses = self._losses(net, trainer, task)
        loss = trainer.training.descend(list(net.parameters()), losses, task.lr)
        return Contribution(net.update().tensors, len(task.indices), loss)

    def _losses(self, net: FrozenNet, trainer: Trainer, task: Task) -> Iterator[Tensor]:
        momenta = {norm: norm.momentum for norm in norms_of(net)}
        for (inputs, labels), drawn in zip(trainer.load(task), self.drawn(task), strict=False):
            for block, learns in zip(net.trained, drawn, strict=True):
                block.requires_grad_(bool(learns))
                for norm in norms_of(block):
                    norm.momentum = momenta[norm] if learns else 0.0  # its statistics stay
            yield trainer.loss(net(inputs), labels)

    def drawn(self, task: Task) -> Iterator[np.ndarray]:
        """By block, whether it learns in each mini-batch; one does in any."""
        rng = task.rng("layers")
        while True:
            learns = rng.random(len(self.blocks)) < self.share
            if learns.any():
                yield learns


@declares(
    StrategyFacts(
        label="LayerOut",
        citation="Goutam et al., SN Computer Science 2020",
        tables=SPANS,
        variant=VARIANT,
        colour="#35978F",
        order=26,
    )
)
def layerout(tables: Tables) -> Strategy:
    """A device trains the largest share of blocks per mini-batch whose expected time it has.

    It saves time and nothing else: now and then all blocks learn in one mini-batch, and in the end
    all have moved, so memory and upload must do for full training.
    """
    costs, full = BlockCosts(tables.spans(VARIANT)), Span(0, tables.n_blocks)
    times = {share: costs.expected_time(share) for share in SHARES}

    def plan(situation: Situation) -> Plan | None:
        limit = costs.table.limits(situation.budget)[0]
        shares = [share for share, time in times.items() if time <= limit * (1 + SLACK)]
        if not shares or full not in feasible(costs.table, without_deadline(situation.budget)):
            return None
        return Plan(LayerOutWork(full, shares[-1]), share_of_deadline(times[shares[-1]], limit))

    return Strategy(plan, Mean("everyone"), only_able=True)
