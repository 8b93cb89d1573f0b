"""States side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(t, other[key]) for key, t in one.items())
