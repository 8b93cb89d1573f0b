"""The server's state: the model, and what a strategy remembers of earlier rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.models.widths import Place
from cocofl.span import Blocks

Tensors = dict[str, Tensor]
Memory = Mapping[str, Tensors]
"""By the name that a strategy gave it: tensors, named as the parts of a state are."""
Places = Callable[[float, int], Mapping[str, Place]]
"""By width and roll, where the tensors of a network that narrow lie in those of the full one."""

SCALE_PREFIX, MEMORY_PREFIX, DEVICE_PREFIX = "scales.", "memory.", "devices."
ON_THE_WAY_PREFIX = "on_the_way."
"""In a checkpoint, updates that have not arrived yet; they are no part of a state."""


class Part(NamedTuple):
    """One tensor of a contribution, as its state has them."""

    name: str
    values: Tensor
    place: Place | None = None
    """Where the values lie in the state's tensor; None where they are all of it."""
    votes: Tensor | None = None
    """By element, whether it counts; None where all do."""
    measured: bool = False
    """Whether it is a measurement, which those who did not take it know nothing about."""
    blocks: Blocks | None = None
    """The blocks that the device trained, where the part is a row of all; None where it is not."""


class Group(NamedTuple):
    """What is looked at as one: the parameters of a block, or its norm statistics."""

    block: int
    """-1 for what is in no block."""
    learned: bool


class Piece(NamedTuple):
    """The places of one tensor in a part that is laid out flat."""

    group: Group
    where: slice
    kind: Literal["values", "variances", "scales"]


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one device sent, and how many samples stand behind it."""

    tensors: Mapping[str, Tensor]
    samples: int
    loss: float = 0.0
    """The mean over its mini-batches."""
    width: float = 1.0
    """The tensors are those of the network this wide."""
    rows: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Of these tensors only these rows count: of the others the device knows nothing."""
    device: int = -1
    memory: Memory = field(default_factory=dict)
    """What the device remembers from now on, for strategies that let it."""
    sent_bytes: int | None = None
    """The upload volume where it is another than the tensors' size."""
    payloads: Mapping[str, bytes] = field(default_factory=dict)
    """The tensors that a codec encoded, as they are sent."""
    stacked: tuple[Part, ...] | None = None
    """The tensors as rows, where a cohort has them so."""
    known_finite: bool | None = None
    """Whether all tensors are finite, where somebody has looked already."""
    roll: int = 0
    """The channel of the full network at which a narrower one's window begins."""

    @property
    def nbytes(self) -> int:
        """The upload volume."""
        if self.sent_bytes is not None:
            return self.sent_bytes
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_finite(self) -> bool:
        """Whether training went well."""
        if self.known_finite is not None:
            return self.known_finite and bool(np.isfinite(self.loss))
        finite = (bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())
        return bool(np.isfinite(self.loss)) and all(finite)


