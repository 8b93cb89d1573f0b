"""How well devices agree: who pushes the model elsewhere than most, though not farther.

Two devices agree by the cosines of their changes over the blocks that both trained, beside what is
usual there. A device may share its blocks mostly with liars; so whom it agrees with counts by how
well those agree with everybody, which is what the main eigenvector of all pairs has. One round may
deceive; so a device's agreement is a mean over its rounds, of which the last count most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocofl.fl.rules import most_hostile

MEMORY = "agreement"
"""The server's memory that holds each device's agreement so far."""
# Where two agree less than this there is no direction that one could oppose.
_CONSENSUS = 0.1
_KEPT = 0.7


class Agreement:
    """Takes in the blocks of a round one by one, and keeps cosines only."""

    def __init__(self, devices: int) -> None:
        self._cosines, self._usual = torch.zeros(2, devices, devices, dtype=torch.float64)

    def add(self, devices: Sequence[int], changes: Tensor) -> None:
        """A block: the numbers of those who trained it, and (device, element) their changes."""
        rows = changes / changes.norm(dim=1, keepdim=True).clamp(min=1e-300)
        others = ~torch.eye(len(devices), dtype=torch.bool)
        if len(devices) > 1:
            found, where = (rows @ rows.T).cpu() * others, torch.tensor(devices)
            pairs = where[:, None], where
            self._cosines[pairs] += found
            self._usual[pairs] += max(float(found[others].abs().median()), _CONSENSUS) * others

    def by_device(self, before: Tensor) -> Tensor:
        """From 1, like most, to -1, against them; ``before`` is that so far, or NaN."""
        # Who sends the very same as another agrees no more than two honest devices do.
        pairs = (self._cosines / self._usual.where(self._usual > 0, 1.0)).clamp(-1, 1)
        main = torch.linalg.eigh(pairs).eigenvectors[:, -1]
        # What most do is right, and those who were right before count for that.
        main = -main if main @ before.nan_to_num(1.0) < 0 else main
        shared = (self._usual > 0).double() @ main.abs()
        found = (pairs @ main) / shared.where(shared > 0, 1.0)
        found = (found / found.median().clamp(min=_CONSENSUS)).clamp(-1, 1)
        mean = torch.where(before.isnan(), found, _KEPT * before + (1 - _KEPT) * found)
        return torch.where(shared > 0, mean, before.nan_to_num(1.0))


def apart(agreement: Tensor, least: float, trim: float) -> list[int]:
    """The few who agree less than ``least``; nobody where more do than can be hostile.

    Those are groups with data of their own, not liars. One more may be so by chance.

    >>> apart(torch.tensor([1.0, 0.9, -0.8, 1.0]), 0.5, 0.3)
    [2]
    >>> apart(torch.tensor([1.0, 0.4, -0.8, -0.5, 1.0]), 0.5, 0.2)
    []
    """
    order = agreement.argsort(stable=True).tolist()
    found = [device for device in order if agreement[device] < least]
    most = most_hostile(len(order), trim)
    return found[:most] if len(found) <= most + 1 else []
