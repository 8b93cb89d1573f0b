"""Work beside the present stream, where kernels of a chain leave a GPU idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

# How many pieces of it may be unfinished; what they read is kept.
_UNFINISHED = 6


class Beside:
    """Work that nothing waits for until a step's end: gradients of weights.

    It fills the gaps that the chain of small kernels leaves on the present stream.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._unfinished: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, call: Callable[[], Tensor], *reads: Tensor) -> Tensor:
        """What ``call`` gives, ready after :meth:`join`; ``reads`` must not be overwritten."""
        present = torch.cuda.current_stream()
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            result = call()
        # Memory of what is read here must not be given to others before it has been read.
        self._unfinished.append((self._stream.record_event(), reads))
        if len(self._unfinished) > _UNFINISHED:
            event, _ = self._unfinished.popleft()
            present.wait_event(event)
        return result

    def join(self) -> None:
        """Let the present stream wait for all of it."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._unfinished.clear()
