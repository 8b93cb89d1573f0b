"""Small networks in the many ways people write them; none knows that it will be frozen.

Each is a stem and a head around one or two bodies, so that every span freezes the operation in
question before the trained blocks and behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

IMAGE = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
SEQUENCE = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(2))
VECTOR = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
SIGNAL = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(4))
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 7, 1, 8, 0, 0], [1, 6, 1, 0, 0, 0]])


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]


NETWORKS: dict[str, Network] = {}


class Chain(nn.Module):
    """Stem, bodies and head, one after the other."""

    def __init__(self, stem: nn.Module, bodies: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.bodies, self.head = stem, nn.Sequential(*bodies), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bodies(self.stem(x)))


def conv(inside: int, out: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inside, out, kernel, padding=kernel // 2, **options)


def images(body: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """On feature maps of 8 channels; a body leaves their number as it is."""
    name = getattr(body, "__name__", "").strip("_")

    def build() -> nn.Module:
        stem = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())
        head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
        return Chain(stem, [body(), body()], head)

    NETWORKS[name] = Network(build, (IMAGE,))
    return body


def sequences(body: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """On 6 positions of 8 features."""

    def build() -> nn.Module:
        head = nn.Sequential(nn.Flatten(1), nn.Linear(48, 5))
        return Chain(nn.Linear(8, 8), [body(), body()], head)

    NETWORKS[body.__name__] = Network(build, (SEQUENCE,))
    return body


def whole(*inputs: Tensor) -> Callable[[Any], Any]:
    """A network as it is, with the inputs it takes."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        NETWORKS[build.__name__] = Network(build, inputs)
        return build

    return register


def with_activation(name: str, make: Callable[[], nn.Module]) -> None:
    def body() -> nn.Module:
        return nn.Sequential(conv(8, 8), nn.BatchNorm2d(8), make(), conv(8, 8, 1), make())

    body.__name__ = name
    images(body)


for activation in (
    nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.GELU, nn.PReLU, nn.LeakyReLU,
    nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus, nn.Mish, nn.Hardtanh, nn.Identity,
):  # fmt: skip
    with_activation(activation.__name__, activation)
with_activation("InPlaceReLU", lambda: nn.ReLU(inplace=True))
with_activation("InPlaceReLU6", lambda: nn.ReLU6(inplace=True))
with_activation("InPlaceHardswish", lambda: nn.Hardswish(inplace=True))
with_activation("InPlaceLeakyReLU", lambda: nn.LeakyReLU(0.1, inplace=True))
with_activation("Dropout", lambda: nn.Dropout(0.3))
with_activation("Dropout2d", lambda: nn.Dropout2d(0.3))
with_activation("InPlaceDropout", lambda: nn.Dropout(0.3, inplace=True))
with_activation("AveragePool", lambda: nn.AvgPool2d(2, ceil_mode=True))
with_activation("MaxPool", lambda: nn.MaxPool2d(3, 1, 1))
with_activation("AdaptivePool", lambda: nn.AdaptiveAvgPool2d((4, 3)))
with_activation("AdaptiveMaxPool", lambda: nn.AdaptiveMaxPool2d(4))
with_activation("Upsample", lambda: nn.Upsample(scale_factor=2))
with_activation("ZeroPad", lambda: nn.ZeroPad2d((1, 0, 2, 1)))
with_activation("GroupNorm", lambda: nn.GroupNorm(2, 8))
with_activation("InstanceNorm", lambda: nn.InstanceNorm2d(8, affine=True))
with_activation("TrackedInstanceNorm", lambda: nn.InstanceNorm2d(8, track_running_stats=True))
with_activation("NormOnly", lambda: nn.BatchNorm2d(8))
with_activation("NormWithoutAffine", lambda: nn.BatchNorm2d(8, affine=False))
with_activation("NormWithoutStatistics", lambda: nn.BatchNorm2d(8, track_running_stats=False))
with_activation("NormOfCumulativeMoments", lambda: nn.BatchNorm2d(8, momentum=None))
with_activation("LocalResponseNorm", lambda: nn.LocalResponseNorm(3))
with_activation("ChannelShuffle", lambda: nn.ChannelShuffle(4))
with_activation("Softmax", lambda: nn.Softmax(dim=1))
with_activation("Reflect", lambda: conv(8, 8, padding_mode="reflect"))
with_activation("Circular", lambda: conv(8, 8, padding_mode="circular"))
with_activation("PaddingSame", lambda: nn.Conv2d(8, 8, 3, padding="same"))
with_activation("PaddingValid", lambda: nn.Conv2d(8, 8, 1, padding="valid"))
with_activation("StrideAndDilation", lambda: nn.Conv2d(8, 8, 2, 2, 2, 2))
with_activation("Dilation", lambda: nn.Conv2d(8, 8, 3, 1, 2, 2))
with_activation("Grouped", lambda: conv(8, 8, groups=4))
with_activation("Depthwise", lambda: conv(8, 8, groups=8))
with_activation("Strided", lambda: conv(8, 8, stride=2))
with_activation("WideStride", lambda: nn.Conv2d(8, 8, 1, stride=3))
with_activation("TransposedConvolution", lambda: nn.ConvTranspose2d(8, 8, 2, 2))
with_activation("WeightNorm", lambda: parametrizations.weight_norm(conv(8, 8)))
with_activation(
    "WeightNormOnLinear", lambda: OverChannels(parametrizations.weight_norm(nn.Linear(8, 8)))
)
with_activation(
    "PixelShuffle", lambda: nn.Sequential(conv(8, 32, 1), nn.PixelShuffle(2), conv(8, 8, stride=2))
)
with_activation("Unflatten", lambda: nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (-1, 1))))


