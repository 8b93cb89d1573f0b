"""Mean and deviation of each channel of a training part, from its chunks."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidData

Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation by channel."""


class Statistics(Protocol):
    """What is seen of the samples on their way to the file."""

    def add(self, chunk: NDArray[Any]) -> None:
        """See more samples."""

    def moments(self) -> Moments:
        """Of all that was seen."""


class PixelStatistics:
    """Of uint8 images (sample, height, width, channel), as pixels from 0 to 1.

    They are counted in integers, thus exact, whatever the chunks are.
    """

    def __init__(self, channels: int) -> None:
        self._counts = np.zeros((channels, 256), np.int64)

    def add(self, chunk: NDArray[Any]) -> None:
        """Count how often a channel has each value."""
        for channel, values in enumerate(chunk.reshape(-1, len(self._counts)).T):
            self._counts[channel] += np.bincount(values, minlength=256)

    def moments(self) -> Moments:
        """Of all pixels; there is at least one."""
        n, values = int(self._counts[0].sum()), np.arange(256)
        sums, squares = (self._counts @ values).tolist(), (self._counts @ values**2).tolist()
        mean = [total / n / 255 for total in sums]
        variance = [
            (n * square - total * total) / (n * n)
            for total, square in zip(sums, squares, strict=True)
        ]
        return tuple(mean), tuple(_spread(math.sqrt(value) / 255) for value in variance)


class NumberStatistics:
    """Of numbers (sample, channel, …).

    Each chunk's mean and squares about it are joined to those before it (Chan et al., 1979): large
    numbers that differ little, like air pressure in pascal, would cancel out in plain sums.
    """

    def __init__(self, channels: int) -> None:
        self._samples = self._count = 0
        self._mean, self._squares = np.zeros(channels), np.zeros(channels)

    def add(self, chunk: NDArray[Any]) -> None:
        """See more samples, all of whose numbers must be finite."""
        flat = chunk.reshape(len(chunk), chunk.shape[1], -1).astype(np.float64)
        if not np.isfinite(flat).all():
            sample, channel, _ = np.argwhere(~np.isfinite(flat))[0]
            raise InvalidData(
                f"sample {self._samples + sample} has something that is no finite number in "
                f"channel (or feature) {channel}; fill in or leave out what is missing"
            )
        self._samples += len(flat)
        count = flat.shape[0] * flat.shape[2]
        if not count:
            return
        mean = flat.mean((0, 2))
        squares = ((flat - mean[:, None]) ** 2).sum((0, 2))
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart**2 * (self._count * count / total)
        self._mean += apart * (count / total)
        self._count = total

    def moments(self) -> Moments:
        """Of all numbers."""
        std = np.sqrt(self._squares / max(self._count, 1))
        return tuple(self._mean.tolist()), tuple(_spread(value) for value in std.tolist())


def _spread(std: float) -> float:
    """What to divide by: a channel that never changes is divided by one instead of by zero."""
    return std or 1.0
