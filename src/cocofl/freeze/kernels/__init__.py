"""The kernels by name, and which of them this machine can run."""

from __future__ import annotations

import math
import os
import warnings
from functools import cache

import torch
from torch import Tensor

from cocofl.errors import KernelMissing
from cocofl.freeze.kernels.base import BFLOAT16, REFERENCE, Geometry, Kernel, LinearMap, Prepared
from cocofl.freeze.kernels.legacy import FBGEMM, NATIVE, QNNPACK
from cocofl.freeze.kernels.onednn import ONEDNN
from cocofl.freeze.kernels.onnx_runtime import ONNX_RUNTIME
from cocofl.named import nearest
from cocofl.numerics import Codes, Grid, QuantizedWeight, as_float

__all__ = [
    "KERNELS",
    "REFERENCE",
    "Geometry",
    "Kernel",
    "LinearMap",
    "Prepared",
    "available",
    "backend_names",
    "disagreement",
    "kernel",
    "leave_out",
    "safe_weight_bits",
    "why_not",
]

KERNELS = {k.name: k for k in (REFERENCE, BFLOAT16, ONEDNN, FBGEMM, QNNPACK, ONNX_RUNTIME)}
"""By name. One's own, put in here, can be asked for as a backend, and ``auto`` tries it."""
WITHOUT = "COCOFL_WITHOUT"
"""An environment variable that names kernels to do without, as if PyTorch did not have them."""
INTEGER_ERROR, ROUNDED_ERROR = 1e-4, 2e-2
"""By how much a kernel may differ from the reference: sums of int8 products are exact but for the
last float32 operations, and bfloat16 has three digits."""


def backend_names() -> tuple[str, ...]:
    """What may be asked for: ``auto``, ``legacy`` for this processor's engine, or a kernel."""
    first = ("auto", "reference", "onednn", "legacy")
    return (*first, *(name for name in KERNELS if name not in first))


def kernel(name: str) -> Kernel:
    """The kernel of this name, if this machine has it."""
    chosen = NATIVE if name == "legacy" else KERNELS.get(name)
    if chosen is None:
        raise KernelMissing(f"there is no kernel {name!r}; known are {', '.join(KERNELS)}")
    if reason := why_not(chosen):
        raise KernelMissing(f"kernel {name!r} cannot run here: {reason}. Use backend='auto'.")
    return chosen


def available(device: torch.device) -> list[Kernel]:
    """The kernels that tensors on ``device`` can run with, the reference first."""
    on_cpu = device.type == "cpu"
    return [k for k in KERNELS.values() if (on_cpu or not k.cpu_only) and why_not(k) is None]


def why_not(chosen: Kernel) -> str | None:
    """Why a kernel cannot run here, or None: tried, since PyTorch lists some that cannot."""
    unwanted = os.environ.get(WITHOUT, "").split()
    for name in unwanted:
        _check_is_kernel(name)
    if not _names(chosen).isdisjoint(unwanted) and chosen is not REFERENCE:
        return f"{WITHOUT} names it"
    return chosen.missing() or _fails(chosen)


def _names(chosen: Kernel) -> set[str]:
    """What a kernel is called where it is not wanted: ``legacy`` are several."""
    return {chosen.name, chosen.name.partition("-")[0]}


@cache
def _check_is_kernel(name: str) -> None:
    """Say, once, that a name to do without is none."""
    known = sorted(set().union(*map(_names, KERNELS.values())) - {REFERENCE.name})
    if name not in {*known, REFERENCE.name}:
        warnings.warn(
            f"{WITHOUT} names {name!r}{nearest(name, known)}, which is no kernel; it may name "
            f"{', '.join(known)}",
            RuntimeWarning,
            stacklevel=3,
        )


@cache
def _fails(chosen: Kernel) -> str | None:
    try:
        for shape, geometry in (((2, 8), None), ((2, 8, 4, 4), Geometry())):
            codes = torch.arange(64, dtype=torch.int8).reshape(8, 8, *[1] * (len(shape) - 2)) - 32
            one = LinearMap(QuantizedWeight(codes, torch.ones(8)), None, geometry, False, 0, shape)
            values = torch.arange(math.prod(shape), dtype=torch.uint8).reshape(shape)
            x = Codes(values, Grid(1.0, 0))
            # Some round by themselves, and leave what is not rounded to the reference.
            for out in (None, Grid(64.0, 128)):
                found, truth = (as_float(k.prepare(one)(x, out, None)) for k in (chosen, REFERENCE))
                if problem := disagreement(chosen, found, truth, out):
                    return leave_out(chosen.name, problem)
    except Exception as error:  # whatever it is, the others can do the work
        return leave_out(chosen.name, f"{type(error).__name__}: {error}")
    return None


def disagreement(
    chosen: Kernel, found: Tensor, truth: Tensor, out: Grid | None = None
) -> str | None:
    """What is wrong with a kernel's result beside the reference's; None where it is right.

    Where both were rounded to the grid ``out``, they may fall on neighbours.
    """
    error = float((found - truth).norm() / truth.norm().clamp_min(1e-12))
    allowed = INTEGER_ERROR if chosen.integer else ROUNDED_ERROR
    if out is not None:
        allowed += float(torch.full_like(truth, out.scale).norm() / truth.norm().clamp_min(1e-12))
    return None if error <= allowed else f"it is off by {error:.2g} of the reference's result"


@cache
def leave_out(name: str, reason: str) -> str:
    """Say, once, that a kernel is not used, and why."""
    warnings.warn(
        f"kernel {name!r} is left out where it fails: {reason}", RuntimeWarning, stacklevel=3
    )
    return reason


def safe_weight_bits(backend: str = "auto") -> int:
    """How many bits weights may have here, whichever kernel ``backend`` picks: 7 or 8."""
    chosen = available(torch.device("cpu")) if backend == "auto" else [kernel(backend)]
    return min(k.weight_bits() for k in chosen)
