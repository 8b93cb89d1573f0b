"""How far devices move the blocks of a state: one yardstick, for merging and for who watches.

Devices train different blocks, so a norm says little by itself. It is taken block by block, of
parameters and norm statistics apart, and set against what is usual for that block in the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from cocofl.fl.state import Contribution, Group, Part, Piece, ServerState

ENOUGH = 3
"""Of so many devices one that is far off can be told from the others."""
SPREAD = 3.0
"""Blocks differ by this in how far training moves them, as a part of their own size. Measured:
medians of a block's devices are 0.5 to 3.4 times the typical part (docs/notebook/hostile.md)."""


class Change(NamedTuple):
    """How far a device moves a group of tensors."""

    squares: float
    """The sum over all elements."""
    elements: float

    @property
    def size(self) -> float:
        """The root of the mean square: the same for narrower networks, which have fewer."""
        return float((self.squares / max(self.elements, 1.0)) ** 0.5)


Changes = Mapping[Group, Change]


def flat(part: Part, old: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """All elements of a part's tensor, and by element whether they count; None where all do.

    Where the device has no element the value is the old one, and does not count.
    """
    if part.place is None:
        votes = None if part.votes is None else part.votes.reshape(-1)
        return part.values.reshape(-1), votes
    assert old is not None, "what lies somewhere in a tensor has that tensor"
    whole, count = old.clone(), torch.zeros_like(old, dtype=torch.float64)
    whole[part.place] = part.values.to(old.dtype)
    count[part.place] = 1.0 if part.votes is None else part.votes
    return whole.reshape(-1), count.reshape(-1)


def sent_pieces(state: ServerState, part: Part) -> Iterator[Piece]:
    """The tensors of a part that a device trained; none where it is a measurement."""
    if not part.measured:
        for piece in state.layout.pieces(part.name):
            if part.blocks is None or piece.group.block in part.blocks:
                yield piece


def changes_of(state: ServerState, contribution: Contribution) -> Changes:
    """How far a device moves each group of which it sent something that counts."""
    sums: dict[Group, list[Tensor]] = {}
    for part in state.layout.parts_of(contribution):
        old = state.parts.get(part.name)
        if part.measured or old is None:
            continue
        values, votes = flat(part, old)
        for piece in sent_pieces(state, part):
            where = piece.where
            change = values[where].double() - old.reshape(-1)[where].double()
            if votes is None:
                count = torch.tensor(float(change.numel()), dtype=torch.float64)
            else:
                change, count = change * votes[where], votes[where].sum()
            found = torch.stack([change.square().sum(), count.to(change.device)])
            sums.setdefault(piece.group, []).append(found)
    if not sums:
        return {}
    totals = torch.stack([torch.stack(found).sum(0) for found in sums.values()]).tolist()
    found_changes = zip(sums, totals, strict=True)
    return {group: Change(*total) for group, total in found_changes if total[1] > 0}


def sizes_of(state: ServerState, groups: Iterable[Group]) -> dict[Group, float]:
    """How large the tensors of each group are: the root of their mean square."""
    wanted = set(groups)
    sums: dict[Group, list[tuple[Tensor, int]]] = {}
    for name, part in state.parts.items():
        for piece in state.layout.pieces(name):
            if piece.group in wanted:
                values = part.reshape(-1)[piece.where].double()
                sums.setdefault(piece.group, []).append((values.square().sum(), values.numel()))
    return {
        group: Change(
            float(torch.stack([s for s, _ in found]).sum()), sum(n for _, n in found)
        ).size
        for group, found in sums.items()
    }


def usual_sizes(state: ServerState, devices: Sequence[Changes]) -> dict[Group, float]:
    """How far a round's devices move each group, usually: the lower median of those who do.

    A block may have been trained by few, most of them hostile. So it is at most a few times what
    is typical: the part of its own size by which devices move whatever they train, as the median of
    each device's median, so that who sends many blocks has no more say. Who trains a block alone
    has nobody to be compared with, and then what is typical is usual.
    """
    senders: dict[Group, list[float]] = {}
    for changes in devices:
        for group, change in changes.items():
            senders.setdefault(group, []).append(change.size)
    old, usual = sizes_of(state, senders), dict[Group, float]()
    for learned in {group.learned for group in senders}:
        parts = [
            [c.size / old[g] for g, c in changes.items() if g.learned == learned and old[g] > 0]
            for changes in devices
        ]
        medians = [median_low(own) for own in parts if own]
        typical = median_low(medians) if medians else 0.0
        for group, sizes in senders.items():
            if group.learned == learned:
                most = typical * old[group]
                usual[group] = min(median_low(sizes), SPREAD * most) if len(sizes) > 1 else most
    return usual
