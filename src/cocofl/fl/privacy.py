"""Differential privacy of devices: what each contributes is clipped, and the sum of it is noisy.

DP-FedAvg (McMahan et al., 2018). Whoever sees the model after every round can hardly tell whether
a device's data was among those that made it. How that reads as ε is in
:mod:`cocofl.accounting`; what it means and what it does not cover, in ``docs/guides/privacy.md``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cocofl.accounting import SAMPLINGS
from cocofl.checks import check_choice, check_number
from cocofl.errors import InvalidExperiment
from cocofl.fl.merge import Accumulator, Mean, Merge, ServerOptimizer
from cocofl.fl.state import Contribution, ServerState, Tensors, is_scale
from cocofl.fl.trainer import Trainer, norms_of, parameter_keys
from cocofl.rng import stream

_VARIANCE, _STATISTICS = "running_var", ("running_mean", "running_var")
# Noise must not make a variance negative, or so small that what it divides explodes.
_VARIANCE_FACTOR = 2.0


@dataclass(frozen=True)
class Privacy:
    """Section ``[privacy]`` of an experiment: what one device may move, and what noise is added.

    Off by default; it is on where ``clip`` is above 0.
    """

    clip: float = 0.0
    """The largest norm of a device's change of all parameters; a longer one is shortened to it."""
    statistics_clip: float = 1.0
    """The same of its change of norm statistics, where the network has some."""
    noise: float = 1.0
    """The standard deviation of the noise on the sum, as a multiple of what one device can move."""
    delta: float = 1e-5
    """ε is for this δ: well below one over the number of devices."""
    sampling: str = "poisson"
    """``poisson``: each device's coin decides whether it is asked; ``fixed``: always as many."""
    max_epsilon: float = math.inf
    """An experiment that would come to a larger ε is refused."""

    def __post_init__(self) -> None:
        check_number("privacy.clip", self.clip, least=0)
        check_number("privacy.statistics_clip", self.statistics_clip, above=0)
        check_number("privacy.noise", self.noise, least=0.01)
        check_number("privacy.delta", self.delta, above=0, below=1)
        check_choice("privacy.sampling", self.sampling, SAMPLINGS)
        check_number("privacy.max_epsilon", self.max_epsilon, above=0, finite=False)

    @property
    def is_on(self) -> bool:
        """Whether anything of this applies."""
        return self.clip > 0


# --- noise ---------------------------------------------------------------------------------------


class Normal(Protocol):
    """Draws from the normal distribution; one of numpy's generators is one."""

    def standard_normal(self, size: Any, /) -> NDArray[np.float64]:
        """As many numbers as a shape holds."""


NoiseOfRound = Callable[[int], Normal]
"""By the index of a round, where its noise comes from."""


def seeded_noise(seed: int) -> NoiseOfRound:
    """The same whenever the same experiment is run: to find out what noise costs, not to hide."""
    return partial(stream, seed, "privacy")


class SystemNormal:
    """Numbers that nobody can repeat: the operating system's, by the method of Box and Muller.

    A generator's seed would be in the experiment, and whoever knows it can take the noise away.
    """

    def standard_normal(self, size: Any, /) -> NDArray[np.float64]:
        """As many numbers as a shape holds."""
        count = math.prod(size)
        bits = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count)
        # 53 bits are what a float64 holds; no logarithm is taken of 0.
        length, angle = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53
        found: NDArray[np.float64] = np.sqrt(-2 * np.log(length)) * np.cos(2 * np.pi * angle)
        return found.reshape(size)


def system_noise(_round_index: int) -> Normal:
    """For devices whose data is to be hidden."""
    return SystemNormal()


# --- what is hidden ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bounds:
    """How far one device can move each tensor of a network, and how much noise hides that."""

    privacy: Privacy
    shapes: Mapping[str, tuple[int, ...]]
    """Of all that training can change: parameters, each once, and norm statistics."""
    learned: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Of a weight under several keys, by each further one the first."""

    @classmethod
    def of(cls, model: nn.Module, privacy: Privacy) -> Bounds:
        """Of a network."""
        first, own = parameter_keys(model), model.state_dict()
        tracked = {id(norm) for norm in norms_of(model) if norm.track_running_stats}
        statistics = [
            f"{name}.{statistic}"
            for name, module in model.named_modules()
            if id(module) in tracked
            for statistic in _STATISTICS
        ]
        keys = [key for key, one in first.items() if key == one and own[key].is_floating_point()]
        return cls(
            privacy,
            {key: tuple(own[key].shape) for key in (*keys, *statistics)},
            frozenset(keys),
            {key: one for key, one in first.items() if key != one},
        )

    @classmethod
    def of_trainer(cls, trainer: Trainer, privacy: Privacy) -> Bounds:
        """Of what devices train: a network, or adapters beside one that nobody changes."""
        chain = trainer.chain()
        if chain.learned is None:
            return cls.of(trainer.model(), privacy)
        own = chain.state_dict()
        shapes = {key: tuple(own[key].shape) for keys in chain.learned for key in keys}
        return cls(privacy, shapes, frozenset(shapes))

    def clip(self, *, learned: bool) -> float:
        """The largest norm of a device's change of parameters, or of statistics."""
        return self.privacy.clip if learned else self.privacy.statistics_clip

    def spread(self, key: str) -> float:
        """The standard deviation of a sum's noise.

        Parameters and statistics are clipped each on their own. In units of its clip a device
        moves each by 1, so both together by √2.
        """
        kinds = 1 if len(self.learned) in (0, len(self.shapes)) else 2
        return self.privacy.noise * math.sqrt(kinds) * self.clip(learned=key in self.learned)

    def noise(self, normal: Normal) -> Tensors:
        """Noise on a sum, by key."""
        return {
            key: torch.from_numpy(normal.standard_normal(shape) * self.spread(key)).float()
            for key, shape in self.shapes.items()
        }

    def where(self, applies: Callable[[str], bool]) -> Tensors:
        """By key, 1 where something applies to a tensor."""
        return {key: torch.ones(shape) for key, shape in self.shapes.items() if applies(key)}


