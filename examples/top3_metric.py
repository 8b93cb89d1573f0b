"""A metric of your own: how often the true class is among the three best.

cocofl run --set 'evaluation.metrics=["accuracy", "f1", "top3_metric:top3"]'

It sums up over mini-batches, so it is the same on every engine, and it appears in the run folder,
in tables, in the report and in trackers by its name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cocofl.metrics import Metric


def hits(outputs: Tensor, labels: Tensor, _classes: int) -> Tensor:
    """How many there are, and of how many."""
    best = outputs.flatten(0, -2).topk(3, dim=-1).indices
    found = (best == labels.flatten()[:, None]).any(1)
    return torch.stack([found.sum(), torch.ones_like(found).sum()])


def top3() -> Metric:
    """What ``evaluation.metrics`` names."""
    return Metric("top3", hits, lambda sums: float(sums[0] / sums[1]), is_share=True)
