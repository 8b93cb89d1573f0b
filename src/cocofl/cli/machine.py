"""``cocofl doctor``: what this machine can do."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from rich.markup import escape
from rich.table import Table

from cocofl import data
from cocofl.cli.printing import Json, print_json, print_table
from cocofl.data.origin import DATA_VARIABLE, cache_dir
from cocofl.errors import DataNotFound
from cocofl.freeze.kernels import KERNELS, safe_weight_bits, why_not
from cocofl.profiling import shipped
from cocofl.profiling.hardware import cpu_name
from cocofl.source import VERSION

# What int8 and bfloat16 arithmetic is fast with.
CPU_FEATURES = (
    "avx2", "avx512_f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "neon", "dot", "i8mm", "bf16", "sve", "sve2", "sve_bf16",
)  # fmt: skip
PACKAGES = (
    "torch", "numpy", "safetensors", "scikit-learn",
    "datasets", "matplotlib", "plotly", "flwr", "onnxruntime", "tensorboard",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    what: str
    state: Literal["good", "note", "bad"]
    found: str


def doctor(as_json: Json = False) -> None:
    """Show what this machine can do: CPU features, int8 kernels, GPU, data sets, versions.

    Example: cocofl doctor
    """
    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    signs = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]missing[/]"}
    table = Table("", "", "this machine", show_header=False)
    for finding in findings:
        table.add_row(finding.what, signs[finding.state], escape(finding.found))
    print_table(table)


def examine() -> list[Finding]:
    """Everything that is worth knowing before a first run, or in a bug report."""
    models = dict.fromkeys(name.rpartition("/")[0] for name in shipped())
    tables = Finding("profile tables", "good", ", ".join(models) or "none")
    return [*processor(), *kernels(), *_gpu(), *_data(), tables, *_versions()]


def processor() -> list[Finding]:
    """What this machine computes with."""
    capabilities: Mapping[str, Any] = torch.cpu.get_capabilities()
    has = [name for name in CPU_FEATURES if capabilities.get(name)]
    cores = f"{cpu_name()}, {os.cpu_count()} cores, {platform.machine()}"
    exact = safe_weight_bits() == 8
    why = "7-bit weights, as int8 sums can saturate without AVX512-VNNI"
    bits = "8-bit weights" if exact else why
    return [
        Finding("processor", "good", cores),
        Finding("its features", "good" if exact else "note", f"{', '.join(has) or 'none'}: {bits}"),
        Finding("threads of torch", "good", str(torch.get_num_threads())),
    ]


def kernels() -> list[Finding]:
    """In which ways it can compute int8."""
    reasons = {name: why_not(kernel) for name, kernel in KERNELS.items()}
    return [
        Finding(f"kernel {name}", "note" if reason else "good", reason or "runs here")
        for name, reason in reasons.items()
    ]


def _gpu() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPU", "note", f"none that torch {torch.__version__} can use")]
    return [
        Finding("GPU", "good", f"{index}: {torch.cuda.get_device_name(index)}")
        for index in range(torch.cuda.device_count())
    ]


def _data() -> list[Finding]:
    try:
        listings = [data.listing(name) for name in data.REGISTRY]
    except DataNotFound as error:
        return [Finding("data", "bad", str(error))]
    here, hub, rest = (
        ", ".join(entry.name for entry in listings if entry.state in states)
        for states in (("ready", "here"), ("hub",), ("missing",))
    )
    folder = cache_dir()
    at = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = f", {shutil.disk_usage(at).free / 1e9:.0f} GB free" if at else ""
    findings = [
        Finding("data here", "good", here),
        Finding("data on the Hub", "note", hub),
        Finding("data not found", "note", rest),
        Finding(DATA_VARIABLE, "note", os.environ.get(DATA_VARIABLE, "") or "not set"),
        Finding("cache", "good", f"{folder}{free}"),
    ]
    return [finding for finding in findings if finding.found]


def _versions() -> list[Finding]:
    found = [Finding("python", "good", platform.python_version())]
    found.append(Finding("cocofl", "good", VERSION))
    for name in PACKAGES:
        try:
            found.append(Finding(name, "good", metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "note", "not installed"))
    return found
