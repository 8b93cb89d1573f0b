"""DISTREAL (Rapp et al., AAAI 2022): filters are dropped at random in every mini-batch.

A device trains the whole network, a random part of its filters at a time: the more are dropped,
the faster is the step. So a device with little time learns something of every filter in every
round, and sends all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible_widths
from cocofl.fl.stacked import NotStacked, StackedNetworks, StackedWork
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share
from cocofl.fl.strategies.facts import SLICES, WIDTHS, StrategyFacts, declares
from cocofl.fl.strategies.widths import TEXT_WIDTHS
from cocofl.fl.trainer import Task, Trainer, parameter_keys
from cocofl.fl.widths import narrow_scores, own_statistics
from cocofl.models.widths import Place, places
from cocofl.profiling.table import ProfileTable


@dataclass(frozen=True)
class DroppingWork:
    """Each mini-batch trains a random share ``width`` of the filters of every layer.

    Norms go by the batch, and nothing is tracked: what they see depends on what is dropped.
    """

    width: float

    def __str__(self) -> str:
        return f"{self.width:g}"

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends all parameters."""
        full = trainer.model()
        parameters = {k: nn.Parameter(state.tensors[k].clone()) for k, _ in full.named_parameters()}
        losses = self._losses(trainer, task, parameters)
        loss = trainer.training.descend(parameters.values(), losses, task.lr)
        keys = parameter_keys(full).items()
        sent = {key: parameters[first].detach() for key, first in keys if key in state.tensors}
        return Contribution(sent, len(task.indices), loss)

    def _losses(
        self, trainer: Trainer, task: Task, parameters: dict[str, nn.Parameter]
    ) -> Iterator[Tensor]:
        rng = task.rng("dropped filters")
        for inputs, labels in trainer.load(task):
            kept = self.kept(trainer, rng)
            narrow: Tensors = {key: p[kept[key]] for key, p in parameters.items()}
            narrow |= own_statistics(trainer.model(self.width), {}, self.width)
            yield trainer.loss(narrow_scores(trainer, self.width, narrow, inputs), labels)

    def kept(self, trainer: Trainer, rng: np.random.Generator) -> dict[str, Place]:
        """Where the filters lie that a mini-batch keeps, anew for every one."""
        orders: dict[int, Tensor] = {}

        def shuffled(channels: int) -> Tensor:
            if channels not in orders:
                orders[channels] = torch.from_numpy(rng.permutation(channels))
            return orders[channels]

        return places(trainer.model(), trainer.model(self.width), order=shuffled)

    def stacked(self, networks: StackedNetworks, task: Task) -> StackedWork:
        """Not at once: every mini-batch of every device has filters of its own."""
        del networks, task
        raise NotStacked("every mini-batch keeps other filters")


@declares(
    StrategyFacts(
        label="DISTREAL",
        citation="Rapp et al., AAAI 2022",
        tables=WIDTHS,
        uploads=SLICES,  # of a block without its norm statistics
        colour="#7570B3",
        order=43,
    )
)
def distreal(tables: Tables) -> Strategy:
    """A device keeps as many filters of every layer as its time allows; it sends all.

    Who cannot hold or send the whole network is not asked.
    """
    tables.check_rolls()
    table = keeping_everything(tables.widths())

    def plan(situation: Situation) -> Plan | None:
        widths = feasible_widths(table, situation.budget)
        if tables.is_text:
            widths = [width for width in widths if width in TEXT_WIDTHS]
        if not widths:
            return None
        time = time_share(table, [widths[-1]], situation.budget)
        return Plan(DroppingWork(widths[-1]), time)

    return Strategy(plan, Mean("everyone"), only_able=True, tracks_statistics=False)


def keeping_everything(table: ProfileTable) -> ProfileTable:
    """What widths cost where the device holds and sends the whole network.

    Time is the width's. To its peak of memory come the parameters that a step does not use; where
    the table does not know bytes, a device needs the memory of full training.
    """
    upload = table.row(1.0)[2]
    beside = np.ones_like(table.memory)
    if table.full_upload_bytes is not None and table.full_memory_bytes is not None:
        unused = (1 - table.upload / upload) * table.full_upload_bytes
        beside = table.memory + unused / table.full_memory_bytes
    return replace(table, memory=beside, upload=np.full_like(table.upload, upload))
