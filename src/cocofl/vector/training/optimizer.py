"""Descent on rows of parameters: one device per row, each with its own rate.

An optimizer of one's own is one class: from what it does to rows follows what it does to the
parameters of a device that trains alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from cocofl.vector.kernels.choice import PLAIN, KernelSet

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # PyTorch's defaults for Adam


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """The settings that all have: what is added to gradients, and where they are clipped before.

    A subclass says what it remembers (``memory``) and where to go (``direction``). What it
    remembers are tensors with a row per device; they stay where they are, so that captured steps
    find them.
    """

    weight_decay: float = 0.0
    clip: float | None = None
    """The largest norm of a device's gradient."""

    @abstractmethod
    def memory(self, parameters: Tensor) -> tuple[Tensor, ...]:
        """Room for what it remembers, which is zero when a round begins."""

    def step(
        self,
        parameters: Tensor,
        gradients: Tensor,
        memory: tuple[Tensor, ...],
        lr: Tensor,
        learns: Tensor,
        valid: Tensor,
        kernels: KernelSet = PLAIN,
        copies: Sequence[Tensor] = (),
    ) -> None:
        """Move the places that learn, (device, place); the others keep their bits.

        A device without ``valid`` samples rests. ``copies`` hold the same numbers where something
        learns, and still do so afterwards.
        """
        if self._is_plain and (own := kernels.own("rows", parameters)) is not None:
            own.sgd(parameters, gradients, learns, valid, lr, self.weight_decay, copies)
            return
        learns = learns & (valid > 0)[:, None]
        if self.clip is not None:
            norm = torch.where(learns, gradients, 0.0).square().sum(1, keepdim=True).sqrt()
            gradients = gradients * (self.clip / (norm + 1e-6)).clamp_max(1.0)
        if self.weight_decay:
            gradients = gradients.add(parameters, alpha=self.weight_decay)
        direction, rate = self.direction(gradients, memory, lr, learns)
        moved = torch.addcmul(parameters, direction, rate[:, None], value=-1)
        parameters.copy_(torch.where(learns, moved, parameters))
        for copy in copies:
            copy.copy_(torch.where(learns, parameters.to(copy.dtype), copy))

    def for_one_device(self, parameters: Iterable[nn.Parameter], lr: float) -> Descent:
        """The same for a device that trains alone; clipping is left to who calls it."""
        return _RowDescent(parameters, lr, replace(self, clip=None))

    @property
    def _is_plain(self) -> bool:
        """Whether gradients are all it goes by, so that one pass over memory is enough."""
        return False

    @abstractmethod
    def direction(
        self, gradients: Tensor, memory: tuple[Tensor, ...], lr: Tensor, learns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Where to go, (device, place), and how far, (device); what it remembers changes."""


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """As ``torch.optim.SGD``."""

    momentum: float = 0.0

    def for_one_device(self, parameters: Iterable[nn.Parameter], lr: float) -> Descent:
        """As PyTorch computes it."""
        return _SgdDescent(parameters, lr, self)

    def memory(self, parameters: Tensor) -> tuple[Tensor, ...]:
        """The velocity, where there is momentum."""
        return (torch.zeros_like(parameters),) if self.momentum else ()

    @property
    def _is_plain(self) -> bool:
        return self.clip is None and not self.momentum

    def direction(
        self, gradients: Tensor, memory: tuple[Tensor, ...], lr: Tensor, learns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Along the velocity."""
        for velocity in memory:
            velocity.copy_(torch.where(learns, velocity * self.momentum + gradients, velocity))
            gradients = velocity
        return gradients, lr


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """As ``torch.optim.Adam``."""

    def for_one_device(self, parameters: Iterable[nn.Parameter], lr: float) -> Descent:
        """As PyTorch computes it."""
        return _AdamDescent(parameters, lr, self)

    def memory(self, parameters: Tensor) -> tuple[Tensor, ...]:
        """How many steps each device took, and running means of gradients and their squares."""
        # In float32 the corrections of the first steps would be off in the fifth digit.
        steps = torch.zeros(len(parameters), dtype=torch.float64, device=parameters.device)
        return steps, torch.zeros_like(parameters), torch.zeros_like(parameters)

    def direction(
        self, gradients: Tensor, memory: tuple[Tensor, ...], lr: Tensor, learns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Along the mean gradient, as far as gradients agree."""
        steps, mean, square = memory
        steps += learns.any(1)
        mean.copy_(torch.where(learns, torch.lerp(mean, gradients, 1 - _BETA1), mean))
        squared = torch.addcmul(square * _BETA2, gradients, gradients, value=1 - _BETA2)
        square.copy_(torch.where(learns, squared, square))

        taken = steps.clamp_min(1.0)
        rate = (lr / (1 - _BETA1**taken)).to(gradients.dtype)
        spread = (1 - _BETA2**taken).sqrt().to(gradients.dtype)
        return mean / (square.sqrt() / spread[:, None] + _EPS), rate


class Descent(ABC):
    """The optimizer of a device that trains alone: what training calls of those of PyTorch.

    It is none of them, but calls the same functions: the first ``torch.optim.Optimizer`` of a
    process loads PyTorch's compiler, which would be a fifth of a device's memory.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self._parameters, self._lr = list(parameters), lr

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move all parameters; one without a gradient stays."""
        moving = [p for p in self._parameters if p.grad is not None]
        self._move(moving, [p.grad for p in moving if p.grad is not None])

    @abstractmethod
    def _move(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """Move these by what they remember and by their gradients."""


class _SgdDescent(Descent):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, rule: Sgd) -> None:
        super().__init__(parameters, lr)
        self._rule = rule
        self._velocity: dict[nn.Parameter, Tensor | None] = {}

    def _move(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        momentum, weight_decay = self._rule.momentum, self._rule.weight_decay
        velocity = [self._velocity.get(p) for p in parameters] if momentum else []
        sgd(
            list(parameters),
            gradients,
            velocity,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=self._lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self._velocity.update(zip(parameters, velocity, strict=False))


class _AdamDescent(Descent):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, rule: Adam) -> None:
        super().__init__(parameters, lr)
        self._weight_decay = rule.weight_decay
        self._memory: dict[nn.Parameter, tuple[Tensor, Tensor, Tensor]] = {}

    def _move(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        for p in parameters:
            if p not in self._memory:
                self._memory[p] = (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0))
        means, squares, steps = ([self._memory[p][i] for p in parameters] for i in range(3))
        adam(
            list(parameters),
            gradients,
            means,
            squares,
            [],
            steps,
            amsgrad=False,
            beta1=_BETA1,
            beta2=_BETA2,
            lr=self._lr,
            weight_decay=self._weight_decay,
            eps=_EPS,
            maximize=False,
        )


class _RowDescent(Descent):
    """An optimizer of rows on a single row: all parameters of one device, behind each other."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, rule: Optimizer) -> None:
        super().__init__(parameters, lr)
        self._rule = rule
        self._memory: tuple[Tensor, ...] | None = None

    def _move(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        given = dict(zip(parameters, gradients, strict=True))
        parameters = self._parameters  # one without a gradient has its place in the row, too
        row = torch.cat([p.flatten() for p in parameters])[None]
        moves = [torch.full_like(p, p in given, dtype=torch.bool) for p in parameters]
        learns = torch.cat([m.flatten() for m in moves])[None]
        known = [given[p] if p in given else torch.zeros_like(p) for p in parameters]
        gradient = torch.cat([g.flatten() for g in known])[None]
        if self._memory is None:
            self._memory = self._rule.memory(row)
        one = torch.ones(1, device=row.device)
        self._rule.step(row, gradient, self._memory, one.to(row) * self._lr, learns, one)
        for p, own in zip(parameters, row[0].split([p.numel() for p in parameters]), strict=True):
            p.copy_(own.view_as(p))
