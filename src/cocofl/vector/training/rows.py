"""States of the server or of devices, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """States as rows: (state, place). Scales are NaN where nobody has measured them."""

    parameters: Tensor
    statistics: Tensor
    scales: Tensor

    def clone(self) -> Rows:
        """A copy."""
        return Rows(*(rows.clone() for rows in self))

    @classmethod
    def below_each_other(cls, several: Sequence[Rows]) -> Rows:
        """All states of several."""
        return several[0] if len(several) == 1 else cls(*map(torch.cat, zip(*several, strict=True)))
