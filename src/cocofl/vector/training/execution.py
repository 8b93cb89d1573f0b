"""How steps run: as exactly as asked, and on a GPU captured as CUDA graphs.

A captured step is launched as a whole, at the cost of one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocofl.errors import InvalidSetting
from cocofl.vector.kernels.choice import KernelSet

PRECISIONS = ("fp32", "tf32", "bf16")
"""How exactly to multiply; of ``tf32`` 19 bits go into a product."""
_WARM_UPS = 1


def load_libraries(on: torch.device) -> None:
    """Load what a GPU needs and takes a second or two: a context there, libraries, a compiler.

    It can be done beside other work. What goes wrong is said to whoever computes there first.
    """
    if on.type == "cuda":
        with suppress(Exception):
            one = torch.ones(1, 1, device=on)
            KernelSet.on(on).rows(one @ one)


@dataclass(frozen=True)
class Precision:
    """A precision by name. Parameters, statistics and sums are float32 in any case."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in PRECISIONS:
            raise InvalidSetting(
                f"unknown precision {self.name!r}; expected one of {', '.join(PRECISIONS)}"
            )

    def cast(self, x: Tensor) -> Tensor:
        """Inputs in the type in which activations are kept."""
        narrow = self.name == "bf16" and x.dtype == torch.float32
        return x.to(torch.bfloat16) if narrow else x

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set PyTorch's own switches, and set them back."""
        cudnn, exact = torch.backends.cudnn, self.name == "fp32"
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic
        torch.set_float32_matmul_precision("highest" if exact else "high")
        # In full precision cuDNN has weight gradients that differ from time to time.
        cudnn.allow_tf32, cudnn.deterministic = not exact, exact
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            _, cudnn.allow_tf32, cudnn.deterministic = before


class Graphs:
    """Runs steps, and captures each kind of step the second time it is asked for."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def forget(self) -> None:
        """Capture anew: something that steps read has moved."""
        self._seen.clear()
        self._captured.clear()

    def knows(self, key: Hashable) -> bool:
        """Whether such a step has been taken before."""
        return key in self._seen or key in self._captured

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Take one step; all it reads and writes must stay where it is."""
        if not self._enabled:
            self._seen[key] = 1
            step()
        elif key in self._captured:
            self._captured[key].replay()
        elif self._seen.get(key, 0) < _WARM_UPS:
            # Warms up kernels and libraries; a kind of step that never comes again costs no more.
            self._seen[key] = self._seen.get(key, 0) + 1
            step()
        else:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool):
                step()
            self._pool = graph.pool()
            self._captured[key] = graph
            graph.replay()
