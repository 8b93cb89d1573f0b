"""What goes wrong on purpose: durations that differ from the plan, and updates that get lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cocofl.checks import check_number
from cocofl.rng import stream


@dataclass(frozen=True)
class Faults:
    """The section ``[faults]`` of an experiment.

    ``jitter`` spreads durations (the σ of a log-normal factor); ``dropout`` loses updates.
    """

    jitter: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_number("faults.jitter", self.jitter, least=0)
        check_number("faults.dropout", self.dropout, least=0, most=1)

    def fate(self, seed: int, round_index: int, device: int, time: float) -> tuple[str, float]:
        """``merged``, ``late`` or ``lost``, and how long it took in parts of the deadline.

        >>> Faults().fate(0, 0, 0, 0.5)
        ('merged', 0.5)
        >>> Faults(dropout=1.0).fate(0, 0, 0, 0.5)[0]
        'lost'
        """
        rng = stream(seed, "faults", round_index, device)
        lost = rng.random() < self.dropout
        duration = time * float(np.exp(self.jitter * rng.standard_normal()))
        if lost:
            return "lost", duration
        # Without jitter a device that planned to need all of the time is in time.
        return ("late" if duration > 1 + 1e-9 else "merged"), duration
