"""Merging by rules: the ballots of a round, block by block, for tensors by key and for rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cocofl.fl.agreement import MEMORY, Agreement, apart
from cocofl.fl.changes import Changes, changes_of, flat, usual_sizes
from cocofl.fl.rules import (
    Ballot,
    Rules,
    capped,
    least_change_in_the_middle,
    median,
    norm_clip,
)
from cocofl.fl.state import Contribution, Group, Part, Piece, ServerState, Tensors
from cocofl.span import Blocks

# A scale that nobody knows yet is taken from so many who agree; until then it is computed anew.
_WITNESSES = 2


def _strict(ballot: Ballot) -> Tensor:
    return least_change_in_the_middle(norm_clip(ballot))


class _Sent(NamedTuple):
    """A device's part, laid out flat."""

    values: Tensor
    votes: Tensor | None
    blocks: Blocks | None

    def has(self, piece: Piece) -> bool:
        return self.blocks is None or piece.group.block in self.blocks


class MergedByRules:
    """Takes in the contributions of a round, and keeps them until it counts.

    Rules go by those who trained a block. What they agree on counts as much as all of them do:
    with ``over_everyone`` the others vote for what there is. Measurements are the median of those
    who took them; they and variances move by a bounded factor.
    """

    def __init__(self, state: ServerState, rules: Rules, *, over_everyone: bool) -> None:
        self._state, self._rules, self._over_everyone = state, rules, over_everyone
        self._samples: list[int] = []
        self._devices: list[int] = []
        self._changes: list[Changes] = []
        self._sent: dict[str, dict[int, _Sent]] = {}
        self._measured: dict[str, dict[int, _Sent]] = {}
        self._like: Tensors = {}
        """A value of each measurement, for those that there were none of."""

    def add(self, contribution: Contribution) -> None:
        """Take in what a device sent."""
        device = len(self._samples)
        self._samples.append(contribution.samples)
        self._devices.append(contribution.device)
        self._changes.append(changes_of(self._state, contribution))
        for part in self._state.layout.parts_of(contribution):
            kept = self._measured if part.measured else self._sent
            kept.setdefault(part.name, {})[device] = self._kept(contribution, part)
            self._like[part.name] = self._state.parts.get(part.name, part.values)
        self._state = self._state.remembering(contribution)

    def _kept(self, contribution: Contribution, part: Part) -> _Sent:
        values, votes = flat(part, self._state.parts.get(part.name))
        # The next devices of a cohort are trained in the same memory.
        values = values if contribution.stacked is None else values.clone()
        return _Sent(values, votes, part.blocks)

    def finish(self) -> ServerState:
        """The state after the round."""
        if not self._samples:
            return self._state
        weights = torch.tensor(capped(self._samples, self._rules.share), dtype=torch.float64)
        usual = usual_sizes(self._state, self._changes)
        moved = {name: self._state.parts[name].double().flatten() for name in self._sent}
        groups: dict[Group, list[tuple[str, Piece]]] = {}
        for name in self._sent:
            for piece in self._state.layout.pieces(name):
                groups.setdefault(piece.group, []).append((name, piece))
        groups = {group: pieces for group, pieces in groups.items() if group in usual}
        kept = torch.ones_like(weights)
        if self._rules.agreement:
            kept[self._left_out(moved, [p for group, p in groups.items() if group.learned])] = 0.0
        for group, pieces in groups.items():
            self._move(moved, pieces, weights, kept, usual[group], learned=group.learned)
        merged = dict(self._state.parts)
        for name, values in moved.items():
            merged[name] = values.to(merged[name].dtype).reshape(merged[name].shape)
        for name, sent in self._measured.items():
            if (agreed := self._agreed(name, sent, weights)) is not None:
                merged[name] = agreed
        return replace(self._state, parts=merged)

    def _move(
        self,
        moved: Tensors,
        pieces: Sequence[tuple[str, Piece]],
        weights: Tensor,
        kept: Tensor,
        usual: float,
        *,
        learned: bool,
    ) -> None:
        """Let the tensors of one group be what those who trained it agree on."""
        devices, changes, votes = self._group(moved, pieces)
        weights, kept = weights.to(changes.device), kept.to(changes.device)
        counts = votes * weights[devices, None]
        ballot = Ballot(changes, counts * kept[devices, None], usual)
        # Statistics are measurements, which tell little of a device's own data: be strict.
        rules = self._rules if learned else _strict
        agreed = rules(ballot)
        if self._over_everyone:
            agreed = agreed * (counts.sum(0) / weights.sum())
        at = 0
        for name, piece in pieces:
            before = moved[name][piece.where]
            after = before + agreed[at : at + len(before)]
            at += len(before)
            moved[name][piece.where] = self._bounded(after, before, piece)

    def _left_out(self, now: Tensors, groups: Sequence[Sequence[tuple[str, Piece]]]) -> list[int]:
        """The few who agree far less with the others than is usual; the server remembers it."""
        known = self._state.memory.get(MEMORY, {})
        before = [float(known.get(str(device), torch.nan)) for device in self._devices]
        agreement = Agreement(len(self._devices))
        for pieces in groups:
            devices, changes, votes = self._group(now, pieces)
            agreement.add(devices, changes * votes)
        found = agreement.by_device(torch.tensor(before, dtype=torch.float64))
        told = {str(d): one for d, one in zip(self._devices, found, strict=True) if d >= 0}
        memory = {**self._state.memory, MEMORY: {**known, **told}}
        self._state = replace(self._state, memory=memory)
        return apart(found, self._rules.agreement, self._rules.trim)

    def _group(
        self, now: Tensors, pieces: Sequence[tuple[str, Piece]]
    ) -> tuple[list[int], Tensor, Tensor]:
        """Who has something of a group; (device, element): how they change it, and what counts."""
        senders = sorted(
            {d for name, piece in pieces for d, one in self._sent[name].items() if one.has(piece)}
        )
        stacks = [self._stack(now[name], name, piece, senders) for name, piece in pieces]
        changes, votes = (torch.cat(some, 1) for some in zip(*stacks, strict=True))
        has = votes.any(1)
        devices = [device for device, some in zip(senders, has.tolist(), strict=True) if some]
        return devices, changes[has], votes[has]

    def _stack(
        self, now: Tensor, name: str, piece: Piece, devices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """(device, element): how they change one tensor, and whether that counts."""
        before = now[piece.where]
        changes, votes = torch.zeros(2, len(devices), len(before), dtype=now.dtype).to(now.device)
        for row, device in enumerate(devices):
            one = self._sent[name].get(device)
            if one is not None and one.has(piece):
                changes[row] = one.values[piece.where].double() - before
                votes[row] = 1.0 if one.votes is None else one.votes[piece.where]
        return changes, votes

    def _bounded(self, after: Tensor, before: Tensor, piece: Piece) -> Tensor:
        """What is above zero by its meaning moves by a bounded factor."""
        if piece.kind == "values":
            return after
        bound = self._rules.bound
        within = torch.minimum(torch.maximum(after, before / bound), before * bound)
        return torch.where(before > 0, within, after)  # NaN, too, is not above 0

    def _agreed(self, name: str, sent: dict[int, _Sent], weights: Tensor) -> Tensor | None:
        """A measurement: the median of those who took it, if that can be believed."""
        values = torch.stack([one.values.double() for one in sent.values()])
        votes = [torch.ones_like(values[0]) if o.votes is None else o.votes for o in sent.values()]
        counts = torch.stack(votes) * weights.to(values.device)[list(sent), None]
        found = median(Ballot(values, counts, 0.0)).mean
        old, has = self._state.parts.get(name), counts > 0
        before = torch.full_like(found, torch.nan) if old is None else old.double().flatten()
        known = has.any(0)
        for piece in self._state.layout.pieces(name):
            where = piece.where
            if piece.kind == "scales":
                known[where] &= ~before[where].isnan() | self._is_believed(
                    values[:, where], has[:, where], found[where]
                )
            found[where] = self._bounded(found[where], before[where], piece)
        if old is None and not bool(known.any()):
            return None
        whole = torch.where(known, found, before)
        return whole.to(self._like[name].dtype).reshape(self._like[name].shape)

    def _is_believed(self, values: Tensor, has: Tensor, found: Tensor) -> Tensor:
        """Whether most who measured a scale, and more than one, found about the same."""
        bound = self._rules.bound
        agree = has & (values <= found * bound) & (values * bound >= found)
        witnesses = agree.sum(0)
        return (witnesses >= min(_WITNESSES, len(self._samples))) & (2 * witnesses > has.sum(0))
