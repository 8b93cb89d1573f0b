"""Steps captured as CUDA graphs: launched as a whole, at the cost of one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_WARM_UPS = 1


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

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Take one step; all it reads and writes must stay where it is."""
        if not self._enabled:
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
