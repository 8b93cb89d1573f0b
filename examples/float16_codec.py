"""A codec of your own: devices send the change of every tensor in float16, half of the bytes.

cocofl run --set upload.codec=float16_codec:float16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cocofl.codecs import Codec


@dataclass(frozen=True)
class Float16(Codec):
    """What float16 cannot say is added to what the device says next time."""

    keeps_error: ClassVar[bool] = True

    def size_bytes(self, shape: Sequence[int], _dtype: torch.dtype) -> int:
        """Two bytes a number."""
        return 2 * prod(shape)

    def encode(self, tensor: Tensor, start: Tensor, _rng: np.random.Generator) -> bytes:
        """The change, rounded."""
        return (tensor - start).half().numpy().tobytes()

    def decode(self, payload: bytes, start: Tensor) -> Tensor:
        """The start with the change."""
        change = torch.frombuffer(bytearray(payload), dtype=torch.float16)
        return start + change.reshape(start.shape).to(start.dtype)


def float16() -> Float16:
    """What ``upload.codec`` names."""
    return Float16()