def shareable(sent: Contribution) -> Contribution:
    """What a device sends where there is privacy: nothing that neither clip nor noise covers.

    Its samples do not count, its loss is its own, and scales are computed on the fly.
    """
    tensors = {key: tensor for key, tensor in sent.tensors.items() if not is_scale(key)}
    return replace(sent, tensors=tensors, samples=1, loss=0.0)


def clipped(sent: Contribution, state: ServerState, bounds: Bounds) -> Contribution:
    """What a device sends where nobody else can clip it, since only sums of it are seen."""
    merged = PrivateMean(bounds, devices=1, noise=lambda _round: _Silence())(state, [sent]).tensors
    return replace(sent, tensors={key: merged.get(key, t) for key, t in sent.tensors.items()})


class _Silence:
    def standard_normal(self, size: Any, /) -> NDArray[np.float64]:
        return np.zeros(size)


# --- the merge -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PrivateMean(Merge):
    """The state moves by a noisy sum of clipped changes over a number of devices known beforehand.

    Every device weighs the same, since its number of samples is private, too. Whatever cannot be
    bounded does not count: scales, measurements, tensors that training does not change.

    >>> privacy = Privacy(clip=5.0, noise=0.01)
    >>> bounds = Bounds(privacy, {"a": (2,)}, frozenset("a"))
    >>> merge = PrivateMean(bounds, devices=10, noise=seeded_noise(0))
    >>> sent = [Contribution({"a": torch.tensor([30.0, 40.0])}, 100)]
    >>> [round(x, 1) for x in merge(ServerState({"a": torch.zeros(2)}), sent).tensors["a"].tolist()]
    [0.3, 0.4]
    """

    moves_everything: ClassVar[bool] = True

    bounds: Bounds
    devices: int
    """How many are expected; fewer or more do not change it."""
    noise: NoiseOfRound
    clips: bool = True
    """Else devices have clipped what they sent, and of it only sums are known: a contribution
    stands for as many devices as it has samples."""

    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        """A round begins."""
        noise = self.bounds.noise(self.noise(round_index))
        return _NoisySum(self, state, state.layout.from_keys(noise))


class _NoisySum:
    def __init__(self, merge: PrivateMean, state: ServerState, noise: Tensors) -> None:
        self._merge, self._state, self._noise = merge, state, noise
        bounds, from_keys = merge.bounds, state.layout.from_keys
        self._moves = from_keys(bounds.where(lambda _key: True))
        self._is_variance = from_keys(bounds.where(lambda key: key.endswith(_VARIANCE)))
        self._totals = {
            name: torch.zeros_like(part, dtype=torch.float64) for name, part in noise.items()
        }

    def add(self, contribution: Contribution) -> None:
        """Add a clipped change."""
        state, bounds = self._state, self._merge.bounds
        changes: dict[str, tuple[Any, Tensor]] = {}
        for part in state.layout.parts_of(contribution):
            name = bounds.aliases.get(part.name, part.name)
            if part.measured or name not in self._noise or name in changes:
                continue
            place = ... if part.place is None else part.place
            votes = self._moves[name][place]
            votes = votes if part.votes is None else votes * part.votes
            changes[name] = place, (part.values.double() - state.parts[name][place]) * votes
        for learned in (True, False):
            own = {n: change for n, change in changes.items() if _is_learned(state, n) is learned}
            self._add(own, bounds.clip(learned=learned), contribution.samples)
        self._state = state.remembering(contribution)

    def _add(self, changes: Mapping[str, tuple[Any, Tensor]], clip: float, devices: int) -> None:
        if not changes:
            return
        factor: Tensor | int = devices
        if self._merge.clips:
            norm = torch.stack([change.norm() for _, change in changes.values()]).norm()
            factor = clip / norm.clamp(min=clip)
        for name, (place, change) in changes.items():
            self._totals[name][place] += change * factor

    def finish(self) -> ServerState:
        """Add the noise, also where nobody came: who came is a secret."""
        old, parts = self._state.parts, dict(self._state.parts)
        for name, noise in self._noise.items():
            was = old[name].double()
            new = was + (self._totals[name] + noise) / self._merge.devices
            if name in self._is_variance:
                bounded = new.clamp(was / _VARIANCE_FACTOR, was * _VARIANCE_FACTOR)
                new = torch.where(self._is_variance[name] > 0, bounded, new)
            parts[name] = new.to(old[name].dtype)
        for key, first in self._merge.bounds.aliases.items():
            if key in parts and first in parts:
                parts[key] = parts[first].clone()
        return replace(self._state, parts=parts)


def _is_learned(state: ServerState, name: str) -> bool:
    return state.layout.is_learned(name)


def privately(merge: Merge, mean: PrivateMean) -> Merge:
    """A strategy's merge with a private mean at its bottom.

    What a server does with that is its own affair: it has seen nothing else.
    """
    if type(merge) is Mean and merge.rules is None:
        return mean
    if isinstance(merge, ServerOptimizer) and type(merge).begin is ServerOptimizer.begin:
        return merge.over(privately(merge.merge, mean))
    raise InvalidExperiment(
        f"privacy is on, but the strategy merges by {type(merge).__name__}, and nobody knows how "
        "far one device can move what that makes; expected Mean, or a ServerOptimizer on top of it"
    )
