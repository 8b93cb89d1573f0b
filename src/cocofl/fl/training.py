"""How every device trains, whatever part of the network that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cocofl.checks import check_choice, check_number
from cocofl.errors import InvalidSetting
from cocofl.fl.batches import LAST_BATCH, n_batches
from cocofl.named import lookup
from cocofl.vector import Adam, Descent, Optimizer, Sgd, losses

Loss = Callable[[Any, Tensor], Tensor]
"""From what the network returns and the labels to the mean loss of a mini-batch."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of one row of scores per label."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of networks that predict numbers."""
    return F.mse_loss(outputs.flatten(), labels.flatten())


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of networks that say of each of several classes whether it is there: a score per label."""
    return F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype))


def calibrated(loss: Loss, margins: Tensor) -> Loss:
    """A loss of scores that are lowered by margins, one for each class."""

    def lowered(outputs: Tensor, labels: Tensor) -> Tensor:
        return loss(losses.lowered(outputs[None], margins[None])[0], labels)

    return lowered


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared_error": squared_error,
}
STACKED_LOSSES: dict[str, losses.StackedLoss] = {
    "cross_entropy": losses.cross_entropy,
    "binary_cross_entropy": losses.binary_cross_entropy,
    "squared_error": losses.squared_error,
}
"""The same of many devices at once."""
FITTING: dict[str, tuple[str, tuple[str, ...]]] = {
    "classes": ("cross_entropy", ("accuracy", "f1", "loss")),
    "tokens": ("cross_entropy", ("token_accuracy", "loss", "perplexity")),
    "multilabel": ("binary_cross_entropy", ("label_f1", "label_accuracy")),
    "numbers": ("squared_error", ("rmse", "mae", "r2")),
}
"""By what labels are, the loss that reads them, and metrics to begin with."""
OPTIMIZERS: dict[str, Callable[..., Any]] = {"sgd": Sgd, "adam": Adam}
"""Of :mod:`torch.optim`, or a :class:`cocofl.vector.Optimizer`, which a cohort can use, too."""


