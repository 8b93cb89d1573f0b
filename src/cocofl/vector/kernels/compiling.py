"""Our own kernels, compiled by all cores at once instead of one by one as they are met."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch

_PATIENCE_S = 120.0
"""After which a process that compiles is given up."""


@contextmanager
def compiling_only(on: torch.device) -> Iterator[None]:
    """Inside, kernels are compiled and not launched: what is computed meanwhile means nothing.

    At the end of the block all are compiled.
    """
    # Imported only where there is a GPU, as the kernels are.
    from triton import AsyncCompileMode, JITFunction  # noqa: PLC0415

    launch, later = JITFunction.run, _Later()

    def compile_alone(kernel: Any, *args: Any, warmup: bool, **more: Any) -> Any:
        del warmup
        return launch(kernel, *args, warmup=True, **more)

    with torch.cuda.device(on):
        # Autograd goes backward in a thread of its own, which would not know of the compilers.
        with AsyncCompileMode(later) as compilers, torch.autograd.set_multithreading_enabled(False):
            JITFunction.run = compile_alone
            try:
                yield
            finally:
                JITFunction.run = launch
                later.compile()
        made = [future.result() for future in compilers.future_kernels.values()]
        with ThreadPoolExecutor(
            os.cpu_count(),
            initializer=torch.cuda.set_device,
            initargs=(torch.cuda.current_device(),),
        ) as pool:
            # To ask a kernel for its launcher loads both. A C compiler builds a launcher, which all
            # kernels of one signature share: so it is first asked for by one of them.
            one_of_each = {tuple(kernel.src.signature.values()): kernel for kernel in made}
            for some in (one_of_each.values(), made):
                list(pool.map(attrgetter("run"), some))


class _Later(Executor):
    """Keeps what is to be compiled until all of it is known."""

    def __init__(self) -> None:
        self._left: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """A result that is there once :meth:`compile` was called."""
        del args, more  # there are none
        self._left.append((Future(), fn))
        return self._left[-1][0]

    def compile(self) -> None:
        """All of it: processes fill Triton's cache, which is then read here."""
        compile_in_processes([fn for _, fn in self._left])
        for future, fn in self._left:
            try:
                future.set_result(fn())
            except Exception as error:  # whoever asks for the kernel is told
                future.set_exception(error)


def compile_in_processes(kernels: Sequence[Callable[[], Any]]) -> None:
    """Let copies of this process compile kernels into Triton's cache.

    Threads would wait for one another: compilers keep Python's lock for most of their time. A copy
    does not touch the GPU. What it does not get done is left to the caller, and nothing is said.
    """
    workers = min(os.cpu_count() or 1, len(kernels))
    if workers < 2 or not hasattr(os, "fork"):
        return
    copies = []
    for worker in range(workers):
        with warnings.catch_warnings():
            # Of threads that hold a lock: a copy that waits for one is given up.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            _compile_and_leave(kernels[worker::workers])
        copies.append(process)
    _wait_for(copies, time.monotonic() + _PATIENCE_S)


def _compile_and_leave(kernels: Sequence[Callable[[], Any]]) -> None:
    """In a copy of the process, which ends here and says nothing."""
    try:
        for kernel in kernels:
            with suppress(Exception):
                kernel()
    finally:
        os._exit(0)


def _wait_for(processes: Sequence[int], until: float) -> None:
    """Until all have ended, or it is time."""
    left = list(processes)
    while left:
        left = [process for process in left if not _has_ended(process)]
        if left and time.monotonic() > until:
            for process in left:
                os.kill(process, signal.SIGKILL)
            until = float("inf")
        time.sleep(0.005 if left else 0.0)


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG) != (0, 0)
    except ChildProcessError:  # somebody else waits for this process's children
        return True
