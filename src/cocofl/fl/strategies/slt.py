"""Successive layer training (Pfeiffer et al., NeurIPS 2023): block by block, before a narrow head.

"Aggregating Capacity in FL through Successive Layer Training for Computationally-Constrained
Devices". One block after the other is trained at full width, with all blocks behind it, the head,
at a width that leaves it room. Then it is frozen, and the next one grows to its full width. In the
end all of the network is trained, and no device ever trained more than it could.

The head has the leading channels. That the other channels keep quiet until their block grows is
seen to in the beginning: the weights by which leading channels read others are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cocofl.checks import check_number
from cocofl.errors import InvalidModel, InvalidSetting
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import fits
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.strategies.base import Plan, Strategy, Tables, share_of_deadline
from cocofl.fl.strategies.facts import SLICES, SPANS, StrategyFacts, declares
from cocofl.fl.trainer import Task, Trainer
from cocofl.freeze import freeze
from cocofl.models.widths import Place
from cocofl.span import Blocks, Span

VARIANT = "f"


@dataclass(frozen=True)
class GrowingWork:
    """Train blocks ``first:stop``: the first of them whole, those behind it at ``width``."""

    first: int
    stop: int
    width: float

    @property
    def blocks(self) -> Blocks:
        """What it trains."""
        return Span(self.first, self.stop)

    def __str__(self) -> str:
        return str(self.blocks)

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends the leading channels of the head."""
        rows = self._rows(trainer)
        start = dict(state.tensors)
        for key, kept in rows.items():
            start[key] = torch.zeros_like(start[key])
            start[key][kept] = state.tensors[key][kept]
        chain = trainer.chain()
        net = freeze(chain, self.blocks, variant=VARIANT, state=start, state_is_checked=True)
        net.train()
        named = {k: p for b in net.trained for k, p in b.named_parameters() if p.requires_grad}
        absent = {key: _others(len(named[key]), at) for key, at in rows.items() if key in named}
        unread = {key: rest for key, rest in self._unread(trainer).items() if key in named}

        def silence() -> None:  # what is 0 and gets no gradient stays 0
            for key, rest in absent.items():
                if (gradient := named[key].grad) is not None:
                    gradient[rest] = 0.0
            for key, rest in unread.items():
                if (gradient := named[key].grad) is not None:
                    gradient[:, rest] = 0.0

        losses = (trainer.loss(net(inputs), labels) for inputs, labels in trainer.load(task))
        loss = trainer.training.descend(named.values(), losses, task.lr, silence)
        sent = net.update().tensors
        counted = {key: kept.numpy() for key, kept in rows.items() if key in sent}
        for key in counted:  # a codec is not to see what is absent as a change
            whole = state.tensors[key].clone()
            whole[rows[key]] = sent[key][rows[key]]
            sent[key] = whole
        size = self._sent_bytes(trainer, sent)
        return Contribution(sent, len(task.indices), loss, rows=counted, sent_bytes=size)

    def _rows(self, trainer: Trainer) -> dict[str, Tensor]:
        """By key of the head, the channels that it has."""
        places = {} if self.width == 1.0 else trainer.places(self.width)
        head = trainer.chain().blocks[self.first + 1 : self.stop]
        keys = (key for block in head for key in block.state_dict())
        return {key: indices(place[0]) for key in keys if (place := places.get(key, ()))}

    def _unread(self, trainer: Trainer) -> dict[str, Tensor]:
        """By key of the head, but for its first block, the channels that it does not read.

        They are not always silent: a shortcut hands on all channels of the last whole block.
        """
        places = {} if self.width == 1.0 else trainer.places(self.width)
        blocks = (
            block.state_dict() for block in trainer.chain().blocks[self.first + 2 : self.stop]
        )
        tensors = {key: t for block in blocks for key, t in block.items() if t.ndim > 1}
        return {
            k: _others(t.shape[1], indices(places[k][1])) for k, t in tensors.items() if k in places
        }

    def _sent_bytes(self, trainer: Trainer, sent: Mapping[str, Tensor]) -> int:
        """Of the head the narrow network's tensors; its first block may read all channels."""
        narrow = trainer.model(self.width).state_dict()
        whole = {k for b in trainer.chain().blocks[: self.first + 1] for k in b.state_dict()}
        at_border = set(trainer.chain().blocks[min(self.first + 1, self.stop - 1)].state_dict())
        total = 0
        for key, tensor in sent.items():
            if key in whole or tensor.ndim == 0:
                total += tensor.nbytes
            elif key in at_border:
                total += tensor[: len(narrow[key])].nbytes
            else:
                total += narrow[key].nbytes
        return total


