"""ResNets (He et al., 2015) for small images: a 3×3 stem and no max pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from cocofl.models.base import ImageNetwork, narrowed


class Stage(NamedTuple):
    """``repeats`` residual blocks, of which the first has the stride."""

    channels: int
    repeats: int
    stride: int


RESNET18 = [Stage(64, 2, stride=1), Stage(128, 2, 2), Stage(256, 2, 2), Stage(512, 2, 2)]
RESNET50 = [Stage(64, 3, stride=1), Stage(128, 4, 2), Stage(256, 6, 2), Stage(512, 3, 2)]
RESNET10 = [Stage(16, 2, stride=1), Stage(32, 2, stride=2)]
TINY = [Stage(8, 2, stride=1), Stage(16, 2, stride=2)]


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity, or a 1×1 convolution where the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = shortcut(in_channels, channels, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, h, w) to (batch, channels, h / stride, w / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut; four times as many channels come out."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut(in_channels, out_channels, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, h, w) to (batch, 4 · channels, h / stride, w / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))  # (batch, channels, h, w)
        y = self.relu(self.norm2(self.conv2(y)))  # (batch, channels, h / stride, w / stride)
        y = self.norm3(self.conv3(y))
        return self.relu(y + self.shortcut(x))


class ResNet(ImageNetwork):
    """Stem, residual blocks, classifier: 10 blocks for ResNet18, 18 for ResNet50."""

    def __init__(
        self,
        num_classes: int,
        block: type[BasicBlock] | type[Bottleneck],
        stages: Sequence[Stage],
        *,
        width: float,
        image_size: int = 32,
        image_channels: int = 3,
        patch: int = 1,
    ) -> None:
        super().__init__(num_classes, width, image_size, image_channels)
        channels = narrowed(stages[0].channels, width)
        # Patches of pixels side by side, or each with its neighbours.
        kernel, padding = (patch, 0) if patch > 1 else (3, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(image_channels, channels, kernel, patch, padding, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        residuals: list[nn.Module] = []
        for stage in stages:
            inner = narrowed(stage.channels, width)
            for stride in [stage.stride] + [1] * (stage.repeats - 1):
                residuals.append(block(channels, inner, stride))
                channels = block.expansion * inner
        self.residuals = nn.Sequential(*residuals)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 32, 32) to (batch, classes)."""
        x = self.stem(x)  # (batch, 64, 32, 32)
        x = self.residuals(x)  # (batch, 512, 4, 4); ResNet50 (batch, 2048, 4, 4)
        return self.classifier(x)


def resnet18(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> ResNet:
    """ResNet18 for 32×32."""
    return ResNet(num_classes, BasicBlock, TINY if tiny else RESNET18, width=width)


def resnet50(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> ResNet:
    """ResNet50 for 32×32."""
    return ResNet(num_classes, Bottleneck, TINY if tiny else RESNET50, width=width)


def resnet10_digits(
    num_classes: int,
    *,
    width: float = 1.0,
    tiny: bool = False,
    image_size: int = 8,
    patch: int = 1,
) -> ResNet:
    """6 blocks for small grey images, such as scikit-learn's digits of 8×8.

    With ``patch`` above 1 the stem reads patches of so many pixels, so that larger images cost as
    much as small ones.
    """
    stages = TINY if tiny else RESNET10
    return ResNet(
        num_classes,
        BasicBlock,
        stages,
        width=width,
        image_size=image_size,
        image_channels=1,
        patch=patch,
    )
