"""Stochastic gradient descent on rows of parameters: one device per row, each with its own rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cocofl.vector.fused import kernels_for, runs_on


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
        valid: Tensor,
    ) -> None:
        """Move the places that learn, (device, place); the others keep their bits.

        A device without ``valid`` samples rests.
        """
        if self.clip is None and velocity is None and runs_on(parameters):
            run = kernels_for(parameters)
            run.sgd(parameters, gradients, learns, valid, lr, self.weight_decay)
            return
        learns = learns & (valid > 0)[:, None]
        if self.clip is not None:
            norm = torch.where(learns, gradients, 0.0).square().sum(1, keepdim=True).sqrt()
            gradients = gradients * (self.clip / (norm + 1e-6)).clamp_max(1.0)
        if self.weight_decay:
            gradients = gradients.add(parameters, alpha=self.weight_decay)
        if velocity is not None:
            velocity.copy_(torch.where(learns, velocity * self.momentum + gradients, velocity))
            gradients = velocity
        moved = torch.addcmul(parameters, gradients, lr[:, None], value=-1)
        parameters.copy_(torch.where(learns, moved, parameters))
