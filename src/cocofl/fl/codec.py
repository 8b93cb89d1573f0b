"""How an update travels: from tensors to bytes and back, between a device's work and the merge.

``upload.codec`` names one; one's own is a ``package.module:function`` that returns a
:class:`Codec`. The merge sees what the bytes say, and budgets are charged for their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cocofl.fl.state import Contribution, Memory, Tensors, is_scale
from cocofl.named import made_by_name

ERROR = "upload error"
"""The memory of a device that holds what its codec lost."""


@dataclass(frozen=True)
class Upload:
    """The section ``[upload]`` of an experiment."""

    codec: str = "identity"


class Codec(ABC):
    """One tensor of floats as bytes. A value; both sides have the same one."""

    is_exact: ClassVar[bool] = False
    """Whether bytes are the tensor's own, so that nothing has to be encoded to know the result."""
    keeps_error: ClassVar[bool] = False
    """Whether what a device could not say in one round is added in its next."""

    @abstractmethod
    def size_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """How many bytes such a tensor takes, whatever is in it."""

    @abstractmethod
    def encode(self, tensor: Tensor, start: Tensor, rng: np.random.Generator) -> bytes:
        """A tensor that was ``start`` before it was trained, which the server has, too."""

    @abstractmethod
    def decode(self, payload: bytes, start: Tensor) -> Tensor:
        """The tensor again, as far as the bytes tell; any bytes of the right number are one."""


@dataclass(frozen=True)
class Identity(Codec):
    """The tensor as it is."""

    is_exact: ClassVar[bool] = True

    def size_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Its own size."""
        return prod(shape) * dtype.itemsize

    def encode(self, tensor: Tensor, start: Tensor, rng: np.random.Generator) -> bytes:
        """Its own bytes."""
        del start, rng
        flat = tensor.detach().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""

    def decode(self, payload: bytes, start: Tensor) -> Tensor:
        """The same tensor."""
        if not payload:
            return torch.empty_like(start)
        return torch.frombuffer(bytearray(payload), dtype=start.dtype).reshape(start.shape)


CODECS: dict[str, Callable[[], Codec]] = {"identity": Identity}


@cache
def codec(name: str) -> Codec:
    """A codec by its name in the experiment."""
    return made_by_name(name, CODECS, "codec", Codec)  # type: ignore[type-abstract]


def is_encoded(key: str, tensor: Tensor) -> bool:
    """Whether a tensor goes through the codec: scales and whole numbers are sent as they are."""
    return tensor.is_floating_point() and tensor.ndim > 0 and not is_scale(key)


def transmitted(
    by: Codec,
    sent: Contribution,
    start: Mapping[str, Tensor],
    rng: np.random.Generator,
    memory: Memory,
) -> Contribution:
    """A contribution as the server gets it; ``start`` has the tensors that it can know.

    >>> one = Contribution({"w": torch.ones(3)}, 5)
    >>> transmitted(Identity(), one, {}, np.random.default_rng(0), {}) is one
    True
    """
    if by.is_exact:
        return sent
    before, errors, size = memory.get(ERROR, {}), Tensors(), 0
    received, payloads = dict(sent.tensors), dict[str, bytes]()
    for key, tensor in sent.tensors.items():
        if key not in start or not is_encoded(key, tensor):
            size += tensor.nbytes
            continue
        meant = tensor + before[key] if key in before else tensor
        payloads[key] = by.encode(meant, start[key], rng)
        received[key] = by.decode(payloads[key], start[key])
        size += len(payloads[key])
        if by.keeps_error:
            errors[key] = meant - received[key]
    kept = {**sent.memory, ERROR: {**before, **errors}} if by.keeps_error else sent.memory
    # What a rule remembers is sent as it is, beside the tensors.
    remembered = sent.nbytes - sum(tensor.nbytes for tensor in sent.tensors.values())
    return replace(
        sent,
        tensors=received,
        memory=kept,
        sent_bytes=size + remembered,
        payloads=payloads,
        stacked=None,
    )
