"""DenseNet40 with bottlenecks (Huang et al., 2017) for images of 32×32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cocofl.models.base import ImageNetwork, Segments, narrowed

BOTTLENECK = 4  # the 1×1 convolution makes this many times the growth, whatever comes in


class DenseLayer(nn.Module):
    """Appends ``growth`` channels, computed from all that came before, to its input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        inner = BOTTLENECK * growth
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, h, w) to (batch, in + growth, h, w)."""
        y = self.conv1(self.relu(self.norm1(x)))  # (batch, 4 · growth, h, w)
        y = self.conv2(self.relu(self.norm2(y)))  # (batch, growth, h, w)
        return torch.cat([x, y], dim=1)


class Transition(nn.Module):
    """Halves channels, height and width between two stages."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in, h, w) to (batch, out, h / 2, w / 2)."""
        return self.pool(self.conv(self.relu(self.norm(x))))


class DenseNet(ImageNetwork):
    """22 blocks at full size: stem, 3 stages of 6 dense layers, 2 transitions, classifier.

    The channels of a dense stage are those of its input followed by the growth of one layer
    after the other. A narrower network keeps the leading channels of each of these pieces.
    """

    def __init__(self, num_classes: int, *, growth: int, layers: list[int], width: float) -> None:
        super().__init__(num_classes, width)
        channels = narrowed(2 * growth, width)
        growth = narrowed(growth, width)
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        dense: list[nn.Module] = []
        for stage, n_layers in enumerate(layers):
            if stage > 0:
                dense.append(Transition(channels, channels // 2))
                channels //= 2
            for _ in range(n_layers):
                dense.append(DenseLayer(channels, growth))
                channels += growth
        self.dense = nn.Sequential(*dense)
        self._growth = growth
        self.classifier = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, num_classes),
        )

    def segments(self) -> dict[str, tuple[Segments, ...]]:
        """Whatever takes in a dense stage's channels has them in the pieces they came in."""
        found: dict[str, tuple[Segments, ...]] = {}

        def takes_in(norm: str, layer: str) -> None:
            for tensor in ("weight", "bias", "running_mean", "running_var"):
                found[f"{norm}.{tensor}"] = (pieces,)
            found[f"{layer}.weight"] = ((), pieces)

        pieces: Segments = (self.stem.out_channels,)
        for i, module in enumerate(self.dense):
            if isinstance(module, Transition):
                takes_in(f"dense.{i}.norm", f"dense.{i}.conv")
                pieces = (module.conv.out_channels,)
            else:
                takes_in(f"dense.{i}.norm1", f"dense.{i}.conv1")
                pieces = (*pieces, self._growth)
        takes_in("classifier.0", "classifier.4")
        return found

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 32, 32) to (batch, classes)."""
        x = self.stem(x)  # (batch, 24, 32, 32)
        x = self.dense(x)  # 96 channels, 48 at 16×16, 120, 60 at 8×8: (batch, 132, 8, 8)
        return self.classifier(x)


def densenet40(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> DenseNet:
    """DenseNet40 for 32×32: growth 12, bottlenecks, transitions that halve the channels."""
    if tiny:
        return DenseNet(num_classes, growth=4, layers=[2, 2], width=width)
    return DenseNet(num_classes, growth=12, layers=[6, 6, 6], width=width)
