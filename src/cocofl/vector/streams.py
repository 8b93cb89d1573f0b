"""Kernels side by side, where one alone leaves a GPU idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_STREAMS = 4
# How many pieces of work beside the present stream may be unfinished; what they read is kept.
_UNFINISHED = 6


@cache
def _streams() -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(_STREAMS)]


def side_by_side(call: Callable[..., Result], each: Sequence[tuple[object, ...]]) -> list[Result]:
    """``call`` on each of the arguments, on streams that begin and end with the present one.

    A captured graph keeps the branches. What a branch allocates may be used again only by later
    branches, which wait for the present stream first, so nothing is overwritten too early.
    """
    present, streams = torch.cuda.current_stream(), _streams()
    for stream in streams:
        stream.wait_stream(present)
    results = []
    for i, arguments in enumerate(each):
        with torch.cuda.stream(streams[i % _STREAMS]):
            results.append(call(*arguments))
    for stream in streams:
        present.wait_stream(stream)
    return results


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
