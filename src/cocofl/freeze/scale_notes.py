"""Scales as a device measures them, in blocks that it trains."""

from __future__ import annotations

import operator
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
        site = self._prefix + n.name
        wanted = self._notes.wants(site)
        written: Any = n.args[0] if n.target is operator.setitem else None
        if wanted and written is not None:
            self._write_into_a_copy(written)
        result = super().run_node(n)
        if wanted:
            # A write into a tensor returns nothing; its value is the tensor from then on.
            value = result if written is None else self.env[written]
            self._notes.note(site, OUTPUT, value)
            if value.requires_grad:
                # A hook that knew this interpreter, which holds the result, would keep both alive.
                value.register_hook(partial(self._notes.note, site, GRADIENT))
        return result

    def _write_into_a_copy(self, written: Any) -> None:
        """A tensor with a hook that is written to and gets another one ends the process.

        Seen with PyTorch 2.13: ``register_hook``, ``y[0] = 1``, ``register_hook``.
        """
        old = self.env[written]
        copy = old.clone()
        self.env.update({node: copy for node, value in self.env.items() if value is old})
