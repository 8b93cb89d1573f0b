"""Our own kernels, compiled by all cores at once instead of one by one as they are met."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch


@contextmanager
def compiling_only(on: torch.device) -> Iterator[None]:
    """Inside, kernels are compiled and not launched: what is computed meanwhile means nothing.

    Compilers run in threads of their own; at the end of the block all have finished.
    """
    # Imported only where there is a GPU, as the kernels are.
    from triton import AsyncCompileMode, JITFunction  # noqa: PLC0415

    launch = JITFunction.run

    def compile_alone(kernel: Any, *args: Any, warmup: bool, **more: Any) -> Any:
        del warmup
        return launch(kernel, *args, warmup=True, **more)

    with (
        torch.cuda.device(on),
        ThreadPoolExecutor(
            os.cpu_count(),
            initializer=torch.cuda.set_device,
            initargs=(torch.cuda.current_device(),),
        ) as pool,
    ):
        # Autograd goes backward in a thread of its own, which would not know of the compilers.
        with AsyncCompileMode(pool) as compilers, torch.autograd.set_multithreading_enabled(False):
            JITFunction.run = compile_alone
            try:
                yield
            finally:
                JITFunction.run = launch
        # To ask a kernel for its launcher builds that, with a C compiler, and loads both.
        made = [future.result() for future in compilers.future_kernels.values()]
        list(pool.map(attrgetter("run"), made))
