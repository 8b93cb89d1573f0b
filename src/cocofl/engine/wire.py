"""How objects travel between our own processes: pickled, with tensors as plain arrays.

Left to itself PyTorch would pass tensors by shared file handles, of which a process has few.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return NotImplemented
        flat = item.detach().contiguous().reshape(-1)
        return _tensor, (item.dtype, tuple(item.shape), flat.view(torch.uint8).numpy())


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: NDArray[np.uint8]) -> Tensor:
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def dumps(item: Any) -> bytes:
    """An object as bytes."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(item)
    return file.getvalue()


def receive(pipe: Connection) -> Any:
    """The next object from a process of our own; no other has this pipe."""
    return pickle.loads(pipe.recv_bytes())
