"""How states travel between our own processes: as plain arrays.

Left to itself PyTorch would pass tensors by shared file handles, of which a process has few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.fl.merge import Contribution, State

Packed = dict[str, tuple[torch.dtype, tuple[int, ...], NDArray[np.uint8]]]


def pack(state: Mapping[str, Tensor]) -> Packed:
    """A state as bytes with types and shapes."""
    return {
        key: (t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy())
        for key, t in state.items()
    }


def unpack(packed: Packed) -> State:
    """The state again."""
    return {
        key: torch.from_numpy(data).view(dtype).reshape(shape)
        if data.size
        else torch.empty(shape, dtype=dtype)
        for key, (dtype, shape, data) in packed.items()
    }


def pack_contribution(contribution: Contribution) -> tuple[Packed, Contribution]:
    """Tensors apart from the rest."""
    return pack(contribution.tensors), replace(contribution, tensors={})


def unpack_contribution(packed: tuple[Packed, Contribution]) -> Contribution:
    """The contribution again."""
    tensors, rest = packed
    return replace(rest, tensors=unpack(tensors))
