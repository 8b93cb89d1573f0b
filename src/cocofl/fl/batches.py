"""Which samples a device sees in which order: the same for every strategy and every engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.data import Samples, normalise

LAST_BATCH = ("keep", "drop")

Ints = NDArray[np.int64]


def n_batches(n_samples: int, batch: int, last_batch: str) -> int:
    """How many mini-batches one epoch has; a device with less than one trains that one.

    >>> n_batches(70, 32, "keep"), n_batches(70, 32, "drop"), n_batches(5, 32, "drop")
    (3, 2, 1)
    """
    full, rest = divmod(n_samples, batch)
    return full + 1 if rest and (last_batch == "keep" or full == 0) else full


def mini_batches(
    indices: Ints, batch: int, last_batch: str, epochs: int, rng: np.random.Generator
) -> list[Ints]:
    """The samples of each mini-batch: every epoch is shuffled anew."""
    found = []
    for _ in range(epochs):
        order = rng.permutation(indices)
        count = n_batches(len(order), batch, last_batch)
        found += [order[i * batch : (i + 1) * batch] for i in range(count)]
    return found


def tensors(data: Samples, indices: Ints) -> tuple[Tensor, Tensor]:
    """Inputs and labels as a network takes them: normalised, and images channels last."""
    inputs, labels = data.batch(indices)
    if data.facts.task == "text":
        return torch.from_numpy(inputs), torch.from_numpy(labels)
    found = torch.from_numpy(normalise(inputs, data.facts))
    if data.facts.task == "image":
        # Stored as (sample, height, width, channel), the permuted view *is* channels last.
        found = found.permute(0, 3, 1, 2)
    elif found.ndim == 4:
        found = found.contiguous(memory_format=torch.channels_last)
    return found, torch.from_numpy(labels)


def chunks(n_samples: int, size: int) -> Iterator[Ints]:
    """All samples in order, ``size`` at a time; one that is left joins those before it.

    A norm that goes by the batch has no variance of one sample.

    >>> [part.tolist() for part in chunks(5, 2)]
    [[0, 1], [2, 3, 4]]
    """
    stops = [*range(size, n_samples, size), n_samples]
    if n_samples % size == 1 and len(stops) > 1:
        del stops[-2]
    for begin, stop in pairwise([0, *stops]):
        yield np.arange(begin, stop)
