"""The kernels by name, and which of them this machine can run."""

from __future__ import annotations

import platform

import torch

from cocofl.errors import KernelMissing
from cocofl.freeze.kernels.base import Geometry, Kernel, LinearMap, Prepared
from cocofl.freeze.kernels.floating import BFLOAT16, REFERENCE
from cocofl.freeze.kernels.legacy import FBGEMM, NATIVE, QNNPACK
from cocofl.freeze.kernels.onednn import ONEDNN

__all__ = [
    "KERNELS",
    "REFERENCE",
    "Geometry",
    "Kernel",
    "LinearMap",
    "Prepared",
    "available",
    "backend_names",
    "kernel",
    "safe_weight_bits",
]

KERNELS = {k.name: k for k in (REFERENCE, BFLOAT16, ONEDNN, FBGEMM, QNNPACK)}
"""By name. One's own, put in here, can be asked for as a backend, and ``auto`` tries it."""


def backend_names() -> tuple[str, ...]:
    """What may be asked for: ``auto``, ``legacy`` for this processor's engine, or a kernel."""
    first = ("auto", "reference", "onednn", "legacy")
    return (*first, *(name for name in KERNELS if name not in first))


def kernel(name: str) -> Kernel:
    """The kernel of this name, if this machine has it."""
    chosen = NATIVE if name == "legacy" else KERNELS.get(name)
    if chosen is None:
        raise KernelMissing(f"there is no kernel {name!r}; known are {', '.join(KERNELS)}")
    if reason := chosen.missing():
        raise KernelMissing(f"kernel {name!r} cannot run here: {reason}. Use backend='auto'.")
    return chosen


def available(device: torch.device) -> list[Kernel]:
    """The kernels that tensors on ``device`` can run with, the reference first."""
    on_cpu = device.type == "cpu"
    return [k for k in KERNELS.values() if (on_cpu or not k.cpu_only) and k.missing() is None]


def safe_weight_bits() -> int:
    """8, or 7 where int8 products are summed in int16 and would saturate (x86 without VNNI)."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return 8
    features = torch.cpu.get_capabilities()
    return 8 if features.get("avx512_vnni") or features.get("avx_vnni") else 7
