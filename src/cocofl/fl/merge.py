"""Merging partial updates on the server (Algorithm 2 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]

SCALE_PREFIX = "scales."


class Contribution(NamedTuple):
    """What one accepted device sent, and how many samples stand behind it."""

    tensors: Mapping[str, Tensor]
    samples: int


def merge(state: Mapping[str, Tensor], contributions: Iterable[Contribution]) -> State:
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
    measured: dict[str, tuple[Tensor, int]] = {}
    samples = 0
    for contribution in contributions:
        samples += contribution.samples
        for key, tensor in contribution.tensors.items():
            weighted = tensor.double() * contribution.samples
            if key.startswith(SCALE_PREFIX):
                total, weight = measured.get(key, (torch.zeros_like(weighted), 0))
                measured[key] = total + weighted, weight + contribution.samples
            else:
                change = weighted - state[key].double() * contribution.samples
                changes[key] = changes[key].add_(change) if key in changes else change
    merged = dict(state)
    for key, change in changes.items():
        merged[key] = (state[key].double() + change / samples).to(state[key].dtype)
    for key, (total, weight) in measured.items():
        merged[key] = (total / weight).float()
    return merged
