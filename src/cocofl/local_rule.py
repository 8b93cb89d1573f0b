"""What a strategy adds to the local training of its devices, in a form that both engines run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LocalStep:
    """Where local training is. All tensors have one shape or broadcast to it.

    The serial engine gives one parameter of one device after the other; a cohort gives the
    parameters of many devices as one tensor. So a rule works element by element.
    """

    parameter: Tensor
    start: Tensor
    """The parameter as the server sent it."""
    gradient: Tensor
    """Of the loss; zeros once training is over."""
    lr: Tensor | float
    steps: Tensor | float
    """How many steps were taken so far."""
    server: Mapping[str, Tensor]
    """What the server remembers; zeros in the beginning."""
    device: Mapping[str, Tensor]
    """What this device remembers; zeros in the beginning."""


class LocalRule(ABC):
    """A correction of every gradient, and what the device remembers until it trains again.

    Rules are values (frozen dataclasses): they travel to other processes, and equal ones share a
    computation.
    """

    server_memory: ClassVar[tuple[str, ...]] = ()
    """The server's memory that the rule reads."""
    device_memory: ClassVar[tuple[str, ...]] = ()
    """The device's memory that the rule reads and :meth:`remember` writes."""

    @abstractmethod
    def correct(self, step: LocalStep) -> Tensor:
        """The gradient to go by; it is clipped after that, and weight decay is added."""

    def stays(self, start: LocalStep) -> Tensor | None:
        """By element, whether it stays as the server sent it, and so is not sent; None: all learn.

        It is asked before the first step.
        """
        del start
        return None

    def remember(self, end: LocalStep) -> dict[str, Tensor]:
        """What the device keeps after its last step, and sends to the server."""
        del end
        return {}
