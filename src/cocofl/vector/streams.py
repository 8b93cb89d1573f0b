"""Small kernels of different devices side by side, where one alone leaves a GPU idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")
_STREAMS = 4


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
