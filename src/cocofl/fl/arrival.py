"""What an update counts that arrives when the server has moved on: for servers that do not wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from cocofl.errors import InvalidSetting
from cocofl.fl.state import Contribution, ServerState, is_scale


@dataclass(frozen=True)
class Arrival(ABC):
    """How a server merges updates as they come. A value.

    A subclass says what is kept of a parameter while it is on its way, and what becomes of that
    when it arrives: a value beside those that others send, for the strategy's merge. A norm's
    statistics are no steps that could be taken later, and are mixed with those that the server has.
    """

    buffer: int
    """The server merges when so many have arrived."""

    @abstractmethod
    def weight(self, staleness: int) -> float:
        """What an update counts that began so many merges ago; 1 at most."""

    @abstractmethod
    def keep(self, sent: Tensor, start: Tensor) -> Tensor:
        """What is kept of a parameter, from what the device made of what it was sent."""

    @abstractmethod
    def arrive(self, kept: Tensor, now: Tensor, staleness: int) -> Tensor:
        """The value that the device votes for, from what was kept and what the server has now."""

    def mixed(self, sent: Tensor, now: Tensor, staleness: int) -> Tensor:
        """So much of what a device sent, the rest of what the server has."""
        return now + self.weight(staleness) * (sent - now)

    def departed(self, sent: Contribution, start: ServerState) -> Contribution:
        """A contribution on its way, in the memory of the CPU."""
        if sent.width < 1.0 or sent.rows or sent.memory:
            raise InvalidSetting(
                "a strategy with `arrival` keeps updates on their way, and can keep whole tensors "
                "only: no narrower networks, no rows of a tensor, no memory of devices"
            )
        before, learned = start.tensors, learned_keys(start)
        tensors = {
            key: self.keep(t, before[key]) if key in learned else t.clone()
            for key, t in sent.tensors.items()
        }
        size, device = sent.nbytes, sent.device
        return Contribution(tensors, sent.samples, sent.loss, device=device, sent_bytes=size)

    def arrived(self, kept: Contribution, now: ServerState, staleness: int) -> Contribution:
        """The contribution as the merge takes it."""
        known, learned = now.tensors, learned_keys(now)
        tensors = {}
        for key, tensor in kept.tensors.items():
            is_measured = is_scale(key) or key not in known or not tensor.is_floating_point()
            if is_measured:
                tensors[key] = tensor
            else:
                move = self.arrive if key in learned else self.mixed
                tensors[key] = move(tensor, known[key], staleness)
        return replace(kept, tensors=tensors)


def learned_keys(state: ServerState) -> frozenset[str]:
    """The keys of a state's parameters, however it lies."""
    parts: Mapping[str, Tensor] = {name: state.parts[name] for name in state.learned}
    return frozenset(state.layout.by_key(parts))
