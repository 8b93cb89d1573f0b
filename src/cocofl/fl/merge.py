"""Merging what devices sent: one accumulator, for tensors by key and for rows on a GPU."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from cocofl.errors import InvalidExperiment
from cocofl.fl.changes import sent_pieces
from cocofl.fl.robust import MergedByRules
from cocofl.fl.rules import Rules
from cocofl.fl.state import Contribution, Part, ServerState, Tensors


class Accumulator(Protocol):
    """Takes in the contributions of a round one by one, and keeps none of them."""

    def add(self, contribution: Contribution) -> None:
        """Take in what a device sent."""

    def finish(self) -> ServerState:
        """The state after the round."""


class Merge(ABC):
    """How a server makes the next state of the last one and of what devices sent. A value."""

    moves_everything: ClassVar[bool] = False
    """Whether it also moves what nobody trained, as noise does that hides who came."""

    @abstractmethod
    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        """A round begins."""

    def with_rules(self, rules: Rules) -> Merge:
        """The same where what devices agree on is found by rules (``[merge]``)."""
        del rules
        raise InvalidExperiment(
            f"merge.rules cannot be used: {type(self).__name__}, by which the strategy merges, has "
            "no method `with_rules`. Add one, or say rules = [] in [merge] for the plain mean"
        )

    def __call__(
        self, state: ServerState, contributions: Iterable[Contribution], round_index: int = 0
    ) -> ServerState:
        """All of a round at once."""
        accumulator = self.begin(state, round_index)
        for contribution in contributions:
            accumulator.add(contribution)
        return accumulator.finish()


@dataclass(frozen=True)
class Mean(Merge):
    """The mean of what devices sent, weighted by their samples.

    ``over="everyone"``: a device that froze a tensor votes for its present value, so with equal
    samples this is the paper's Algorithm 2. ``over="senders"``: each element is averaged over the
    devices whose network has it, as HeteroFL and FjORD do. In both what was measured (scales) is
    averaged over those who measured it, and what nobody sent keeps its value.

    Sums are kept in float64, so the result hardly depends on the order of contributions, and for
    the same order it is the same to the bit.

    >>> old = ServerState({"a": torch.zeros(1), "b": torch.ones(1)})
    >>> sent = [Contribution({"a": torch.ones(1)}, 30), Contribution({}, 10)]
    >>> Mean("everyone")(old, sent).tensors
    {'a': tensor([0.7500]), 'b': tensor([1.])}
    >>> Mean("senders")(old, sent).tensors
    {'a': tensor([1.]), 'b': tensor([1.])}
    """

    over: Literal["everyone", "senders"] = "everyone"
    rules: Rules | None = None
    """By which devices agree; None for the plain mean."""

    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        """A round begins."""
        del round_index
        over_everyone = self.over == "everyone"
        if self.rules is not None:
            return MergedByRules(state, self.rules, over_everyone=over_everyone)
        return _MeanSoFar(state, over_everyone=over_everyone)

    def with_rules(self, rules: Rules) -> Mean:
        """The same by rules."""
        return replace(self, rules=rules)


class _MeanSoFar:
    def __init__(self, state: ServerState, *, over_everyone: bool) -> None:
        self._state, self._over_everyone = state, over_everyone
        self._samples = 0
        self._totals: Tensors = {}
        """Of changes where everyone votes, else of values."""
        self._weights: Tensors = {}
        """Of values, by element."""
        self._types: dict[str, torch.dtype] = {}

    def add(self, contribution: Contribution) -> None:
        self._samples += contribution.samples
        for part in self._state.layout.parts_of(contribution):
            self._add(part, float(contribution.samples))
        self._state = self._state.remembering(contribution)

    def _add(self, part: Part, samples: float) -> None:
        name, old = part.name, self._state.parts
        is_change = self._over_everyone and not part.measured
        if name not in self._totals:
            whole = part.values if part.place is None else old[name]
            self._types[name] = old[name].dtype if name in old else part.values.dtype
            self._totals[name] = torch.zeros_like(whole, dtype=torch.float64)
            if not is_change:
                self._weights[name] = torch.zeros_like(self._totals[name])
        place = ... if part.place is None else part.place
        voting = part.votes if is_change else self._of_trained_blocks(part)
        votes = samples if voting is None else voting * samples
        values = part.values.double()
        if is_change:
            self._totals[name][place] += (values - old[name][place].double()) * votes
        else:
            self._totals[name][place] += values * votes
            self._weights[name][place] += votes

    def _of_trained_blocks(self, part: Part) -> Tensor | None:
        """Whose votes count: a row has all blocks, and a device trained some of them."""
        sent = list(sent_pieces(self._state, part))
        if part.measured or len(sent) == len(self._state.layout.pieces(part.name)):
            return part.votes
        trained = torch.zeros_like(part.values, dtype=torch.float64)
        for piece in sent:
            trained[piece.where] = 1.0
        return trained if part.votes is None else trained * part.votes

    def finish(self) -> ServerState:
        old, merged = self._state.parts, dict(self._state.parts)
        for name, total in self._totals.items():
            if (weight := self._weights.get(name)) is None:
                mean = old[name].double() + total / self._samples
            else:
                mean = total / weight  # NaN where nobody sent anything
                if name in old:
                    mean = torch.where(weight > 0, mean, old[name].double())
            merged[name] = mean.to(self._types[name])
        return replace(self._state, parts=merged)


class ServerOptimizer(Merge):
    """Lets the server take a step of its own towards what devices agreed on.

    A subclass says how one tensor of parameters moves, element by element. What it writes into
    ``memory`` it finds there again in the next round, also after an interruption. What no device
    trained in a round stays as it is, and so does its memory.
    """

    remembers: ClassVar[tuple[str, ...]] = ()
    """The names of its memories; each begins with zeros."""
    follows_another: ClassVar[bool] = False
    """Whether it only holds back what moves, so that a step by ``[server]`` may come before it."""
    merge: Merge = Mean()
    """What devices agreed on."""

    @abstractmethod
    def move(self, old: Tensor, agreed: Tensor, memory: Tensors, round_index: int) -> Tensor:
        """The next value of parameters that were ``old``."""

    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        """A round begins."""
        return _ThenMove(self, state, round_index)

    def over(self, merge: Merge) -> ServerOptimizer:
        """The same step, towards what devices agree on by another merge."""
        found = copy.copy(self)
        object.__setattr__(found, "merge", merge)
        return found

    def with_rules(self, rules: Rules) -> Merge:
        """The same step, towards what devices agree on by rules."""
        return self.over(self.merge.with_rules(rules))


class _ThenMove:
    def __init__(self, optimizer: ServerOptimizer, state: ServerState, round_index: int) -> None:
        self._optimizer, self._old, self._round_index = optimizer, state, round_index
        self._inner = optimizer.merge.begin(state, round_index)
        everything = optimizer.merge.moves_everything
        make = torch.ones_like if everything else torch.zeros_like
        self._trained = {name: make(state.parts[name], dtype=torch.bool) for name in state.learned}
        """By element, whether a device trained it."""

    def add(self, contribution: Contribution) -> None:
        self._inner.add(contribution)
        layout = self._old.layout
        for part in layout.parts_of(contribution):
            if part.name in self._trained:
                place = ... if part.place is None else part.place
                self._trained[part.name][place] |= layout.trained(part)

    def finish(self) -> ServerState:
        merged, optimizer = self._inner.finish(), self._optimizer
        parts, kept = dict(merged.parts), {name: Tensors() for name in optimizer.remembers}
        for part in merged.learned:
            old, trained = self._old.parts[part], self._trained[part]
            before = {
                name: self._old.memory.get(name, {}).get(part, torch.zeros_like(old))
                for name in optimizer.remembers
            }
            memory = dict(before)
            moved = optimizer.move(old, merged.parts[part], memory, self._round_index)
            parts[part] = torch.where(trained, moved, old)
            for name in optimizer.remembers:
                kept[name][part] = torch.where(trained, memory[name], before[name])
        return replace(merged, parts=parts, memory={**merged.memory, **kept})
