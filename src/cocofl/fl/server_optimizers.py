"""Steps of the server's own, for every strategy: the section ``[server]`` of an experiment.

FedAvgM (Hsu et al., 2019), FedAdam and FedYogi (Reddi et al., ICLR 2021, Algorithm 2). The mean
change of a round is taken as a gradient, of which the server remembers something. They work
element by element on parameters; norm statistics and scales are merged as ever.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cocofl.checks import check_choice, check_number
from cocofl.errors import InvalidExperiment
from cocofl.fl.merge import Merge, ServerOptimizer
from cocofl.fl.state import Tensors

NONE = "none"
_MOMENTUM, _VARIANCE = "server momentum", "server variance"


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Goes on in the direction of earlier rounds, too."""

    lr: float
    momentum: float
    remembers: ClassVar[tuple[str, ...]] = (_MOMENTUM,)

    def move(self, old: Tensor, agreed: Tensor, memory: Tensors, _round: int) -> Tensor:
        """The next value of one tensor of parameters."""
        memory[_MOMENTUM] = self.momentum * memory[_MOMENTUM] + (agreed - old)
        return old + self.lr * memory[_MOMENTUM]


@dataclass(frozen=True)
class _Adaptive(ServerOptimizer):
    """Divides the mean direction by the usual size of an element's changes."""

    lr: float
    momentum: float
    beta2: float
    tau: float
    remembers: ClassVar[tuple[str, ...]] = (_MOMENTUM, _VARIANCE)

    def move(self, old: Tensor, agreed: Tensor, memory: Tensors, _round: int) -> Tensor:
        """The next value of one tensor of parameters."""
        change = agreed - old
        mean = self.momentum * memory[_MOMENTUM] + (1 - self.momentum) * change
        # The variance begins with τ², and what is remembered with 0.
        variance = self.variance(memory[_VARIANCE] + self.tau**2, change.square())
        memory[_MOMENTUM], memory[_VARIANCE] = mean, variance - self.tau**2
        return old + self.lr * mean / (variance.sqrt() + self.tau)

    @abstractmethod
    def variance(self, before: Tensor, square: Tensor) -> Tensor:
        """The next one, of that before and the squares of this round's changes."""


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """The variance is an exponential mean of squares."""

    def variance(self, before: Tensor, square: Tensor) -> Tensor:
        """Moves by a share of the distance."""
        return self.beta2 * before + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """The variance grows and shrinks by what is new, however far off it is."""

    def variance(self, before: Tensor, square: Tensor) -> Tensor:
        """Moves by a share of what is new."""
        # Rounding must not make it negative where it is next to nothing.
        moved = before - (1 - self.beta2) * square * (before - square).sign()
        return moved.clamp_min(0.0)


_ADAPTIVE: dict[str, type[_Adaptive]] = {"fedadam": FedAdam, "fedyogi": FedYogi}
SERVER_OPTIMIZERS = (NONE, "fedavgm", *_ADAPTIVE)
_USUAL_LR = {"fedavgm": 1.0, "fedadam": 0.01, "fedyogi": 0.01}


@dataclass(frozen=True)
class ServerStep:
    """The section ``[server]`` of an experiment: what the server does with a round's mean."""

    optimizer: str = NONE
    """``none``, ``fedavgm``, ``fedadam`` or ``fedyogi``."""
    lr: float = 0.0
    """0 for the optimizer's own: 1 of ``fedavgm``, 0.01 of ``fedadam`` and ``fedyogi``."""
    momentum: float = 0.9
    """How much of the direction so far is kept: β₁ of ``fedadam`` and ``fedyogi``."""
    beta2: float = 0.99
    """The same of the variance."""
    tau: float = 1e-3
    """Added to what is divided by: the larger, the less adaptive."""

    def __post_init__(self) -> None:
        check_choice("server.optimizer", self.optimizer, SERVER_OPTIMIZERS)
        check_number("server.lr", self.lr, least=0)
        check_number("server.momentum", self.momentum, least=0, below=1)
        check_number("server.beta2", self.beta2, least=0, below=1)
        check_number("server.tau", self.tau, above=0)

    def on_top_of(self, merge: Merge) -> Merge:
        """A strategy's merge after which the server takes its own step."""
        if self.optimizer == NONE:
            return merge
        if isinstance(merge, ServerOptimizer) and merge.follows_another:
            return merge.over(self.on_top_of(merge.merge))
        if isinstance(merge, ServerOptimizer):
            raise InvalidExperiment(
                f"server.optimizer is {self.optimizer!r}, but the strategy brings "
                f"{type(merge).__name__}, a server optimizer of its own; say "
                f'optimizer = "{NONE}" in [server], or take another strategy'
            )
        return self._made().over(merge)

    def _made(self) -> ServerOptimizer:
        lr = self.lr or _USUAL_LR[self.optimizer]
        if self.optimizer in _ADAPTIVE:
            return _ADAPTIVE[self.optimizer](lr, self.momentum, self.beta2, self.tau)
        return FedAvgM(lr, self.momentum)
