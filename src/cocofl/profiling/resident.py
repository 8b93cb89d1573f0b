"""Resident memory: what a process holds beside training, and how far training rises above it.

A process that has imported everything, loaded model and data and run its kernels once holds some
hundred megabytes, whatever it trains. That is measured (:func:`settled_bytes`), and what a
configuration adds to it is the kernel's high-water mark (``VmHWM``) less that. The mark can be set
back on Linux only; elsewhere nothing is said.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cocofl.allocator import return_freed_memory

PASSES = 3

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Resident(NamedTuple):
    """Bytes that the process holds before, and bytes that come on top."""

    before: int
    added: int


def settled_bytes() -> int | None:
    """What is resident once garbage is gone, the high-water mark set back to that; or None."""
    gc.collect()
    try:
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")
        return _status_bytes("VmRSS")
    except (OSError, KeyError):  # not Linux, or not allowed here
        return None


def resident_peak(run: Callable[[], object]) -> Resident | None:
    """How far ``run`` raises resident memory, as the least of some passes after a first one.

    What the first pass leaves behind (compiled kernels, threads, imports) is there before the
    others. The holes that a heap gets would differ from pass to pass by a fifth, so freed memory is
    returned at once from here on; late garbage only adds.
    """
    return_freed_memory()
    run()
    passes = []
    for _ in range(PASSES):
        before = settled_bytes()
        if before is None:
            return None
        run()
        passes.append(Resident(before, _status_bytes("VmHWM") - before))
    return min(passes, key=lambda one: one.added)


def _status_bytes(name: str) -> int:
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}[f"{name}:"] * 1024
