"""Scales as a device measures them, in blocks that it trains."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from torch import Tensor, fx

from cocofl.freeze.scheme import GRADIENT, OUTPUT, scale_key
from cocofl.numerics import measure_scale


class ScaleNotes:
    """Notes the scales of values at sites, and of their gradients."""

    def __init__(self, sites: Container[str], found: dict[str, Tensor]) -> None:
        self._sites, self.found = sites, found

    def wants(self, value: str) -> bool:
        """Whether it is of interest."""
        return value in self._sites

    def note(self, value: str, direction: str, x: Tensor) -> None:
        """What a value, or its gradient, is."""
        scale = measure_scale(x)
        # All zeros say nothing about a range, and a broken batch must not spoil the average.
        if 0 < float(scale) < float("inf"):
            self.found[scale_key(value, direction)] = scale


class ScaleMeter(fx.Interpreter):
    """Runs a trained block node by node and notes the scales at its sites."""

    def __init__(self, index: int, block: fx.GraphModule, notes: ScaleNotes) -> None:
        super().__init__(block)
        self._prefix, self._notes = f"{index}.", notes

    def run_node(self, n: fx.Node) -> Any:
        """Also measure the output, and its gradient when it comes."""
        result = super().run_node(n)
        site = self._prefix + n.name
        if self._notes.wants(site):
            self._notes.note(site, OUTPUT, result)
            if result.requires_grad:
                # A hook that knew this interpreter, which holds the result, would keep both alive.
                result.register_hook(partial(self._notes.note, site, GRADIENT))
        return result