@dataclass(frozen=True)
class Training:
    """The section ``[training]`` of an experiment: local training, and its rate over the rounds."""

    epochs: int = 1
    """Passes over its data that a device makes in a round."""
    batch: int = 32
    """Samples per mini-batch."""
    last_batch: str = "keep"
    """Or ``drop`` what is no whole mini-batch; one with less than a batch trains that."""
    optimizer: str = "sgd"
    """``sgd``, ``adam``, or ``package.module:function``."""
    lr: float = 0.1
    """The learning rate."""
    momentum: float = 0.0
    """SGD's."""
    weight_decay: float = 0.001
    """On all parameters, those of norms included."""
    decay_rounds: tuple[int, ...] = ()
    """Rounds from which the learning rate is multiplied by ``decay_factor`` once more."""
    decay_factor: float = 0.1
    """See ``decay_rounds``."""
    clip: float = math.inf
    """The largest norm of a gradient."""
    loss: str = "cross_entropy"
    """Or ``binary_cross_entropy``, ``squared_error``, ``package.module:function``."""
    calibration: float = 0.0
    """τ of FedLC: scores are lowered by ``τ · n^(−1/4)`` of a device's n samples of each class."""

    def __post_init__(self) -> None:
        check_number("training.epochs", self.epochs, least=1)
        check_number("training.batch", self.batch, least=1)
        check_number("training.lr", self.lr, above=0)
        check_number("training.momentum", self.momentum, least=0, below=1)
        check_number("training.weight_decay", self.weight_decay, least=0)
        check_number("training.decay_factor", self.decay_factor, above=0)
        check_number("training.clip", self.clip, above=0, finite=False)
        check_number("training.calibration", self.calibration, least=0)
        check_choice("training.last_batch", self.last_batch, LAST_BATCH)
        for value in self.decay_rounds:
            check_number("training.decay_rounds", value, least=1)

    def lr_at(self, round_index: int) -> float:
        """The learning rate of a round: multiplied by a factor at some of them.

        >>> training = Training(lr=1.0, decay_rounds=(2,), decay_factor=0.5)
        >>> [training.lr_at(r) for r in range(4)]
        [1.0, 1.0, 0.5, 0.5]
        """
        passed = sum(round_index >= decay for decay in self.decay_rounds)
        return self.lr * self.decay_factor**passed

    def steps(self, n_samples: int) -> int:
        """How many steps a device with so many samples takes in a round."""
        return self.epochs * n_batches(n_samples, self.batch, self.last_batch)

    def margins(self, labels: NDArray[Any], classes: int) -> NDArray[np.float64]:
        """By how much FedLC (Zhang et al., ICML 2022) lowers the scores of a device's classes.

        A class that it does not have is left out of its loss, as the formula's limit says: its
        score gets no gradient, and is not pushed down by those who never see it.

        >>> Training(calibration=2.0).margins(np.array([0] * 16 + [2]), 3)
        array([ 1., inf,  2.])
        """
        counts = np.bincount(labels[labels >= 0].ravel(), minlength=classes)
        with np.errstate(divide="ignore"):
            found: NDArray[np.float64] = self.calibration * counts.astype(float) ** -0.25
        return found

    def loss_function(self) -> Loss:
        """The loss by its name, or the user's own."""
        return lookup(self.loss, LOSSES, "loss", InvalidSetting)

    def stacked_loss(self) -> losses.StackedLoss | None:
        """The loss of many devices at once; None where there is only that of one."""
        return STACKED_LOSSES.get(self.loss)

    def stacked_optimizer(self) -> Optimizer | None:
        """The optimizer of many devices at once; None where there is only that of one."""
        make = self._optimizer_class()
        if not (isinstance(make, type) and issubclass(make, Optimizer)):
            return None
        clip = self.clip if self.clip < math.inf else None
        made: Optimizer = self._made(make, clip=clip)
        return made

    def check_optimizer(self) -> None:
        """Complain about an optimizer that is unknown or cannot take these settings."""
        self._optimizer([nn.Parameter(torch.zeros(1))], lr=0.1)

    def descend(
        self,
        parameters: Iterable[nn.Parameter],
        each_loss: Iterator[Tensor],
        lr: float,
        correct: Callable[[], None] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> float:
        """Take a step for each loss, which is computed only when its turn comes; their mean.

        ``correct`` may change the gradients of each step before anything is done with them, and
        ``settle`` the parameters after it.

        No gradient lives longer than its step, so that a device's peak is that of one step.
        """
        trained = list(parameters)
        optimizer = self._optimizer(trained, lr)
        total, count = 0.0, 0
        for loss in each_loss:
            optimizer.zero_grad()
            loss.backward()
            if correct is not None:
                correct()
            if self.clip < math.inf:
                nn.utils.clip_grad_norm_(trained, self.clip)
            optimizer.step()
            if settle is not None:
                settle()
            total, count = total + float(loss.detach()), count + 1
        return total / max(count, 1)

    def _optimizer(
        self, parameters: list[nn.Parameter], lr: float
    ) -> Descent | torch.optim.Optimizer:
        stacked = self.stacked_optimizer()
        if stacked is not None:
            return stacked.for_one_device(parameters, lr)
        made: torch.optim.Optimizer = self._made(
            partial(self._optimizer_class(), parameters, lr=lr)
        )
        return made

    def _optimizer_class(self) -> Callable[..., Any]:
        return lookup(self.optimizer, OPTIMIZERS, "optimizer", InvalidSetting)

    def _made(self, make: Callable[..., Any], **more: Any) -> Any:
        settings = {"weight_decay": self.weight_decay}
        if self.momentum:
            settings["momentum"] = self.momentum
        try:
            return make(**settings, **more)
        except TypeError as error:
            raise InvalidSetting(
                f"the optimizer {self.optimizer!r} cannot take lr, {', '.join(settings)}: {error}"
            ) from error
