"""Transformer encoders (Vaswani et al., 2017) that classify a text or name its next character.

Token 0 is padding: no position attends to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.errors import InvalidModel
from cocofl.models.base import Network, Segments, narrowed

PADDING = 0


class Shape(NamedTuple):
    """Everything that tells one encoder from another, apart from its vocabulary."""

    length: int
    layers: int = 6
    heads: int = 2
    head_channels: int = 64  # the embedding has heads × head_channels channels
    hidden: int = 128
    dropout: float = 0.05


REVIEW_VOCABULARY = 16_000
REVIEW = Shape(length=512)
WINDOW = Shape(length=80)
TINY_VOCABULARY = 256
TINY = Shape(length=24, layers=2, head_channels=8, hidden=16)


def sinusoids(length: int, channels: int) -> Tensor:
    """A fixed code for each position, (length, channels): sine and cosine side by side."""
    position = torch.arange(length).unsqueeze(1)
    frequency = torch.exp(-math.log(10_000.0) * torch.arange(0, channels, 2) / channels)
    angle = position * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class Embedding(nn.Module):
    """Tokens become vectors that know their position."""

    positions: Tensor

    def __init__(self, vocabulary: int, shape: Shape, width: float) -> None:
        super().__init__()
        channels = shape.heads * narrowed(shape.head_channels, width)
        self.tokens = nn.Embedding(vocabulary, channels)
        self.dropout = nn.Dropout(shape.dropout)
        # Of the full network's code the leading channels, so that a narrower one agrees with it.
        positions = sinusoids(shape.length, shape.heads * shape.head_channels)[:, :channels]
        self.register_buffer("positions", positions.contiguous(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to (batch, length, channels)."""
        return self.dropout(self.tokens(tokens) + self.positions)


class Attention(nn.Module):
    """Each position gathers from all positions that are not padding.

    The channels of query, key, value and of what ``output`` takes in are grouped by head.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_channels = channels // heads
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, length, channels) to the same."""
        query = self._by_head(self.query(x))
        key = self._by_head(self.key(x))
        value = self._by_head(self.value(x))
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(y.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, length, channels) to (batch, heads, length, head_channels)."""
        return torch.unflatten(x, 2, (self.heads, self.head_channels)).transpose(1, 2)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each added to its input and then normalised."""

    def __init__(self, shape: Shape, width: float) -> None:
        super().__init__()
        channels = shape.heads * narrowed(shape.head_channels, width)
        hidden = narrowed(shape.hidden, width)
        self.attention = Attention(channels, shape.heads)
        self.dropout1 = nn.Dropout(shape.dropout)
        self.norm1 = nn.LayerNorm(channels)
        self.linear1 = nn.Linear(channels, hidden)
        self.relu = nn.ReLU()
        self.dropout2 = nn.Dropout(shape.dropout)
        self.linear2 = nn.Linear(hidden, channels)
        self.dropout3 = nn.Dropout(shape.dropout)
        self.norm2 = nn.LayerNorm(channels)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, length, channels) to the same."""
        x = self.norm1(x + self.dropout1(self.attention(x, mask)))
        y = self.dropout2(self.relu(self.linear1(x)))  # (batch, length, hidden)
        return self.norm2(x + self.dropout3(self.linear2(y)))


class MeanOverTokens(nn.Module):
    """Sums a text up as the mean over its tokens, padding left out."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, length, channels) to (batch, channels)."""
        weight = mask.flatten(1).unsqueeze(2).to(x.dtype)  # (batch, length, 1)
        return (x * weight).sum(1) / weight.sum(1).clamp(min=1)  # an empty text becomes zero


class LastPosition(nn.Module):
    """Sums a window up as what its last character has gathered."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        """(batch, length, channels) to (batch, channels)."""
        return x[:, -1]


class Encoder(Network):
    """8 blocks at full size: embedding, 6 layers, classifier (with the pooling before it).

    A narrower network keeps the leading channels of the embedding and of the hidden layer, and
    inside attention the leading channels of *each head*: with 2 heads of 64 and width 0.5, rows
    0:32 and 64:96 of ``query``, ``key`` and ``value``, and these columns of ``output``.
    """

    def __init__(
        self, num_classes: int, vocabulary: int, shape: Shape, *, pool: nn.Module, width: float
    ) -> None:
        super().__init__(num_classes, width)
        self.vocabulary, self.length = vocabulary, shape.length
        self.embedding = Embedding(vocabulary, shape, width)
        self.layers = nn.ModuleList(EncoderLayer(shape, width) for _ in range(shape.layers))
        self.pool = pool
        channels = shape.heads * narrowed(shape.head_channels, width)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to (batch, classes)."""
        mask = (tokens != PADDING).unsqueeze(1).unsqueeze(1)  # (batch, 1, 1, length)
        x = self.embedding(tokens)  # (batch, length, 128)
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(self.pool(x, mask))

    def segments(self) -> dict[str, tuple[Segments, ...]]:
        """Inside attention a width narrows each head."""
        found: dict[str, tuple[Segments, ...]] = {}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            heads = (layer.attention.head_channels,) * layer.attention.heads
            for name in ("query", "key", "value"):
                found[f"layers.{i}.attention.{name}.weight"] = (heads, ())
                found[f"layers.{i}.attention.{name}.bias"] = (heads,)
            found[f"layers.{i}.attention.output.weight"] = ((), heads)
        return found

    def roll_steps(self) -> dict[str, tuple[int, ...]]:
        """A window rolls in each head and in hidden layers.

        The channels of the embedding stay where they are, as the code of positions does.
        """
        stays: dict[str, tuple[int, ...]] = {}
        for name in ("embedding.tokens", "classifier"):
            stays[f"{name}.weight"] = (1, 0)
        for i in range(len(self.layers)):
            for name in ("query", "key", "value"):
                stays[f"layers.{i}.attention.{name}.weight"] = (1, 0)
            stays[f"layers.{i}.linear1.weight"] = (1, 0)
            for name in ("attention.output", "linear2"):
                stays[f"layers.{i}.{name}.weight"] = (0, 1)
                stays[f"layers.{i}.{name}.bias"] = (0,)
            for norm in ("norm1", "norm2"):
                stays |= {f"layers.{i}.{norm}.{tensor}": (0,) for tensor in ("weight", "bias")}
        return stays

    def example_input(self, batch_size: int = 2) -> Tensor:
        """Random tokens, (batch, length), without padding."""
        size = (batch_size, self.length)
        return torch.randint(1, self.vocabulary, size, generator=torch.Generator().manual_seed(0))


def transformer(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> Encoder:
    """Classifies a text of 512 tokens out of 16 000 (tiny: 24 tokens out of 256)."""
    vocabulary, shape = (TINY_VOCABULARY, TINY) if tiny else (REVIEW_VOCABULARY, REVIEW)
    return Encoder(num_classes, vocabulary, shape, pool=MeanOverTokens(), width=width)


def transformer_seq2seq(num_classes: int, *, width: float = 1.0, tiny: bool = False) -> Encoder:
    """Names the character after a window of 80 (tiny: 24), padded in front where it is shorter.

    The classes are the vocabulary: the 80 characters of the data set and the padding are 81.
    """
    if num_classes < 2:
        raise InvalidModel(
            f"num_classes is {num_classes}; the classes of the next-character network are its "
            "tokens, padding included, so it needs at least 2"
        )
    shape = TINY if tiny else WINDOW
    return Encoder(num_classes, num_classes, shape, pool=LastPosition(), width=width)
