"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against the drift of devices.

cocofl run --set strategy.name=scaffold:scaffold

Each device remembers its own control variate, the server their mean over all devices (its
option II). Both are kept in checkpoints like weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cocofl.strategies import (
    Accumulator,
    Contribution,
    LocalRule,
    LocalStep,
    Mean,
    Merge,
    Plan,
    ServerState,
    Situation,
    Span,
    SpanWork,
    Strategy,
    Tables,
    Tensors,
)


@dataclass(frozen=True)
class ControlVariates(LocalRule):
    """Gradients are corrected by what other devices would do."""

    server_memory: ClassVar = ("control",)
    device_memory: ClassVar = ("control",)

    def correct(self, step: LocalStep) -> Tensor:
        """The gradient without the device's own bias."""
        return step.gradient - step.device["control"] + step.server["control"]

    def remember(self, end: LocalStep) -> dict[str, Tensor]:
        """The mean gradient of this round, as the parameters show it."""
        gradient = (end.start - end.parameter) / (end.steps * end.lr)
        return {"control": end.device["control"] - end.server["control"] + gradient}


@dataclass(frozen=True)
class MergeControls(Merge):
    """The mean of the models; and of the changes of all ``devices``' control variates."""

    devices: int

    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        """A round begins."""
        return _Controls(state, Mean().begin(state, round_index), self.devices)


class _Controls:
    def __init__(self, state: ServerState, models: Accumulator, devices: int) -> None:
        self._state, self._models, self._devices = state, models, devices
        before = state.memory.get("control", {})
        self._control: Tensors = {
            name: before.get(name, torch.zeros_like(state.parts[name])) for name in state.learned
        }

    def add(self, contribution: Contribution) -> None:
        self._models.add(contribution)
        before = self._state.devices.get(contribution.device, {}).get("control", {})
        after = self._state.layout.memory_of(contribution)["control"]
        for name, control in after.items():
            change = control - before.get(name, torch.zeros_like(control))
            self._control[name] = self._control[name] + change / self._devices

    def finish(self) -> ServerState:
        merged = self._models.finish()
        return replace(merged, memory={**merged.memory, "control": self._control})


def scaffold(tables: Tables, *, devices: int = 30) -> Strategy:
    """All devices train everything; ``devices`` is how many there are."""
    work = SpanWork(Span(0, tables.n_blocks), variant="f", rule=ControlVariates())

    def plan(_situation: Situation) -> Plan:
        return Plan(work, time=1.0)

    return Strategy(plan, MergeControls(devices))
