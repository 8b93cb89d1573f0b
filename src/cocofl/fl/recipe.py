"""How every device trains, whatever part of the network that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.errors import InvalidSetting
from cocofl.named import lookup

Loss = Callable[[Any, Tensor], Tensor]
"""From what the network returns and the labels to the mean loss of a mini-batch."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of one row of scores per label."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}


@dataclass(frozen=True)
class Recipe:
    """Local training: mini-batches, optimizer, loss. The defaults are the paper's."""

    epochs: int = 1
    batch: int = 32
    last_batch: str = "keep"
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    loss: str = "cross_entropy"

    def loss_function(self) -> Loss:
        """The loss by its name, or the user's own."""
        return lookup(self.loss, LOSSES, "loss", InvalidSetting)

    def optimizer_class(self) -> Callable[..., torch.optim.Optimizer]:
        """The optimizer by its name, or the user's own."""
        return lookup(self.optimizer, OPTIMIZERS, "optimizer", InvalidSetting)

    def check(self) -> None:
        """Complain about an optimizer that is unknown or cannot take these settings."""
        self._optimizer([nn.Parameter(torch.zeros(1))], lr=0.1)

    def descend(
        self,
        parameters: Iterable[nn.Parameter],
        losses: Iterator[Tensor],
        lr: float,
        correct: Callable[[], None] | None = None,
    ) -> float:
        """Take a step for each loss, which is computed only when its turn comes; their mean.

        ``correct`` may change the gradients of each step before anything is done with them.

        No gradient lives longer than its step, so that a device's peak is that of one step.
        """
        trained = list(parameters)
        optimizer = self._optimizer(trained, lr)
        total, count = 0.0, 0
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            if correct is not None:
                correct()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(trained, self.clip)
            optimizer.step()
            total, count = total + float(loss.detach()), count + 1
        return total / max(count, 1)

    def _optimizer(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        settings = {"lr": lr, "weight_decay": self.weight_decay}
        if self.momentum:
            settings["momentum"] = self.momentum
        try:
            return self.optimizer_class()(parameters, **settings)
        except TypeError as error:
            raise InvalidSetting(
                f"the optimizer {self.optimizer!r} cannot take {', '.join(settings)}: {error}"
            ) from error
