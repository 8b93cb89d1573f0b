"""Trained blocks that keep their inputs only: what backward needs is computed again there.

Less memory for more time, and the same numbers: dropout draws what it drew before, and norm
statistics and other buffers, which the block has moved already, are not moved again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import checkpoint

from cocofl.errors import InvalidSetting


def recomputed(run: Callable[..., Any], block: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """What ``run`` returns, which computes ``block``; nothing inside it is kept for backward."""
    given = [x for x in arguments if isinstance(x, Tensor)]
    versions = [x._version for x in given]
    result = checkpoint(
        run,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _buffers_put_back(block)),
    )
    if [x._version for x in given] != versions:
        raise InvalidSetting(
            "a trained block overwrites its input, so it cannot be computed again in the backward "
            "pass; freeze with checkpoint=False, or let its first layer not work in place"
        )
    return result


@contextmanager
def _buffers_put_back(block: nn.Module) -> Iterator[None]:
    buffers = [*block.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        # Autograd need not hear of it: where norms use the mini-batch, it reads none of these.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