class OverChannels(nn.Module):
    """Applies a layer for vectors to the channels of feature maps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


with_activation("LayerNormOverChannels", lambda: OverChannels(nn.LayerNorm(8)))
with_activation("LinearOverChannels", lambda: OverChannels(nn.Linear(8, 8)))


@images
class SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = conv(8, 8), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x))
        gate = self.up(self.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(4 * gate)


@images
class SqueezeExcitationOfLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = conv(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        n, c, _, _ = x.shape
        gate = F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return x * gate.view(n, c, 1, 1)


@images
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = conv(8, 8), nn.BatchNorm2d(8), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.norm(self.one(x)))) + x)


@images
class InPlaceResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = F.relu(self.norm(self.one(x)), inplace=True)
        out = self.two(out)
        out += identity
        return F.relu(out, inplace=True)


@images
class MethodResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)).relu_()).add_(x).relu()


@images
class ScaledResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.3 * self.two(F.relu(self.norm(self.one(x))))
        return torch.add(x, self.one(x), alpha=0.5)


@images
class ScaledInPlaceResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        out = self.two(F.relu(self.norm(self.one(x))))
        return out.add_(x, alpha=2.0)


@images
class SubtractedResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x - self.two(F.relu(self.norm(self.one(x)))))


@images
class ReversedResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.two(F.relu(self.norm(self.one(x))))
        return (1 - y) * x + y / 2


@images
class SumOfTwoLayers(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.one(x)) + self.two(x))


@images
class LayerAddedToItself(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y + y)


@images
class OutputUsedTwice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.norm(y) + F.relu(self.two(y)) + F.relu(y)


@images
class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu, self.conv = nn.BatchNorm2d(8), nn.ReLU(inplace=True), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.relu(self.norm(x)))


@images
class ActivationBeforeTheSkip(PreActivation):
    """The ReLU works in place, so the skip carries what it made of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = self.conv(self.relu(x))
        return y + x


class InPlaceOnItsInput(PreActivation):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(x)
        return self.conv(y) + x - 0.5


@whole(IMAGE)
def in_place_on_the_input() -> nn.Module:
    bodies = [InPlaceOnItsInput(), InPlaceOnItsInput()]
    return Chain(conv(3, 8), bodies, nn.Sequential(nn.Flatten(), nn.Linear(512, 5)))


@images
class InPlaceThroughAView(PreActivation):
    """Who overwrites a view overwrites what it looks at."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(x))
        half = x[:, :4]
        half.mul_(-2.0)
        return x * 1.5


@images
class InPlaceThroughAReshape(PreActivation):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(x)).contiguous()
        flat = x.flatten(2)
        flat.sigmoid_()
        return self.conv(x)


@images
class ViewOverwrittenLater(PreActivation):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(x))
        first, second = x[:, :4], x[:, 4:]
        x.mul_(3.0)
        return torch.cat([second, first], 1)


@images
class WritesIntoAnother(PreActivation):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.copy_(self.norm(x))
        return self.conv(y) + y


@images
class InPlaceUnderAnotherName(PreActivation):
    """``+=`` changes what the other name stands for."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(x))
        y = x
        y += 1.0
        y *= 0.5
        return self.conv(x) + y


@images
class SharedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = conv(8, 8), conv(8, 8), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.two(self.act(self.one(self.act(x)))) * 4)


@images
class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(8, 8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(self.conv(x))))


@images
class TiedLayers(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(8, 8), conv(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


@images
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.last = nn.BatchNorm2d(8), conv(8, 4), conv(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, self.conv(F.relu(self.norm(x)))], 1))


@images
class DenseByAxis(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.concat((x, self.conv(self.norm(x))), axis=-3)).relu()


@images
class ConcatenatedRows(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x, F.relu(self.norm(x))], dim=2)
        return self.last(torch.cat([y, self.conv(y)], dim=1))


