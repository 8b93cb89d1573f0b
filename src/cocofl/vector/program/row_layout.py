"""All tensors of a chain in one flat row each for parameters and statistics.

With a row per device, merging, masking and the optimizer are a few operations on two tensors,
however many layers a network has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cocofl.chain import BlockChain
from cocofl.freeze.state import block_state
from cocofl.models.widths import Place

_ALIGNMENT = 32  # matrix products read aligned weights faster


@dataclass(frozen=True)
class Segment:
    """Where one tensor lies in its row."""

    start: int
    shape: tuple[int, ...]
    block: int

    @property
    def stop(self) -> int:
        """The first place after it."""
        return self.start + math.prod(self.shape)

    def of(self, rows: Tensor) -> Tensor:
        """Its part of stacked rows, (devices, *shape)."""
        return rows[:, self.start : self.stop].view(len(rows), *self.shape)


class Segments:
    """The tensors of one kind, by state-dict key; keys of a tied weight share their segment."""

    def __init__(self) -> None:
        self.by_key: dict[str, Segment] = {}
        self.size = 0
        self._by_tensor: dict[int, Segment] = {}

    def add(self, key: str, tensor: Tensor, block: int) -> None:
        """Append a tensor, unless it has a place under another key."""
        if id(tensor) not in self._by_tensor:
            self._by_tensor[id(tensor)] = Segment(self.size, tuple(tensor.shape), block)
            self.size += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
        self.by_key[key] = self._by_tensor[id(tensor)]

    def find(self, tensor: Tensor | None) -> Segment | None:
        """The segment of one of the chain's own tensors."""
        return None if tensor is None else self._by_tensor.get(id(tensor))

    def blocks(self) -> Tensor:
        """The block that each place of a row belongs to."""
        owner = torch.zeros(self.size, dtype=torch.long)
        for segment in self._by_tensor.values():
            owner[segment.start : segment.stop] = segment.block
        return owner

    def views(self, rows: Tensor) -> dict[Segment, Tensor]:
        """By segment, each once and in order, its part of stacked rows."""
        return {segment: segment.of(rows) for segment in self._by_tensor.values()}

    def leaves(self, rows: Tensor) -> dict[Segment, Tensor]:
        """The same for gradients to be taken of."""
        return {of: part.detach().requires_grad_() for of, part in self.views(rows).items()}

    def pack(
        self, state: Mapping[str, Tensor], like: Tensor, places: Mapping[str, Place] | None = None
    ) -> Tensor:
        """The state's tensors as one row, on the device and in the type of ``like``.

        ``places`` are where those of a narrower network lie. What the state lacks is zero.
        """
        row = torch.zeros(self.size, dtype=like.dtype, device=like.device)
        done: set[Segment] = set()
        for key, segment in self.by_key.items():
            if segment not in done and key in state:
                segment.of(row[None])[0][places[key] if places else ...] = state[key].to(row)
            done.add(segment)
        return row

    def order(self, places: Mapping[str, Place]) -> Tensor:
        """By place of a row, which other comes there if each tensor becomes ``tensor[place]``."""
        numbers = torch.arange(self.size)
        found = numbers.clone()
        for key, segment in self.by_key.items():
            segment.of(found[None])[0][...] = segment.of(numbers[None])[0][places[key]]
        return found


class Rows(NamedTuple):
    """States as rows: (state, place). Scales are NaN where nobody has measured them."""

    parameters: Tensor
    statistics: Tensor
    scales: Tensor

    def clone(self) -> Rows:
        """A copy."""
        return Rows(*(rows.clone() for rows in self))

    @classmethod
    def below_each_other(cls, several: Sequence[Rows]) -> Rows:
        """All states of several."""
        return several[0] if len(several) == 1 else cls(*map(torch.cat, zip(*several, strict=True)))


@dataclass(frozen=True, eq=False)
class ChainLayout:
    """The rows of a chain: what learns, what norms track, and what nobody changes."""

    parameters: Segments
    statistics: Segments
    constants: dict[str, int]
    """Other tensors of a state (indices, say), with the block that has them."""
    dtype: torch.dtype

    @classmethod
    def of(cls, chain: BlockChain) -> ChainLayout:
        """Lay out a chain's tensors."""
        parameters, statistics, constants = Segments(), Segments(), dict[str, int]()
        for index, block in enumerate(chain.blocks):
            kept = block.state_dict(keep_vars=True)
            for key in block_state(block):
                tensor = kept[key]
                if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                    parameters.add(key, tensor, index)
                elif tensor.is_floating_point():
                    statistics.add(key, tensor, index)
                else:
                    constants[key] = index
        kinds = {p.dtype for p in chain.parameters() if p.is_floating_point()}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        return cls(parameters, statistics, constants, dtype)
