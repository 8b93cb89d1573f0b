"""Memory that a training step frees is kept for the next one.

Under glibc's defaults a large tensor comes fresh from the kernel every time: each step touches
every page anew, which costs a full step of MobileNet a fifth of its time, and a price that varies
by half from one minute to the next. Workers of a simulation and all that measures steps keep
freed memory instead, so tables say what workers do, and say it twice the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

# From glibc's malloc.h. A higher mmap threshold than half of an arena's heap is refused.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEEP = (
    (_M_MMAP_THRESHOLD, 32 * 2**20),
    (_M_TRIM_THRESHOLD, 2**31 - 1),
    (_M_TOP_PAD, 64 * 2**20),
)
_RETURN = ((_M_MMAP_THRESHOLD, 2**16), (_M_TRIM_THRESHOLD, 2**16), (_M_TOP_PAD, 0))


def keep_freed_memory() -> bool:
    """Tell this process's malloc to keep what is freed; False where it takes no advice."""
    return _advise(_KEEP)


def return_freed_memory() -> bool:
    """The opposite: what is resident is then what is alive, without holes of what was before."""
    return _advise(_RETURN)


def _advise(settings: Sequence[tuple[int, int]]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return all(mallopt(setting, value) == 1 for setting, value in settings)
