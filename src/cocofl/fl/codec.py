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

from cocofl.checks import check_number
from cocofl.errors import InvalidExperiment
from cocofl.fl.state import Contribution, Memory, Tensors, is_scale
from cocofl.named import made_by_name

_STATISTICS = ("running_mean", "running_var")
ERROR = "upload error"
"""The memory of a device that holds what its codec lost."""


@dataclass(frozen=True)
class Upload:
    """The section ``[upload]`` of an experiment."""

    codec: str = "identity"
    """How tensors become bytes: identity, float16, int8, topk, or ``package.module:function``."""
    fraction: float = 0.01
    """Of each tensor's elements, how many ``topk`` sends."""

    def __post_init__(self) -> None:
        check_number("upload.fraction", self.fraction, above=0, most=1)

    def made(self) -> Codec:
        """The codec that is named."""
        return TopK(self.fraction) if self.codec == "topk" else codec(self.codec)


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


@dataclass(frozen=True)
class Float16(Codec):
    """The change in half precision: two bytes a number, three digits."""

    def size_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Two bytes a number."""
        del dtype
        return 2 * prod(shape)

    def encode(self, tensor: Tensor, start: Tensor, rng: np.random.Generator) -> bytes:
        """The change, rounded; one beyond what float16 holds is cut there."""
        del rng
        most = torch.finfo(torch.float16).max
        return (tensor - start).clamp(-most, most).half().numpy().tobytes()

    def decode(self, payload: bytes, start: Tensor) -> Tensor:
        """The start with the change."""
        change = torch.from_numpy(np.frombuffer(payload, np.float16).astype(np.float64))
        return start + change.reshape(start.shape).to(start.dtype)


@dataclass(frozen=True)
class Int8(Codec):
    """The change in whole parts of its largest: a byte a number, and a scale for each channel.

    It is rounded up or down by chance, so that the mean over devices and rounds is right
    (QSGD; Alistarh et al., NeurIPS 2017).
    """

    def size_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """A byte a number, and the scales."""
        del dtype
        return prod(shape) + 4 * _channels(shape)

    def encode(self, tensor: Tensor, start: Tensor, rng: np.random.Generator) -> bytes:
        """Scales, then codes."""
        change = (tensor - start).double().reshape(_channels(tensor.shape), -1).numpy()
        scales = (np.abs(change).max(1, initial=0.0) / _CODES).astype(np.float32)
        parts = change / np.maximum(scales, np.finfo(np.float32).tiny)[:, None]
        codes = np.floor(parts + rng.random(parts.shape)).clip(-_CODES, _CODES)
        payload: bytes = scales.tobytes() + codes.astype(np.int8).tobytes()
        return payload

    def decode(self, payload: bytes, start: Tensor) -> Tensor:
        """The start with the change."""
        channels = _channels(start.shape)
        scales = np.frombuffer(payload, np.float32, channels)
        codes = np.frombuffer(payload, np.int8, offset=4 * channels).reshape(channels, -1)
        change = torch.from_numpy(codes * scales.astype(np.float64)[:, None])
        return start + change.reshape(start.shape).to(start.dtype)


_CODES = 127


def _channels(shape: Sequence[int]) -> int:
    """How many scales a tensor has: vectors have one."""
    return shape[0] if len(shape) > 1 and 0 not in shape else 1


@dataclass(frozen=True)
class TopK(Codec):
    """The largest changes of each tensor, and where they are; the others wait.

    What is not said is added to what the device says next time (Stich et al., NeurIPS 2018).
    """

    fraction: float = 0.01
    keeps_error: ClassVar[bool] = True

    def size_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """A place and a value for each."""
        return self._count(prod(shape)) * (4 + dtype.itemsize)

    def _count(self, size: int) -> int:
        return min(size, max(1, round(self.fraction * size)))

    def encode(self, tensor: Tensor, start: Tensor, rng: np.random.Generator) -> bytes:
        """Places in order, then values."""
        del rng
        change = (tensor - start).flatten()
        # Of equal ones the first: a sort that is stable is the same everywhere.
        order = change.abs().argsort(descending=True, stable=True)
        places = order[: self._count(len(change))].sort().values
        values = change[places].numpy().tobytes()
        return places.numpy().astype(np.int32).tobytes() + values

    def decode(self, payload: bytes, start: Tensor) -> Tensor:
        """The start with these changes."""
        count = self._count(start.numel())
        places = torch.from_numpy(np.frombuffer(payload, np.int32, count).astype(np.int64))
        if not bool(((places >= 0) & (places < start.numel())).all() and (places.diff() > 0).all()):
            raise ValueError("places are outside of the tensor, or not in order")
        found = start.flatten().clone()
        if not count:
            return found.reshape(start.shape)
        values = torch.frombuffer(bytearray(payload[4 * count :]), dtype=start.dtype)
        found[places] += values
        return found.reshape(start.shape)


CODECS: dict[str, Callable[[], Codec]] = {
    "identity": Identity,
    "float16": Float16,
    "int8": Int8,
    "topk": TopK,
}


@cache
def codec(name: str) -> Codec:
    """A codec by its name in the experiment."""
    return made_by_name(name, CODECS, "codec", Codec)  # type: ignore[type-abstract]


def check_use(by: Codec, name: str, strategy: str, uploads: str, *, waits: bool) -> None:
    """Refuse a codec for a strategy whose devices cannot send by it."""
    if by.is_exact:
        return
    if not uploads:
        raise InvalidExperiment(
            f"upload.codec is {name!r}, but in {strategy!r} nothing is uploaded; "
            'expected "identity"'
        )
    if by.keeps_error and uploads != "blocks":
        raise InvalidExperiment(
            f"upload.codec is {name!r}, which keeps what it could not say for the same tensors in "
            f"a later round, but devices of {strategy!r} send {uploads} of tensors, and others "
            "every time; expected identity, float16, int8, or another strategy"
        )
    if by.keeps_error and not waits:
        raise InvalidExperiment(
            f"upload.codec is {name!r}, which lets devices remember what they could not say, but "
            f"the server of {strategy!r} does not wait for them, and keeps no memory of devices; "
            "expected identity, float16, int8, or another strategy"
        )


def is_encoded(key: str, tensor: Tensor) -> bool:
    """Whether a tensor goes through the codec.

    Scales, norm statistics and whole numbers are sent as they are: they are few, and a variance
    that a codec has made negative is worth nothing.
    """
    sent_as_it_is = is_scale(key) or key.endswith(_STATISTICS)
    return tensor.is_floating_point() and tensor.ndim > 0 and not sent_as_it_is


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
    whole = sum(tensor.nbytes for tensor in sent.tensors.values())
    # What a rule remembers is sent as it is, beside the tensors; what the server has already (as
    # where parameters are frozen) is sent by no codec.
    size = size + sent.nbytes - whole if sent.nbytes >= whole else size * sent.nbytes // whole
    return replace(
        sent,
        tensors=received,
        memory=kept,
        sent_bytes=size,
        payloads=payloads,
        stacked=None,
    )
