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
    scores = _exact(outputs.flatten(0, -2))
    each = F.cross_entropy(scores, labels.flatten(), reduction="none")
    return _mean(each, labels, valid, labels >= 0)


def squared_error(outputs: Tensor, labels: Tensor, valid: Tensor, _counts: Any = None) -> Tensor:
    """The mean over a device's valid samples, and over their numbers."""
    found = _exact(outputs.flatten())
    return _mean(
        F.mse_loss(found, labels.flatten().to(found.dtype), reduction="none"), labels, valid
    )


def binary_cross_entropy(
    outputs: Tensor, labels: Tensor, valid: Tensor, _counts: Any = None
) -> Tensor:
    """The mean over a device's valid samples, and over the classes that each may have."""
    scores = _exact(outputs)
    each = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")
    return _mean(each, labels, valid)


def _mean(each: Tensor, labels: Tensor, valid: Tensor, real: Tensor | None = None) -> Tensor:
    """By device, over samples that count and all that each of them has that is ``real``."""
    each = each.view(*labels.shape[:2], -1)
    counts = (torch.arange(labels.shape[1], device=labels.device) < valid[:, None])[:, :, None]
    total = torch.where(counts, each, 0.0).sum((1, 2))
    if real is None or labels.ndim == 2:  # a class alone is always one
        return total / (valid.clamp_min(1) * each.shape[2])
    return total / (counts & real.view(each.shape)).sum((1, 2)).clamp_min(1)


def of_classes(scores: Tensor, present: Tensor) -> Tensor:
    """With 0, which gets no gradient, for classes that are not ``present``, (device, class)."""
    return scores * present.view(len(present), *[1] * (scores.ndim - 2), -1)


def lowered(scores: Tensor, margins: Tensor) -> Tensor:
    """With each class's scores lowered by its margin, (device, class); scores beyond are kept."""
    kept = margins.new_zeros(len(margins), scores.shape[-1] - margins.shape[1])
    scores, by = _exact(scores), torch.cat([margins, kept], 1)
    return scores - by.to(scores.dtype).view(len(by), *[1] * (scores.ndim - 2), -1)


def distance(student: Tensor, teacher: Tensor, valid: Tensor, taught: Tensor) -> Tensor:
    """How far scores are from a teacher's: ``F.kl_div`` with ``batchmean`` over valid samples.

    0 for devices that are not ``taught``.
    """
    each = torch.arange(student.shape[1], device=student.device) < valid[:, None]
    counts = (each & taught[:, None]).view(*each.shape, *[1] * (student.ndim - 2))

    def logarithms(scores: Tensor) -> Tensor:
        # Left out before the softmax, what does not count has no gradient, whatever it is.
        counting = torch.where(counts, _exact(scores), 0.0)
        return F.log_softmax(counting, -1)

    own, others = logarithms(student), logarithms(teacher.detach())
    each_score = F.kl_div(own, others, reduction="none", log_target=True)
    return each_score.flatten(1).sum(1) / valid.clamp_min(1)


def _exact(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


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
