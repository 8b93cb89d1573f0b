"""The devices of a round one after the other, with ``freeze``: what a cohort must agree with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cocofl import BlockChain, Span, freeze
from cocofl.freeze import State
from cocofl.vector import Adam, DeviceWork, Optimizer, Sgd


@dataclass(frozen=True)
class Round:
    """Works and their mini-batches: (step, device, sample), of which ``valid`` count."""

    works: list[DeviceWork]
    indices: NDArray[np.int64]
    valid: NDArray[np.int64]


def draw_round(
    works: list[DeviceWork], samples: int, batch: int, sizes: list[list[int]], seed: int = 0
) -> Round:
    """``sizes`` has the mini-batches of each device."""
    rng = np.random.default_rng(seed)
    steps = max(map(len, sizes))
    indices = np.zeros((steps, len(works), batch), np.int64)
    valid = np.zeros((steps, len(works)), np.int64)
    for d, own in enumerate(sizes):
        for s, n in enumerate(own):
            drawn = rng.choice(samples, n, replace=False)
            indices[s, d] = np.resize(drawn, batch)
            valid[s, d] = n
    return Round(works, indices, valid)


def with_biases(state: State) -> State:
    """The state with biases that are not 0.

    Where a norm follows, a bias has no gradient but for rounding, and Adam makes steps as long as
    any out of that; unless there is a bias to decay.
    """
    drawn = torch.Generator().manual_seed(0)
    return {
        key: t + 0.1 * torch.randn(t.shape, generator=drawn) if key.endswith("bias") else t
        for key, t in state.items()
    }


def torch_optimizer(
    settings: Optimizer, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """PyTorch's, with these settings."""
    decay = settings.weight_decay
    if isinstance(settings, Sgd):
        return torch.optim.SGD(parameters, lr, settings.momentum, weight_decay=decay)
    assert isinstance(settings, Adam)
    return torch.optim.Adam(parameters, lr, weight_decay=decay)


def train_one(
    chain: BlockChain,
    state: State,
    work: DeviceWork,
    batches: list[tuple[tuple[Tensor, ...], Tensor]],
    settings: Optimizer,
) -> tuple[State, float]:
    """What one device sends, and its mean loss."""
    net = freeze(chain, work.blocks, variant=work.variant, backend="reference", state=state)
    net.train()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch_optimizer(settings, trained, work.lr)
    total = 0.0
    for i, (inputs, labels) in enumerate(batches):
        if i == len(batches) - 1 and work.variant == "qff":
            net.measure_scales()
        optimizer.zero_grad()
        outputs = net(*inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
        loss.backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(trained, settings.clip)
        optimizer.step()
        total += loss.item()
    return net.update().tensors, total / len(batches)


def spans_of(n: int) -> list[Span]:
    """All there is to tell apart: everything, the ends, the middle."""
    return [Span(0, n), Span(0, 1), Span(n - 1, n), Span(n // 2, n // 2 + 1), Span(1, n)]
