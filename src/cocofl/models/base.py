"""What the built-in networks share: an example input, and what a width means."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from cocofl.errors import InvalidModel

Segments = tuple[int, ...]


class Network(nn.Module, ABC):
    """An ordinary ``nn.Module`` that can also show what it eats, and how a width slices it."""

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        if num_classes < 1:
            raise InvalidModel(f"num_classes is {num_classes}; a classifier needs at least 1 class")
        if not 0 < width <= 1:
            raise InvalidModel(
                f"width is {width}; expected the share of the channels to keep, a ratio in (0, 1]"
            )

    @abstractmethod
    def example_input(self, batch_size: int = 2) -> Tensor:
        """A batch of the right shape and type, the same one every time."""

    def segments(self) -> dict[str, tuple[Segments, ...]]:
        """By state-dict key and axis, the pieces that a width narrows one by one.

        Empty for an axis, and for every key that is missing here: the axis is one piece.
        """
        return {}

    def roll_steps(self) -> dict[str, tuple[int, ...]]:
        """By state-dict key and axis, by how many places a window rolls for each channel.

        1 for every axis and key that is missing here: a place is a channel. More where the places
        of a channel were flattened; 0 where channels have to stay where they are.
        """
        return {}


class ImageNetwork(Network):
    """A network for square images of ``image_size`` pixels a side."""

    def __init__(
        self, num_classes: int, width: float, image_size: int = 32, image_channels: int = 3
    ) -> None:
        super().__init__(num_classes, width)
        self.image_size, self.image_channels = image_size, image_channels

    def example_input(self, batch_size: int = 2) -> Tensor:
        """Normally distributed pixels, (batch, channels, image_size, image_size)."""
        size = (batch_size, self.image_channels, self.image_size, self.image_size)
        return torch.randn(size, generator=torch.Generator().manual_seed(0))


def narrowed(channels: int, width: float) -> int:
    """How many of ``channels`` a network of ``width`` keeps: always the leading ones.

    >>> narrowed(64, 1.0), narrowed(64, 0.4), narrowed(12, 0.01)
    (64, 26, 1)
    """
    return max(1, round(channels * width))