@images
class ConcatenatedToABatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(8, 8), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        y = self.two(torch.cat([self.one(x), x]))
        return y[:n] - y[n:]


@images
class ShuffleUnit(nn.Module):
    """Splits, shuffles by hand, and reads the size of its input on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.after = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), nn.ReLU()), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        x = torch.cat((left, self.conv(right)), dim=1)
        n, c, h, w = x.size()
        x = x.view(n, 2, c // 2, h, w)
        x = torch.transpose(x, 1, 2).contiguous()
        return self.after(x.view(n, -1, h, w))


@images
class SplitAndIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(8, 8), conv(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self.one(x), [2, 4, 2], dim=1)
        mixed = torch.cat([parts[1], parts[0] * parts[2]], 1)
        return self.two(mixed)[:, :, ::2, 1:]


@images
class MaximumOverChannels(nn.Module):
    """Two results of one call, each with a gradient of its own path."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = conv(8, 8), conv(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        largest, index = x.max(dim=1, keepdim=True)
        values = torch.topk(x, 1, dim=1).values
        return self.last(torch.cat([largest * (index + 1), values], 1))


@images
class Unbound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        columns = x.unbind(3)
        return torch.stack([columns[1], columns[0] + columns[-1], columns[1]], dim=3)


@images
class Product(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * torch.tanh(self.two(x)) + torch.mul(x, 0.5)


@images
class Constants(nn.Module):
    """Parameters and buffers in the arithmetic, with names that methods have too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = conv(8, 8), conv(8, 8)
        self.t = nn.Parameter(torch.linspace(0.5, 2.0, 8).view(8, 1, 1))
        self.relu = nn.Parameter(torch.linspace(-0.3, 0.3, 8).view(1, 8, 1, 1))
        self.register_buffer("add", torch.linspace(-1, 1, 64).view(1, 1, 8, 8))
        self.register_buffer("view", torch.full((1,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.conv(x) + self.add) * self.t / self.view + self.relu
        return self.last(x + torch.tensor([0.25]))


@images
class OwnForward(nn.Conv2d):
    """A subclass of a layer that does more than the layer."""

    def __init__(self) -> None:
        super().__init__(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, padding=1).relu() + super().forward(x)


@images
class OwnConvForward(nn.Conv2d):
    """What ``nn.Conv2d`` does with its weight can be changed in a second place."""

    def __init__(self) -> None:
        super().__init__(8, 8, 3, padding=1)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * 2.0, bias).relu()


@images
class OnlyAnotherConstructor(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(8, 8, 3, padding=1, bias=False)


@images
class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(8, 8), nn.BatchNorm2d(8)
        self.conv.register_forward_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def double(_module: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
    return y.abs() + y


@images
class ReadsTheWeightOfALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(8, 8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + F.conv2d(x, self.conv.weight, padding=1)


@images
class FunctionalDropout(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.one(x)), 0.2, self.training)
        return F.dropout2d(self.two(x), 0.2 if self.training else 0.0, self.training) + x


@images
class StochasticDepth(Residual):
    """An extra path with an own gate, on in training only."""

    def forward(self, x: Tensor) -> Tensor:
        keep = F.dropout(torch.ones_like(x[:, :1, :1, :1]), 0.5, self.training)
        return x + keep * self.two(F.relu(self.one(x)))


@images
class Detached(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x.detach()) + self.two(x)


@images
class ShapeArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape[0], x.shape[1]
        y = self.conv(x).reshape(n, c, -1)
        y = y - y.mean(dim=-1, keepdim=True)
        return y.view(x.shape) / (x.shape[-1] ** 0.5) + x


@images
class KeywordArguments(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(input=x)
        y = torch.flatten(start_dim=2, input=y).unsqueeze(dim=-1)
        return F.relu(input=self.two(input=y.reshape(shape=x.shape)))


@images
class Interpolated(Residual):
    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(self.one(x), 2)
        big = F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.two(big) + x


@images
class NonLocal(nn.Module):
    """Softmax attention between the places of a feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q.transpose(1, 2) @ k / 8**0.5, dim=-1)
        return x + (v @ weights.transpose(1, 2)).view_as(x)


@sequences
class FilteredFrequencies(nn.Module):
    """Values are complex on the way; the gradient goes through them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.linear(x), dim=1) * torch.tensor([[1.0], [0.5], [0], [0]])
        return self.norm(torch.fft.irfft(frequencies, n=6, dim=1))


@sequences
class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        n, length, size = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-2, -1) / 2, dim=-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(n, length, size))


@sequences
class FusedAttention(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


@sequences
class PyTorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.last(F.gelu(mixed)) + x


@sequences
class AttentionWithWeights(PyTorchAttention):
    """Both results of the call lead to the output."""

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x)
        return self.last(mixed) + 4 * weights @ x


@sequences
class EncoderLayer(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(8, 2, 16, dropout=0.1, batch_first=True)


@sequences
class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@sequences
class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).split(16, dim=-1)
        return self.down(F.silu(gate) * value).relu_() + x


@sequences
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, (_, cell) = self.lstm(x)
        return self.last(y) + cell[0].unsqueeze(1)


@sequences
class GatedRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0] + x


@sequences
class NormOverPositions(nn.Module):
    """BatchNorm1d on a sequence normalises its second axis, here as long as the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x))))


