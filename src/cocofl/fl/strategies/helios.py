"""Helios (Xu et al., DAC 2021): a straggler trains a part of the neurons, others in every round.

"Helios: Heterogeneity-Aware Federated Learning with Dynamically Balanced Collaboration". Of every
layer a slow device trains as many neurons as it has time for (soft-training): those that moved
most when it last trained them, those that have waited too long, and others by chance. The less of
the network a device trained, the less its update weighs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from cocofl.checks import check_number
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.stacked import NotStacked, StackedNetworks, StackedWork
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.strategies.base import Plan, Strategy, Tables
from cocofl.fl.strategies.facts import SLICES, WIDTHS, StrategyFacts, declares
from cocofl.fl.strategies.widths import heterofl
from cocofl.fl.trainer import Task, Trainer, parameter_keys
from cocofl.fl.widths import WidthWork
from cocofl.models.widths import places

MOVED, WAITED = "moved", "waited"
"""What a device remembers of each neuron: how far its weights went, and the rounds since then."""


@dataclass(frozen=True)
class SoftWork:
    """Train a share ``width`` of the neurons of every layer; a share ``top`` of these are the best.

    Layers with equally many neurons train the same ones, as those must that are added up.
    """

    width: float
    top: float

    def __str__(self) -> str:
        return f"{self.width:g}"

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; the neurons that it leaves out stay as the server has them.

        What is sent is the narrow network; norms go by the batch, and nothing is tracked.
        """
        full, narrow = trainer.model(), trainer.model(self.width)
        rng, sizes = task.rng("neurons"), self._sizes(trainer)

        @cache
        def order(n: int) -> Tensor:
            memory = {name: _known(task, name, n) for name in (MOVED, WAITED)}
            return self.ranked(rng.permutation(n), memory[MOVED], memory[WAITED])

        at = places(full, narrow, order=order)
        start = {key: state.tensors[key] for key in parameter_keys(full) if key in state.tensors}
        net = trainer.whole_network({key: t[at[key]] for key, t in start.items()}, self.width)
        losses = (trainer.loss(net(inputs), labels) for inputs, labels in trainer.load(task))
        loss = trainer.training.descend(net.train().parameters(), losses, task.lr)
        learned, sent = net.update().tensors, {key: t.clone() for key, t in start.items()}
        for key, tensor in sent.items():
            tensor[at[key]] = learned[key]
        kept = {n: order(n)[:trained] for n, trained in sizes.items()}
        # Its weight in the mean is its share of the neurons, beside its samples.
        samples = max(1, round(self.width * len(task.indices)))
        size = sum(learned[key].nbytes for key in sent)
        memory = self._remembered(task, start, sent, kept)
        return Contribution(sent, samples, loss, memory=memory, sent_bytes=size)

    def ranked(self, by_chance: np.ndarray, moved: Tensor, waited: Tensor) -> Tensor:
        """All neurons of a layer, those first that are to be trained.

        First who waited longer than all need to have had their turn, then the best, then others.

        >>> work = SoftWork(0.5, top=0.5)
        >>> moved, waited = torch.tensor([1.0, 9.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 2.0, 4.0])
        >>> work.ranked(np.array([2, 0, 1, 3]), moved, waited)
        tensor([3, 1, 2, 0])
        """
        chance = torch.from_numpy(by_chance)
        late = chance[waited[chance].argsort(descending=True, stable=True)]
        best = chance[moved[chance].argsort(descending=True, stable=True)]
        overdue = late[waited[late] > 1 + 1 / self.width]
        count = round(self.top * self.width * len(chance))
        first = torch.cat([overdue, best[:count], chance]).tolist()
        return torch.tensor(list(dict.fromkeys(first)))

    def _sizes(self, trainer: Trainer) -> dict[int, int]:
        """By number of neurons of a layer, how many of them are trained."""
        narrow, full = trainer.model(self.width).state_dict(), trainer.model().state_dict()
        sizes = ((len(t), len(narrow[key])) for key, t in full.items() if t.ndim > 1)
        return {n: fewer for n, fewer in sizes if fewer < n}

    def _remembered(
        self, task: Task, start: Tensors, sent: Tensors, kept: dict[int, Tensor]
    ) -> dict[str, Tensors]:
        found: dict[str, Tensors] = {MOVED: {}, WAITED: {}}
        for n, trained in kept.items():
            layers = [key for key, t in sent.items() if t.ndim > 1 and len(t) == n]
            ways = torch.stack([(sent[k] - start[k]).abs().flatten(1).sum(1) for k in layers])
            moved, waited = _known(task, MOVED, n), _known(task, WAITED, n) + 1
            moved[trained], waited[trained] = ways.sum(0)[trained].float(), 0.0
            found[MOVED][_name(n)], found[WAITED][_name(n)] = moved, waited
        return {name: {**task.memory.get(name, {}), **own} for name, own in found.items()}

    def stacked(self, networks: StackedNetworks, task: Task) -> StackedWork:
        """Not at once: every device has neurons of its own."""
        del networks, task
        raise NotStacked("every device trains other neurons")


def _name(n: int) -> str:
    return f"neurons.{n}"


def _known(task: Task, what: str, n: int) -> Tensor:
    """What a device remembers of layers with so many neurons; zeros in the beginning."""
    kept = task.memory.get(what, {}).get(_name(n))
    return torch.zeros(n) if kept is None or kept.shape != (n,) else kept.cpu().clone()


@declares(
    StrategyFacts(
        label="Helios",
        citation="Xu et al., DAC 2021",
        tables=WIDTHS,
        uploads=SLICES,
        colour="#A6761D",
        order=44,
    )
)
def helios(tables: Tables, *, top: float = 0.1) -> Strategy:
    """A device trains as many neurons as fit, of which a share ``top`` are those that moved most.

    The mean is over everyone: a neuron that a device did not train votes for its present weights.
    """
    check_number("strategy.top", top, least=0, most=1)
    tables.check_rolls()
    by_width = heterofl(tables)

    def plan(situation: Situation) -> Plan | None:
        found = by_width.plan(situation)
        if found is None:
            return None
        assert isinstance(found.work, WidthWork)
        return Plan(SoftWork(found.work.width, top), found.time)

    return Strategy(plan, Mean("everyone"), tracks_statistics=False)
