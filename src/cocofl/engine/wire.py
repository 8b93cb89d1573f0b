"""How tensors travel between our own processes: as plain arrays.

Left to itself PyTorch would pass tensors by shared file handles, of which a process has few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.fl.local import Task
from cocofl.fl.state import Contribution, Memory, Tensors

Packed = dict[str, tuple[torch.dtype, tuple[int, ...], NDArray[np.uint8]]]
PackedMemory = dict[str, Packed]


def pack(state: Mapping[str, Tensor]) -> Packed:
    """Tensors as bytes with types and shapes."""
    return {
        key: (t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy())
        for key, t in state.items()
    }


def unpack(packed: Packed) -> Tensors:
    """The tensors again."""
    return {
        key: torch.from_numpy(data).view(dtype).reshape(shape)
        if data.size
        else torch.empty(shape, dtype=dtype)
        for key, (dtype, shape, data) in packed.items()
    }


def pack_contribution(contribution: Contribution) -> tuple[Packed, PackedMemory, Contribution]:
    """Tensors apart from the rest."""
    rest = replace(contribution, tensors={}, memory={}, payloads={})
    return pack(contribution.tensors), _pack_memory(contribution.memory), rest


def unpack_contribution(packed: tuple[Packed, PackedMemory, Contribution]) -> Contribution:
    """The contribution again."""
    tensors, memory, rest = packed
    return replace(rest, tensors=unpack(tensors), memory=_unpack_memory(memory))


def pack_task(task: Task) -> tuple[PackedMemory, Task]:
    """Tensors apart from the rest."""
    return _pack_memory(task.memory), replace(task, memory={})


def unpack_task(packed: tuple[PackedMemory, Task]) -> Task:
    """The task again."""
    memory, rest = packed
    return replace(rest, memory=_unpack_memory(memory)) if memory else rest


def _pack_memory(memory: Memory) -> PackedMemory:
    return {name: pack(tensors) for name, tensors in memory.items()}


def _unpack_memory(packed: PackedMemory) -> Memory:
    return {name: unpack(tensors) for name, tensors in packed.items()}
