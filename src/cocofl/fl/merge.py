"""Merging what devices sent: whole tensors (Algorithm 2 of the paper), or slices of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.models.widths import Place

State = dict[str, Tensor]
Places = Callable[[float], Mapping[str, Place]]
"""By width, where the tensors of a network that narrow lie in those of the full one."""

SCALE_PREFIX = "scales."


@dataclass(frozen=True)
class Contribution:
    """What one device sent, and how many samples stand behind it."""

    tensors: Mapping[str, Tensor]
    samples: int
    loss: float = 0.0
    """The mean over its mini-batches."""
    width: float = 1.0
    """The tensors are those of the network this wide."""
    rows: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Of these tensors only these rows count: of the others the device knows nothing."""

    @property
    def nbytes(self) -> int:
        """The upload volume."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_finite(self) -> bool:
        """Whether training went well."""
        return bool(np.isfinite(self.loss)) and all(
            bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values()
        )


def merge(
    state: Mapping[str, Tensor],
    contributions: Iterable[Contribution],
    _places: Places | None = None,
) -> State:
    """Move each tensor by its mean change over all devices, weighted by their samples.

    A device that froze a tensor votes for its present value, so with equal samples this is the
    paper's Algorithm 2. A scale is not a parameter: it is averaged over those who measured it,
    and one that nobody measured this round keeps its value.

    Contributions are consumed one at a time, in the order given; sums are kept in float64, so
    the result hardly depends on that order, and for the same order it is the same to the bit.

    >>> old = {"a": torch.zeros(1), "b": torch.ones(1)}
    >>> merge(old, [Contribution({"a": torch.ones(1)}, 30), Contribution({}, 10)])
    {'a': tensor([0.7500]), 'b': tensor([1.])}
    """
    changes: dict[str, Tensor] = {}
    measured = _Means()
    samples = 0
    for contribution in contributions:
        samples += contribution.samples
        for key, tensor in contribution.tensors.items():
            if key.startswith(SCALE_PREFIX):
                measured.add(key, tensor, contribution.samples)
                continue
            change = (tensor.double() - state[key].double()) * contribution.samples
            changes[key] = changes[key].add_(change) if key in changes else change
    merged = dict(state)
    for key, change in changes.items():
        merged[key] = (state[key].double() + change / samples).to(state[key].dtype)
    return merged | measured.all()


def merge_nested(
    state: Mapping[str, Tensor], contributions: Iterable[Contribution], places: Places
) -> State:
    """Average each coordinate over the devices whose network has it, weighted by their samples.

    Coordinates that nobody trained keep their value. What a device sends beside the network's
    tensors (statistics of a width of its own) is averaged over those who sent it.

    >>> old = {"a": torch.zeros(3)}
    >>> narrow = lambda width: {"a": (slice(0, round(3 * width)),)}
    >>> sent = [Contribution({"a": torch.ones(3)}, 1),
    ...         Contribution({"a": torch.full((1,), 3.0)}, 1, width=1 / 3)]
    >>> merge_nested(old, sent, narrow)
    {'a': tensor([2., 1., 1.])}
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    beside = _Means()
    for contribution in contributions:
        place_of = places(contribution.width)
        for key, tensor in contribution.tensors.items():
            if key not in place_of:
                beside.add(key, tensor, contribution.samples)
                continue
            if key not in sums:
                zeros = torch.zeros(state[key].shape, dtype=torch.float64)
                sums[key] = zeros, torch.zeros_like(zeros)
            total, weight = sums[key]
            votes = torch.full(tensor.shape, float(contribution.samples), dtype=torch.float64)
            if key in contribution.rows:
                silent = np.setdiff1d(np.arange(len(votes)), contribution.rows[key])
                votes[torch.from_numpy(silent)] = 0.0
            place = place_of[key]
            total[place] += tensor.double() * votes
            weight[place] += votes
    merged = dict(state)
    for key, (total, weight) in sums.items():
        mean = torch.where(weight > 0, total / weight.clamp(min=1e-300), state[key].double())
        merged[key] = mean.to(state[key].dtype)
    return merged | beside.all()


class _Means:
    """Means over those who sent a tensor at all, weighted by samples."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, key: str, tensor: Tensor, samples: int) -> None:
        total, weight = self._sums.get(key, (torch.zeros_like(tensor, dtype=torch.float64), 0))
        self._sums[key] = total + tensor.double() * samples, weight + samples

    def all(self) -> State:
        return {key: (total / weight).float() for key, (total, weight) in self._sums.items()}
