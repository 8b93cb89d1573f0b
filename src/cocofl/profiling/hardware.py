"""The machine that a table was measured on."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class Hardware:
    """What step times depend on. ``plan`` is a short hash of the int8 kernel plan."""

    cpu: str
    threads: int
    torch: str
    plan: str = ""

    @classmethod
    def here(cls, threads: int | None = None, choices: Mapping[str, str] = {}) -> Hardware:
        """This machine, with the threads and the kernel plan in use."""
        used = torch.get_num_threads() if threads is None else threads
        text = "\n".join(f"{signature}={kernel}" for signature, kernel in sorted(choices.items()))
        plan = hashlib.sha256(text.encode()).hexdigest()[:8] if choices else ""
        return cls(cpu_name(), used, _release(torch.__version__), plan)

    def same_machine(self, other: Hardware) -> bool:
        """Whether step times can be compared: the processor and the PyTorch release agree."""
        return (self.cpu, _release(self.torch)) == (other.cpu, _release(other.torch))

    def __str__(self) -> str:
        return f"{self.cpu}, {self.threads} threads, torch {self.torch}"


@cache
def cpu_name() -> str:
    """The processor as the system calls it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _release(version: str) -> str:
    """Without the build: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]