def indices(axis: slice | Tensor) -> Tensor:
    """The numbers that an axis of a place picks."""
    return torch.arange(axis.start, axis.stop) if isinstance(axis, slice) else axis.flatten()


def _others(count: int, kept: Tensor) -> Tensor:
    """Of so many channels, whether each is none of those that are kept."""
    rest = torch.ones(count, dtype=torch.bool)
    rest[kept] = False
    return rest


def quiet(trainer: Trainer, tensors: Mapping[str, Tensor], widths: Iterable[float]) -> Tensors:
    """A state in which the leading channels of each width read nothing of the others.

    So the whole network computes what the narrow one does, and others wait at their random weights.
    """
    for module in trainer.model().modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.modules.conv._ConvTransposeNd):
            raise InvalidModel(
                f"{trainer.spec.subject.model} has a {type(module).__name__}, which mixes channels "
                "that wait with those that learn; successive layer training needs a network "
                "without"
            )
    found = dict(tensors)
    for width in widths:
        for key, place in trainer.places(width).items():
            if key in found and found[key].ndim > 1:
                found[key] = _without_foreign_inputs(found[key], place)
    return found


def _without_foreign_inputs(tensor: Tensor, place: Place) -> Tensor:
    read = ~_others(tensor.shape[1], indices(place[1]))
    rows = indices(place[0])
    result = tensor.clone()
    result[rows] = tensor[rows] * read.reshape(1, -1, *[1] * (tensor.ndim - 2)).to(tensor.dtype)
    return result


@declares(
    StrategyFacts(
        label="SLT",
        citation="Pfeiffer et al., NeurIPS 2023",
        tables=SPANS,
        variant=VARIANT,
        uploads=SLICES,
        colour="#2166AC",
        order=24,
    )
)
def slt(tables: Tables, *, each: int = 5) -> Strategy:
    """All devices train the same; each block grows for ``each`` rounds.

    A stage's head has the widest width that fits every device which can train something of the
    stage. The first stage that fits all of them at full width is the last, and goes on.
    """
    check_number("strategy.each", each, least=1)
    if tables.is_text:
        raise InvalidSetting(
            "successive layer training narrows the last blocks of a network, and those of a "
            "Transformer share their width with the first; take another strategy"
        )
    by_width = tables.narrow_ends(VARIANT)
    whole = by_width[1.0]
    budgets = [whole.limits(budget) for budget in tables.least_budgets()]
    stages: list[tuple[int, float]] = []
    for first in range(tables.n_blocks):
        costs = {width: one.row(Span(first, tables.n_blocks)) for width, one in by_width.items()}
        fitting = [[w for w, cost in costs.items() if fits(cost, limits)] for limits in budgets]
        able = [max(some) for some in fitting if some]
        stages.append((first, min(able, default=1.0 if not budgets else min(by_width))))
        if stages[-1][1] == 1.0:
            break

    def plan(situation: Situation) -> Plan | None:
        first, width = stages[min(situation.round_index // each, len(stages) - 1)]
        cost = by_width[width].row(Span(first, tables.n_blocks))
        limits = whole.limits(situation.budget)
        if not fits(cost, limits):
            return None
        time = share_of_deadline(cost[0], limits[0])
        return Plan(GrowingWork(first, tables.n_blocks, width), time)

    used = sorted({width for _, width in stages if width < 1.0})
    return Strategy(
        plan,
        Mean("senders"),
        only_able=True,
        begin=lambda trainer, tensors: quiet(trainer, tensors, used),
    )
