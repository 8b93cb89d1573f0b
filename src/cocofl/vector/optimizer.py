"""Stochastic gradient descent on rows of parameters: one device per row, each with its own rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sgd:
    """The settings of ``torch.optim.SGD``, and clipping of each device's gradient."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def step(
        self,
        parameters: Tensor,
        gradients: Tensor,
        velocity: Tensor | None,
        lr: Tensor,
        learns: Tensor,
    ) -> None:
        """Move the places that learn, (device, place); the others keep their bits."""
        if self.clip is not None:
            norm = torch.where(learns, gradients, 0.0).square().sum(1, keepdim=True).sqrt()
            gradients = gradients * (self.clip / (norm + 1e-6)).clamp_max(1.0)
        if self.weight_decay:
            gradients = gradients.add(parameters, alpha=self.weight_decay)
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradients)
            gradients = velocity
        moved = torch.addcmul(parameters, gradients, lr[:, None], value=-1)
        parameters.copy_(torch.where(learns, moved, parameters))