@images
class NormOverRows(nn.Module):
    """A linear layer over the last axis, and a BatchNorm2d over the second: nothing to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(8, 8), nn.BatchNorm2d(8), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(self.linear(x))))


@whole(VECTOR)
def perceptron() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 5))


@whole(VECTOR)
def perceptron_without_norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 16), nn.PReLU(), nn.Linear(16, 4)
    )


@whole(SIGNAL)
def one_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3, groups=2), nn.ReLU(),
        nn.AvgPool1d(2), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@whole(IMAGE)
class ViewBeforeTheHead(nn.Module):
    """``view`` needs channels first, and networks run channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 4), conv(4, 4)
        self.up, self.head = nn.Linear(256, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.two(F.relu(self.one(x))))
        x = x.view(x.size(0), -1)
        return self.head(F.relu(self.up(x)))


@whole(IMAGE)
class FlattenBeforeTheHead(ViewBeforeTheHead):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(F.relu(self.two(F.relu(self.one(x)))), 1)
        return self.head(F.relu(self.up(x)))


@whole(IMAGE)
class Patches(nn.Module):
    """A small vision Transformer with a class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.layers = nn.Sequential(FeedForward(), FusedAttention(), FeedForward())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


class MaskedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.feed = FeedForward()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        return self.feed(x + mixed)


@whole(TOKENS)
class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.layers = nn.ModuleList(MaskedLayer() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens == 0
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        x = x.masked_fill(mask.unsqueeze(-1), 0.0)
        return self.head(x.sum(1) / (~mask).sum(1, keepdim=True))


@whole(TOKENS)
class TiedLanguageModel(nn.Module):
    """The embedding is the output layer too, so all in between is one block with both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(10, 8)
        self.up, self.mid, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.embedding, self.out = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mid(F.relu(self.up(self.stem(tokens))))
        return self.out(self.norm(x)) - self.embedding(x)


@whole(IMAGE, VECTOR[:5])
class TwoInputs(nn.Module):
    """A second input that joins in at the end of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.side = conv(3, 8), nn.Linear(8, 8)
        self.body, self.head = conv(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = F.relu(self.conv(x) + self.side(condition)[:, :, None, None])
        return self.head(F.relu(self.body(x)).mean((2, 3)))


@whole(IMAGE)
class TupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = conv(3, 8), conv(8, 8)
        self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(F.relu(self.stem(x)))).mean((2, 3))
        return self.one(x), self.two(x)


@whole(IMAGE)
class DictOutput(TupleOutput):
    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(F.relu(self.stem(x))))
        pooled = x.mean((2, 3))
        return {"classes": self.one(pooled), "maps": x, "loss": None, "kind": "stem", "n": 2}


@whole(IMAGE)
class SameOutputTwice(TupleOutput):
    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(F.relu(self.stem(x))))
        return x, {"again": [x, x.mean((2, 3))]}


@whole(IMAGE)
class SizeInTheOutput(TupleOutput):
    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(F.relu(self.stem(x))))
        return x, x.shape, x.argmax(1)


@whole(IMAGE)
class WholeTupleOutput(TupleOutput):
    def forward(self, x: Tensor) -> Any:
        return F.relu(self.body(F.relu(self.stem(x)))).chunk(2, 1)


@whole(IMAGE)
class ConvolutionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.last = conv(3, 8), conv(8, 8), conv(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.body(F.relu(self.stem(x)))))


@whole(IMAGE)
class ListOfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.last = conv(3, 8), conv(8, 8), conv(8, 5, 1)

    def forward(self, x: Tensor) -> Any:
        return [self.last(F.relu(self.body(F.relu(self.stem(x)))))]


@whole(IMAGE)
class ManyScales(nn.Module):
    """Has an attribute called ``scales``, as the scales of a state are called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.scales = nn.ModuleList([conv(8, 8), conv(8, 8, stride=2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for layer in self.scales:
            x = F.relu(layer(x))
        return self.head(x.amax((2, 3)))


class Opaque(nn.Module):
    """A layer that torch.fx cannot trace, with a flag that looks like those of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inplace = conv(8, 8), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        n = sum(1 for _ in range(int(y.shape[0])))
        return y.view(n, -1).view(y.shape) * 0.5 if bool(y.isfinite().all()) else y
