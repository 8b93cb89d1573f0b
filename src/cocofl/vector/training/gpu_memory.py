"""How many devices a GPU has room for: where that is in doubt one is run, and its peak measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch

from cocofl.chain import BlockChain
from cocofl.freeze import Network
from cocofl.span import Span
from cocofl.vector.program.row_layout import Rows
from cocofl.vector.training.cohort import Cohort, DeviceWork

# Captured graphs keep their memory while a new kind of step, which is not captured yet, takes as
# much again; the allocator splits some.
_SHARE = 0.45
# How often all values between operations, and all parameters, are counted where nothing is tried
# out: of four networks that is 1.7 to 2.7 times the measured peak (docs/notebook/cohort.md).
_AMPLE = 2.0
_COPIES = 8


class SmallerCohort(UserWarning):
    """Devices that do not fit the GPU at once are trained in several goes."""


def devices_that_fit(
    make: Callable[[int], Cohort],
    wanted: int,
    on: torch.device,
    *,
    chain: BlockChain | None = None,
    distils: bool = False,
) -> int:
    """Of ``wanted`` devices as many as train at a time; on the CPU all of them.

    Nothing is tried out where a ``chain`` is so small that there is no doubt. Where a step
    ``distils``, two networks' activations are held at once.
    """
    if on.type != "cuda":
        return wanted
    torch.cuda.empty_cache()
    ours = _SHARE * _free_bytes(on)
    if chain is not None and wanted * ample_bytes(chain) * (1 + distils) <= ours:
        return wanted
    held = torch.cuda.memory_allocated(on)  # by others, who do not grow with the devices
    per_device = _peak_bytes(make(1), on, distils) - held
    fitting = max(1, int(ours // max(per_device, 1)))
    if fitting >= wanted:
        return wanted
    at_once = evenly(wanted, fitting)
    warnings.warn(
        f"{wanted} devices need about {wanted * per_device / 1e9:.1f} GB, and of the GPU's memory "
        f"{ours / 1e9:.1f} are for them: they are trained {at_once} at a time",
        SmallerCohort,
        stacklevel=2,
    )
    return at_once


def ample_bytes(chain: BlockChain) -> int:
    """More than a device takes that trains this chain on mini-batches as large as its example."""
    values = sum(map(math.prod, Network.of(chain).with_dropout.shapes.values()))
    parameters = list(chain.parameters())
    size = max((p.element_size() for p in parameters), default=4)
    return int(size * (_AMPLE * values + _COPIES * sum(p.numel() for p in parameters)))


def evenly(wanted: int, fitting: int) -> int:
    """How many at a time, in as few goes as possible: rooms that stay empty cost time, too.

    >>> evenly(10, 7), evenly(10, 4), evenly(3, 3)
    (5, 4, 3)
    """
    return math.ceil(wanted / math.ceil(wanted / fitting))


def _free_bytes(on: torch.device) -> int:
    """What this process can still take: no more than it was told to (``set_per_process_...``)."""
    device = torch.cuda.current_device() if on.index is None else on.index
    free, total = torch.cuda.mem_get_info(device)
    most = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, most - torch.cuda.memory_reserved(device))


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
