"""Rules of local training, on rows: what each device's strategy adds to its descent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cocofl.local_rule import LocalRule, LocalStep


class RuleMemory(NamedTuple):
    """What a rule reads on one device, by name: rows of parameters."""

    server: Mapping[str, Tensor]
    device: Mapping[str, Tensor]


class RuleRows:
    """What rules of local training read and write, in tensors that stay where they are."""

    def __init__(self, parameters: Tensor) -> None:
        self._like = parameters
        self._start: Tensor | None = None
        self._masks: dict[LocalRule, Tensor] = {}
        self._memory: dict[str, dict[str, Tensor]] = {"server": {}, "device": {}}
        self.kept: dict[str, Tensor] = {}

    def begin(
        self, start: Tensor, rules: Sequence[LocalRule | None], memories: Sequence[RuleMemory]
    ) -> tuple[LocalRule, ...]:
        """Set up a round with the rules of devices; those that some device has."""
        found = tuple(dict.fromkeys(rule for rule in rules if rule is not None))
        self.kept = {}
        if not found:
            return found
        if self._start is None:
            self._start = torch.empty_like(start)
        self._start.copy_(start)
        for rule in found:
            has_it = torch.tensor([one == rule for one in rules], device=start.device)
            mask = self._masks.setdefault(rule, has_it.new_zeros(len(start), 1))
            mask.zero_()
            mask[: len(rules), 0] = has_it
            for names, kind in ((rule.server_memory, "server"), (rule.device_memory, "device")):
                for name in names:
                    self._fill(kind, name, [getattr(memory, kind) for memory in memories])
        return found

    def staying(
        self, rules: Sequence[LocalRule], parameters: Tensor, lr: Tensor, learns: Tensor
    ) -> Tensor | None:
        """By device and place, what of all that learns is to stay; None where rules say nothing."""
        found: Tensor | None = None
        for rule in rules:
            start = self._step(torch.zeros_like(parameters), parameters, lr, torch.zeros_like(lr))
            if (stays := rule.stays(start)) is not None:
                stays = stays & self._masks[rule] & learns
                found = stays if found is None else found | stays
        return found

    def _fill(self, kind: str, name: str, memories: Sequence[Mapping[str, Tensor]]) -> None:
        rows = self._memory[kind].setdefault(name, torch.zeros_like(self._like)).zero_()
        for row, memory in zip(rows, memories, strict=False):
            if name in memory:
                row.copy_(memory[name])

    def corrected(
        self,
        rules: Sequence[LocalRule],
        gradients: Tensor,
        parameters: Tensor,
        lr: Tensor,
        steps: Tensor,
    ) -> Tensor:
        """The gradients that devices go by."""
        for rule in rules:
            step = self._step(gradients, parameters, lr, steps)
            gradients = torch.where(self._masks[rule], rule.correct(step), gradients)
        return gradients

    def end(
        self,
        rules: Sequence[LocalRule],
        parameters: Tensor,
        lr: Tensor,
        steps: Tensor,
        learns: Tensor,
    ) -> None:
        """Let devices remember; of what they did not train, what they knew."""
        for rule in rules:
            end = self._step(torch.zeros_like(parameters), parameters, lr, steps)
            for name, value in rule.remember(end).items():
                before = self.kept.get(name, self._memory["device"][name])
                self.kept[name] = torch.where(self._masks[rule] & learns, value, before)

    def _step(self, gradients: Tensor, parameters: Tensor, lr: Tensor, steps: Tensor) -> LocalStep:
        assert self._start is not None
        rate, taken = lr[:, None], steps.to(parameters.dtype)[:, None]
        server, device = self._memory.values()
        return LocalStep(parameters, self._start, gradients, rate, taken, server, device)
