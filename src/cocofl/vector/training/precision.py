"""How exactly a cohort multiplies: ``fp32``, ``tf32`` (19 bits go into a product), ``bf16``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cocofl.errors import InvalidSetting

PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Precision:
    """A precision by name. Parameters, statistics and sums are float32 in any case."""

    name: str

    @classmethod
    def named(cls, name: str) -> Precision:
        """One of the three."""
        if name not in PRECISIONS:
            raise InvalidSetting(
                f"unknown precision {name!r}; expected one of {', '.join(PRECISIONS)}"
            )
        return cls(name)

    def cast(self, x: Tensor) -> Tensor:
        """Inputs in the type in which activations are kept."""
        if self.name == "bf16" and x.dtype == torch.float32:
            return x.to(torch.bfloat16)
        return x

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set PyTorch's own switches, and set them back."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest" if self.name == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = self.name != "fp32"
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]
