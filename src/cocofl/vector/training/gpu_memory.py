"""How many devices a GPU has room for: one of them is run, and its peak measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch

from cocofl.span import Span
from cocofl.vector.program.row_layout import Rows
from cocofl.vector.training.cohort import Cohort, DeviceWork

# Captured graphs keep their memory, and there are some kinds of steps; the allocator splits some.
_SHARE = 0.6


class SmallerCohort(UserWarning):
    """Devices that do not fit the GPU at once are trained in several goes."""


def devices_that_fit(
    make: Callable[[int], Cohort], wanted: int, on: torch.device, *, distils: bool = False
) -> int:
    """Of ``wanted`` devices as many as fit; on the CPU all of them.

    Where a step ``distils``, two networks' activations are held at once.
    """
    if on.type != "cuda":
        return wanted
    held = torch.cuda.memory_allocated(on)  # by others, who do not grow with the devices
    per_device = _peak_bytes(make(1), on, distils) - held
    free, _ = torch.cuda.mem_get_info(on)
    fitting = max(1, int(_SHARE * free // max(per_device, 1)))
    if fitting < wanted:
        warnings.warn(
            f"{wanted} devices need about {wanted * per_device / 1e9:.1f} GB, and the GPU has "
            f"{free / 1e9:.1f}: they are trained {fitting} at a time",
            SmallerCohort,
            stacklevel=2,
        )
    return fitting


def _peak_bytes(cohort: Cohort, on: torch.device, distils: bool) -> int:
    """Of one step that trains everything, the tensors of the cohort itself included."""
    program = cohort.program
    zeros = torch.zeros_like(cohort.parameters), torch.zeros_like(cohort.statistics)
    rows = Rows(*zeros, torch.full_like(cohort.measured, torch.nan))
    work, levels = DeviceWork(Span(0, program.n_blocks), "f", 0.0), None
    if distils:
        whole = torch.ones_like(cohort.parameters[0])
        student, teacher = (cohort.add_level(whole, program.channels) for _ in range(2))
        work = work._replace(level=teacher, distillation=0.5)
        levels = np.full((1, 1), student), cohort.statistics[:, None]
    torch.cuda.reset_peak_memory_stats(on)
    shape = 1, 1, cohort.batch
    indices, valid = np.zeros(shape, np.int64), np.full((1, 1), 1)
    cohort.train(rows, [frozenset()], [work], indices, valid, levels)
    peak = torch.cuda.max_memory_allocated(on)
    del cohort
    torch.cuda.empty_cache()
    return peak