class Layout(Protocol):
    """How the tensors of a state lie: one by one under their keys, or as rows on a GPU."""

    block_of: Mapping[str, int]
    """By key, the block that has it."""

    def by_key(self, parts: Mapping[str, Tensor]) -> Tensors:
        """The parts as tensors under the model's own keys."""

    def from_keys(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The parts again."""

    def parts_of(self, contribution: Contribution) -> Iterator[Part]:
        """What a device sent, beside the parts of a state."""

    def trained(self, part: Part) -> Tensor:
        """By element of a part that a device sent, whether the device trained it."""
        return (
            torch.ones_like(part.values, dtype=torch.bool) if part.votes is None else part.votes > 0
        )

    def is_learned(self, name: str) -> bool:
        """Whether a part holds parameters, rather than statistics or scales."""

    def pieces(self, name: str) -> Sequence[Piece]:
        """The tensors that a part is made of."""

    def memory_of(self, contribution: Contribution) -> Memory:
        """What the device remembers from now on, beside the parts of a state."""
        if contribution.stacked is not None:
            return contribution.memory
        return {name: self.from_keys(own) for name, own in contribution.memory.items()}


@dataclass(frozen=True, eq=False)
class KeyLayout(Layout):
    """Each tensor under its key, in the memory of the CPU."""

    places: Places = lambda _width, _roll: {}
    learned: frozenset[str] | None = None
    """The keys of parameters; None where all but scales are."""
    block_of: Mapping[str, int] = field(default_factory=dict)
    """By key, the block that has it."""

    def by_key(self, parts: Mapping[str, Tensor]) -> Tensors:
        """As they are."""
        return dict(parts)

    def from_keys(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """As they are."""
        return dict(tensors)

    def parts_of(self, contribution: Contribution) -> Iterator[Part]:
        """Tensor by tensor."""
        is_whole = contribution.width == 1.0
        places = {} if is_whole else self.places(contribution.width, contribution.roll)
        for key, tensor in contribution.tensors.items():
            place, rows = places.get(key), contribution.rows.get(key)
            votes = None if rows is None else votes_of_rows(tensor, rows)
            own = places if not is_whole else self.block_of or contribution.tensors
            yield Part(key, tensor, place, votes, measured=is_scale(key) or key not in own)

    def is_learned(self, name: str) -> bool:
        """By its key."""
        return name in self.learned if self.learned is not None else not is_scale(name)

    def pieces(self, name: str) -> Sequence[Piece]:
        """One, which is all of it."""
        group = Group(self.block_of.get(name, -1), self.is_learned(name))
        return [Piece(group, slice(None), kind_of(name))]


def votes_of_rows(tensor: Tensor, rows: NDArray[np.int64] | None) -> Tensor:
    """1 for elements of these rows, 0 for others; 1 for all where no rows are given."""
    votes = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
    votes[... if rows is None else torch.from_numpy(rows)] = 1.0
    return votes


def is_scale(key: str) -> bool:
    """Whether a state's key names a scale."""
    return key.startswith(SCALE_PREFIX)


def kind_of(key: str) -> Literal["values", "variances", "scales"]:
    """What a state's key names; variances and scales are above zero."""
    if is_scale(key):
        return "scales"
    return "variances" if key.endswith("running_var") else "values"


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server has after a round; a value, of which every round makes a new one."""

    parts: Mapping[str, Tensor]
    """Parameters, norm statistics and scales, as ``layout`` has them."""
    layout: Layout = field(default_factory=KeyLayout)
    memory: Memory = field(default_factory=dict)
    """What the strategy's server remembers: momentum, say."""
    devices: Mapping[int, Memory] = field(default_factory=dict)
    """What it remembers of each device: control variates, say."""

    @cached_property
    def tensors(self) -> Tensors:
        """Parameters, norm statistics and scales under their keys, in the memory of the CPU."""
        return self._on_the_host(self.parts)

    def _on_the_host(self, parts: Mapping[str, Tensor]) -> Tensors:
        # Part by part: a few long rows come from a GPU sooner than many tensors.
        return self.layout.by_key({name: part.cpu() for name, part in parts.items()})

    @property
    def learned(self) -> list[str]:
        """The parts that hold parameters."""
        return [name for name in self.parts if self.layout.is_learned(name)]

    def placed(self, layout: Layout) -> ServerState:
        """The same in another layout."""

        def moved(memory: Memory) -> Memory:
            by_key = {name: self._on_the_host(tensors) for name, tensors in memory.items()}
            return {name: layout.from_keys(tensors) for name, tensors in by_key.items()}

        devices = {device: moved(memory) for device, memory in self.devices.items()}
        return ServerState(layout.from_keys(self.tensors), layout, moved(self.memory), devices)

    def remembering(self, sent: Contribution) -> ServerState:
        """The same with what a device remembers from now on."""
        memory = self.layout.memory_of(sent)
        return replace(self, devices={**self.devices, sent.device: memory}) if memory else self

    def flat(self) -> Tensors:
        """Everything under keys, as a checkpoint keeps it."""
        found = dict(self.tensors)
        kept = {MEMORY_PREFIX: self.memory}
        kept |= {f"{DEVICE_PREFIX}{number}.": own for number, own in self.devices.items()}
        for prefix, memory in kept.items():
            for name, tensors in memory.items():
                by_key = self._on_the_host(tensors).items()
                found |= {f"{prefix}{name}/{key}": tensor for key, tensor in by_key}
        return found

    @classmethod
    def from_flat(cls, flat: Mapping[str, Tensor]) -> ServerState:
        """The state that :meth:`flat` wrote down."""
        tensors, memory, devices = Tensors(), dict[str, Tensors](), dict[int, dict[str, Tensors]]()
        for key, tensor in flat.items():
            name, slash, own_key = key.removeprefix(MEMORY_PREFIX).partition("/")
            number, _, of_device = name.removeprefix(DEVICE_PREFIX).partition(".")
            if slash and key.startswith(MEMORY_PREFIX):
                memory.setdefault(name, {})[own_key] = tensor
            elif slash and key.startswith(DEVICE_PREFIX) and number.isdecimal():
                kept = devices.setdefault(int(number), {})
                kept.setdefault(of_device, {})[own_key] = tensor
            elif not key.startswith(ON_THE_WAY_PREFIX):
                tensors[key] = tensor
        return cls(tensors, memory=memory, devices=devices)
