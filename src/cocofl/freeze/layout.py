"""In which layout a block's images may lie in memory.

Channels last is the fast one. But of a strided 1×1 convolution with few input channels oneDNN then
writes the gradient of the weight beyond its buffer (issue 6035 of uxlfoundation/oneDNN; seen with
PyTorch 2.11 and 2.13): the process dies, now or later. Channels first, all is well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cocofl.freeze.dispatch import OperationWatch


def channels_last(x: Any) -> Any:
    """``x``, and if it is a batch of images channels last: what every fast convolution wants."""
    if isinstance(x, Tensor) and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def channels_first(x: Tensor) -> Tensor:
    """``x`` with strides that nothing takes for channels last, not even those of one channel."""
    return x.contiguous().view(-1).view(x.shape)


def enough_channels() -> int:
    """From how many input channels on oneDNN is correct: as many floats as a register holds."""
    return 8 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 16


class FaultyConvolutions(OperationWatch):
    """Notices whether what runs inside has such a convolution, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what is asked, and look at convolutions."""
        if func is torch.ops.aten.convolution.default:
            _, weight, _, stride, *_, groups = args
            strided_pointwise = weight.shape[2:] == (1, 1) and max(stride) > 1 and groups == 1
            self.seen |= strided_pointwise and weight.shape[1] < enough_channels()
        return func(*args, **kwargs or {})
