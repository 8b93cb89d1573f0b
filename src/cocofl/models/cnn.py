"""A small convolutional network for images of 32×32: two convolutions and a linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from cocofl.models.base import ImageNetwork, narrowed


class SmallCNN(ImageNetwork):
    """3 blocks: two convolutions, each with ReLU and pooling, and a classifier."""

    def __init__(self, num_classes: int, channels: tuple[int, int], *, width: float) -> None:
        super().__init__(num_classes, width)
        first, second = (narrowed(n, width) for n in channels)
        self.first = nn.Sequential(nn.Conv2d(3, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(
            nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        # Flattened, a channel's 8×8 features follow one another: leading channels lead here, too.
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(second * 8 * 8, num_classes))

    def roll_steps(self) -> dict[str, tuple[int, ...]]:
        """A channel of the last convolution is 8×8 features of the classifier."""
        return {"classifier.1.weight": (1, 8 * 8)}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 32, 32) to (batch, classes)."""
        x = self.first(x)  # (batch, 32, 16, 16)
        x = self.second(x)  # (batch, 64, 8, 8)
        return self.classifier(x)


def cnn(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> SmallCNN:
    """Convolutions 3→32 and 32→64, each followed by ReLU and pooling, and a linear layer."""
    return SmallCNN(num_classes, (4, 8) if tiny else (32, 64), width=width)
