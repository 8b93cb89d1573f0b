"""The loss of each device, over the samples of its mini-batch that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

StackedLoss = Callable[[Any, Tensor, Tensor, "list[int] | None"], Tensor]
"""From outputs, labels and the number of valid samples (on the device; on the host) to (device)."""


def cross_entropy(outputs: Tensor, labels: Tensor, valid: Tensor, _counts: Any = None) -> Tensor:
    """The mean over a device's valid samples (and positions, where each has several labels)."""
    scores = outputs.flatten(0, -2)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    each = F.cross_entropy(scores, labels.flatten(), reduction="none")
    each = each.view(*labels.shape[:2], -1)
    counts = torch.arange(labels.shape[1], device=labels.device) < valid[:, None]
    total = torch.where(counts[:, :, None], each, 0.0).sum((1, 2))
    return total / (valid.clamp_min(1) * each.shape[2])


def of_classes(scores: Tensor, present: Tensor) -> Tensor:
    """With 0, which gets no gradient, for classes that are not ``present``, (device, class)."""
    return scores * present.view(len(present), *[1] * (scores.ndim - 2), -1)


def one_by_one(loss: Callable[[Any, Tensor], Tensor]) -> StackedLoss:
    """Any loss of one device's outputs and labels."""

    def stacked(outputs: Any, labels: Tensor, valid: Tensor, counts: list[int] | None) -> Tensor:
        found = []
        for d in range(len(valid)):
            n = labels.shape[1] if counts is None else counts[d]

            def own(x: Any, *, device: int = d, first: int = n) -> Any:
                return x[device, :first] if isinstance(x, Tensor) else x

            if n == 0:
                leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
                found.append(leaves[0][d].sum() * 0.0)
            else:
                found.append(loss(pytree.tree_map(own, outputs), own(labels)))
        return torch.stack(found)

    return stacked
