"""How our kernels are launched: before the one in front of them has ended, where a GPU can do that.

A step is hundreds of small kernels, and from the end of one to the begin of the next a GPU takes a
microsecond or two. Since Hopper a kernel may be put in place meanwhile. It then waits by itself,
which every kernel does first, and so touches no memory before all in front of it have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _can_be_early() -> bool:
    has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    return has_cuda and torch.cuda.get_device_capability() >= (9, 0)


_EARLY = tl.constexpr(_can_be_early())


@triton.jit
def wait_for_those_before():
    """To be called first: the next kernel may get ready, and what others wrote can be read."""
    if _EARLY:
        gdc_launch_dependents()
        gdc_wait()


class Kernel:
    """A compiled function, launched like Triton's own."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        self._compiled = triton.jit(function, **options)
        self._how = {"launch_pdl": True} if _EARLY.value else {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """What launches so many programs."""
        return partial(self._compiled[grid], **self._how)


def kernels(*, sizes: tuple[str, ...], of_devices: tuple[str, ...]) -> Callable[..., Kernel]:
    """A decorator for kernels that are not compiled anew for these arguments.

    Triton would, for sizes and addresses that are multiples of 16, and each time takes a third of a
    second. Only channels and large tensors gain from it.
    """
    return partial(Kernel, do_not_specialize=sizes, do_not_specialize_on_alignment=of_devices)
