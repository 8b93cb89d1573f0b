"""InclusiveFL (Liu et al., KDD 2022): shallower networks for weak devices, with ends of their own.

"No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices". A device trains the
most first blocks that fit it, and one classifier behind them. Blocks are shared by all who have
them, but the last block and the classifier of a shallower network are its own: they have another
task than the same block of a deeper one. From that they learn by *momentum distillation*: the
server moves them also as it moves the blocks of the deeper network from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cocofl.checks import check_number
from cocofl.fl.exit_scores import exit_key
from cocofl.fl.exits import DepthWork
from cocofl.fl.merge import Accumulator, Mean, Merge
from cocofl.fl.rules import Rules
from cocofl.fl.state import Contribution, ServerState, kind_of
from cocofl.fl.strategies.base import Strategy, Tables
from cocofl.fl.strategies.depthfl import VARIANT, by_depth
from cocofl.fl.strategies.facts import SLICES, SPANS, StrategyFacts, declares
from cocofl.fl.trainer import Task, Trainer
from cocofl.span import Blocks, Span

ENDS = "ends"
"""What is a shallower network's own: ``ends.3.KEY`` is KEY of that of three blocks."""


@dataclass(frozen=True)
class ShallowWork:
    """Train the first ``depth`` blocks, with a classifier behind the last of them."""

    depth: int

    @property
    def blocks(self) -> Blocks:
        """What it trains."""
        return Span(0, self.depth)

    def __str__(self) -> str:
        return str(self.blocks)

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends its blocks, and its end under names of its own."""
        work, chain = DepthWork((self.depth,), distillation=0.0), trainer.chain()
        if self.depth == len(chain):
            return work.train(trainer, task, state)
        prefix, known = f"{ENDS}.{self.depth}.", state.tensors
        own = {key.removeprefix(prefix): t for key, t in known.items() if key.startswith(prefix)}
        sent = work.train(trainer, task, ServerState({**known, **own}))
        last = {*chain.blocks[self.depth - 1].state_dict(), *_classifier(self.depth)}
        named = {prefix * (key in last) + key: t for key, t in sent.tensors.items()}
        return replace(sent, tensors=named)


def _classifier(depth: int) -> tuple[str, str]:
    return f"{exit_key(depth)}.weight", f"{exit_key(depth)}.bias"


@dataclass(frozen=True)
class MomentumDistillation(Merge):
    """The mean over those who have a block; ends move also as the blocks of deeper networks do.

    Of an end's move a share ``momentum`` is the mean move of all blocks of the whole network from
    there on that have the same tensors.
    """

    momentum: float
    mean: Merge = field(default_factory=lambda: Mean("senders"))

    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        """A round begins."""
        return _ThenEnds(self, state, self.mean.begin(state, round_index))

    def with_rules(self, rules: Rules) -> Merge:
        """The same with a mean by rules."""
        return replace(self, mean=self.mean.with_rules(rules))


class _ThenEnds:
    def __init__(self, by: MomentumDistillation, old: ServerState, mean: Accumulator) -> None:
        self._by, self._old, self._mean = by, old, mean
        self._sent: dict[str, None] = {}

    def add(self, contribution: Contribution) -> None:
        ends = (key for key in contribution.tensors if key.startswith(f"{ENDS}."))
        self._sent |= dict.fromkeys(ends)
        self._mean.add(contribution)

    def finish(self) -> ServerState:
        merged, before = self._mean.finish(), self._old.tensors
        after, parts, share = merged.tensors, dict(merged.parts), self._by.momentum
        for name in self._sent:
            depth, key = name.removeprefix(f"{ENDS}.").split(".", 1)
            alike = list(keys_alike(key, int(depth) - 1, before, merged.layout.block_of))
            if share and alike:
                start = before.get(name, before[key])
                ways = torch.stack([after[one] - before[one] for one in alike]).mean(0)
                moved = start + (1 - share) * (after[name] - start) + share * ways
                parts[name] = moved.to(parts[name].device)
        return replace(merged, parts=parts)


def keys_alike(
    key: str, block: int, tensors: Mapping[str, Tensor], block_of: Mapping[str, int]
) -> Iterator[str]:
    """From a block on, the parameters that are in the place of ``key`` of that block.

    Of blocks whose tensors have the same names, but for their beginning, and the same shapes.

    >>> blocks = {"a.0.w": 0, "a.1.w": 1, "a.2.w": 2, "head.w": 3}
    >>> sizes = {"a.0.w": 4, "a.1.w": 4, "a.2.w": 4, "head.w": 2}
    >>> state = {name: torch.zeros(size) for name, size in sizes.items()}
    >>> list(keys_alike("a.1.w", 1, state, blocks))
    ['a.1.w', 'a.2.w']
    """
    if block_of.get(key) != block or kind_of(key) != "values" or key.endswith("running_mean"):
        return  # a classifier of its own, or a statistic
    by_block: dict[int, list[str]] = {}
    for name, index in block_of.items():
        if index >= block and name in tensors:
            by_block.setdefault(index, []).append(name)
    wanted = [(name.rpartition(".")[2], tensors[name].shape) for name in by_block[block]]
    place = by_block[block].index(key)
    for names in by_block.values():
        if [(name.rpartition(".")[2], tensors[name].shape) for name in names] == wanted:
            yield names[place]


@declares(
    StrategyFacts(
        label="InclusiveFL",
        citation="Liu et al., KDD 2022",
        tables=SPANS,
        variant=VARIANT,
        uploads=SLICES,
        colour="#9E0142",
        order=29,
    )
)
def inclusivefl(tables: Tables, *, stages: int = 4, momentum: float = 0.2) -> Strategy:
    """A device trains all ``stages`` that fit; ``momentum`` is what ends learn from blocks behind.

    The server tests the whole network, which devices train that have all stages.
    """
    check_number("strategy.momentum", momentum, least=0, most=1)
    plan = by_depth(tables, stages, lambda trained, _round: ShallowWork(trained[-1]))
    return Strategy(plan, MomentumDistillation(momentum), only_able=True)
