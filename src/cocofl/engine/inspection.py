"""How each update looks beside the others of its round, so that an operator sees who is far off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low

from cocofl.fl.changes import ENOUGH, Changes, changes_of, usual_sizes
from cocofl.fl.state import Contribution, Group, ServerState, is_scale
from cocofl.runlog import DeviceFigures

FAR = 6.0
"""An outlier is so many deviations above the median: a deviation is the median one (of a normal
distribution that is 1.48 times as much), and at least a third of the median itself, since a few
devices may agree by chance."""
SCALE_FACTOR = 50.0
"""Or it moves a known scale by more than this; honest devices move one up to tenfold."""
_TO_SIGMA, _LEAST_DEVIATION = 1.4826, 1 / 3
# A loss that is small tells nothing: late in training it differs tenfold between honest devices.
_LOSS_FLOOR = 0.5


class Inspection:
    """Takes in the contributions of a round one by one, and keeps their norms."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._sent: list[tuple[Contribution, Changes, float]] = []

    def add(self, contribution: Contribution) -> None:
        """Measure what a device sent."""
        changes = changes_of(self._state, contribution)
        # The tensors go, the facts stay.
        facts = Contribution(
            {}, contribution.samples, contribution.loss, device=contribution.device
        )
        self._sent.append((facts, changes, _scale_change(self._state, contribution)))

    def figures(self) -> list[DeviceFigures]:
        """Of all, once they are there."""
        usual = usual_sizes(self._state, [changes for _, changes, _ in self._sent])
        limits = {group: _limit(self._sizes(group), usual[group]) for group in usual}
        losses = [facts.loss for facts, _, _ in self._sent]
        most = max(_limit(losses, median(losses)), _LOSS_FLOOR) if losses else 0.0
        found = []
        for facts, changes, scale_change in self._sent:
            ratios = [
                change.size / usual[group] if usual[group] > 0 else float(change.size > 0)
                for group, change in changes.items()
            ]
            is_far = any(change.size > limits[group] for group, change in changes.items())
            found.append(
                DeviceFigures(
                    facts.device,
                    facts.samples,
                    _short(facts.loss),
                    _short(math.fsum(change.squares for change in changes.values()) ** 0.5),
                    _short(max(ratios, default=0.0)),
                    _short(scale_change),
                    is_far or facts.loss > most or scale_change > SCALE_FACTOR,
                )
            )
        return found

    def _sizes(self, group: Group) -> list[float]:
        return [changes[group].size for _, changes, _ in self._sent if group in changes]


def _limit(values: Sequence[float], usual: float) -> float:
    """Above it a value is far off; of few values only what is usual says how far."""
    deviation = 0.0
    if len(values) >= ENOUGH:
        deviation = _TO_SIGMA * median_low(abs(value - usual) for value in values)
    return usual + FAR * max(deviation, _LEAST_DEVIATION * usual)


def _scale_change(state: ServerState, contribution: Contribution) -> float:
    """The largest factor by which a device moves a scale that the server knows."""
    known = state.tensors
    factors = [
        float(tensor) / float(known[key])
        for key, tensor in contribution.tensors.items()
        if is_scale(key) and key in known
    ]
    return max((max(factor, 1 / factor) for factor in factors if factor > 0), default=1.0)


def _short(value: float) -> float:
    """Six digits are enough for whoever reads it."""
    return float(f"{value:.6g}")
