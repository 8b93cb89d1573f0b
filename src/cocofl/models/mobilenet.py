"""MobileNetV2 (Sandler et al., 2018) for images of 32×32 and 256×256."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from cocofl.models.base import ImageNetwork, narrowed

Norm = Callable[[int], nn.Module]


class Stage(NamedTuple):
    """``repeats`` inverted residuals, of which the first has the stride."""

    expansion: int
    channels: int
    repeats: int
    stride: int


class Shape(NamedTuple):
    """Everything that tells one MobileNetV2 from another, apart from its norm."""

    image_size: int
    stem: int
    stem_stride: int
    stages: Sequence[Stage]
    head: int


FIRST, SECOND = Stage(1, 16, 1, stride=1), Stage(6, 24, 2, stride=1)
LATER = [
    Stage(6, 32, 3, stride=2),
    Stage(6, 64, 4, stride=2),
    Stage(6, 96, 3, stride=1),
    Stage(6, 160, 3, stride=2),
    Stage(6, 320, 1, stride=1),
]
SMALL_IMAGES = Shape(32, stem=32, stem_stride=1, stages=[FIRST, SECOND, *LATER], head=1280)
# 256×256 pixels shrink by 32 instead of 8: the stem and the second stage have a stride, too.
LARGE_IMAGES = Shape(256, 32, 2, [FIRST, SECOND._replace(stride=2), *LATER], head=1280)
# Every kind of inverted residual once: no expansion, convolution as shortcut, identity, stride.
TINY_STAGES = [Stage(1, 8, 1, 1), Stage(3, 12, 2, 1), Stage(3, 16, 2, 2), Stage(3, 24, 1, 1)]
TINY = Shape(32, stem=8, stem_stride=2, stages=TINY_STAGES, head=64)


class ConvNormReLU(nn.Sequential):
    """A convolution that keeps the image size (up to its stride), norm and ReLU."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel: int, stride: int = 1, norm: Norm
    ) -> None:
        super().__init__(
            nn.Conv2d(
                in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False
            ),
            norm(out_channels),
            nn.ReLU(),
        )


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; with a shortcut unless the stride is 2.

    Whether the shortcut is a convolution is an argument, because the channels of a very narrow
    network may happen to agree where those of the full one do not.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        expansion: int,
        stride: int,
        convolve_shortcut: bool,
        norm: Norm,
    ) -> None:
        super().__init__()
        hidden = expansion * in_channels
        self.expand = nn.Conv2d(in_channels, hidden, 1, bias=False)
        self.expand_norm = norm(hidden)
        self.depthwise = nn.Conv2d(
            hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False
        )
        self.depthwise_norm = norm(hidden)
        self.project = nn.Conv2d(hidden, out_channels, 1, bias=False)
        self.project_norm = norm(out_channels)
        self.relu = nn.ReLU()

        self.shortcut: nn.Module | None = None
        if stride == 1 and convolve_shortcut:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, bias=False), norm(out_channels)
            )
        elif stride == 1:
            self.shortcut = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, h, w) to (batch, out, h / stride, w / stride)."""
        y = self.relu(self.expand_norm(self.expand(x)))  # (batch, hidden, h, w)
        y = self.relu(self.depthwise_norm(self.depthwise(y)))  # (…, hidden, h / stride, …)
        y = self.project_norm(self.project(y))
        return y if self.shortcut is None else y + self.shortcut(x)


class MobileNetV2(ImageNetwork):
    """20 blocks at full size: stem, 17 inverted residuals, head, classifier."""

    def __init__(self, num_classes: int, shape: Shape, *, norm: Norm, width: float) -> None:
        super().__init__(num_classes, width, shape.image_size)
        channels = shape.stem
        self.stem = ConvNormReLU(
            3, narrowed(channels, width), kernel=3, stride=shape.stem_stride, norm=norm
        )
        residuals = []
        for stage in shape.stages:
            for stride in [stage.stride] + [1] * (stage.repeats - 1):
                residuals.append(
                    InvertedResidual(
                        narrowed(channels, width),
                        narrowed(stage.channels, width),
                        expansion=stage.expansion,
                        stride=stride,
                        convolve_shortcut=channels != stage.channels,
                        norm=norm,
                    )
                )
                channels = stage.channels
        self.residuals = nn.Sequential(*residuals)
        features = narrowed(shape.head, width)
        self.head = ConvNormReLU(narrowed(channels, width), features, kernel=1, norm=norm)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, size, size) to (batch, classes)."""
        x = self.stem(x)  # (batch, 32, 32, 32) for images of 32×32; 128×128 for 256×256
        x = self.residuals(x)  # (batch, 320, 4, 4); 8×8
        x = self.head(x)  # (batch, 1280, 4, 4); 8×8
        return self.classifier(x)


def one_group_per_channel(channels: int) -> nn.Module:
    """A norm that, unlike BatchNorm, neither mixes the images of a batch nor keeps statistics."""
    return nn.GroupNorm(channels, channels)


def mobilenet(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> MobileNetV2:
    """MobileNetV2 for 32×32."""
    shape = TINY if tiny else SMALL_IMAGES
    return MobileNetV2(num_classes, shape, norm=nn.BatchNorm2d, width=width)


def mobilenet_groupnorm(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> MobileNetV2:
    """MobileNetV2 for 32×32 with GroupNorm, one group per channel, in place of BatchNorm."""
    shape = TINY if tiny else SMALL_IMAGES
    return MobileNetV2(num_classes, shape, norm=one_group_per_channel, width=width)


def mobilenet_large(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> MobileNetV2:
    """MobileNetV2 for 256×256 (tiny: 64×64)."""
    shape = TINY._replace(image_size=64) if tiny else LARGE_IMAGES
    return MobileNetV2(num_classes, shape, norm=nn.BatchNorm2d, width=width)
