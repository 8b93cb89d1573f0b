"""Tiny networks of the registry, trained a little on real digits (or on counted tokens)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from cocofl import BlockChain, Span, chain_state, freeze, split
from cocofl.models import MODELS

BATCH = 16
STEPS = 200


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1797 real digits, 1×8×8 in [-1, 1], and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    return images / 8 - 1, torch.tensor(labels)


def images_for(example: Tensor) -> tuple[Tensor, Tensor]:
    """Digits at the network's size, with noise.

    Without noise whole channels are constant on the background, and the cosine of a gradient then
    depends on which side of one rounding they fall.
    """
    pixels, labels = digits()
    channels, *size = example.shape[1:]
    large = F.interpolate(pixels, size=size, mode="bilinear").expand(-1, channels, -1, -1)
    noise = torch.randn(large.shape, generator=torch.Generator().manual_seed(1))
    return large + 0.3 * noise, labels


def tokens_for(example: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences in which the token of the label is the most frequent one."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (1000,), generator=generator)
    tokens = torch.randint(1, 10, (1000, example.shape[1]), generator=generator)
    marked = torch.rand(tokens.shape, generator=generator) < 0.4
    return torch.where(marked, labels[:, None], tokens), labels


@dataclass(frozen=True)
class Trained:
    """A chain, the state after some training with its scales, and a batch."""

    chain: BlockChain
    state: dict[str, Tensor]
    x: Tensor
    y: Tensor

    @property
    def unmeasured(self) -> dict[str, Tensor]:
        """The state before any scale was measured: all scales on the fly."""
        return {key: t for key, t in self.state.items() if not key.startswith("scales.")}


@cache
def trained(name: str) -> Trained:
    torch.manual_seed(0)
    model = MODELS[name](10, tiny=True)
    example = model.example_input(BATCH)
    chain = split(model, example)
    x, y = images_for(example) if example.ndim == 4 else tokens_for(example)
    net = freeze(chain, Span(0, len(chain)), variant="f")
    # A norm of each image's every channel by itself learns slowly.
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0 if "groupnorm" in name else 0.1)
    order = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        batch = torch.randint(0, len(x), (BATCH,), generator=order)
        if step == STEPS - 1:
            net.measure_scales()
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    batch = torch.randint(0, len(x), (BATCH,), generator=order)
    return Trained(chain, chain_state(chain) | net.update().tensors, x[batch], y[batch])
