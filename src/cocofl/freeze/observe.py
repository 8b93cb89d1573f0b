"""Measuring scales where a block is trained: outputs and gradients are float there, and at hand."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, fx

from cocofl.freeze.grids import GRADIENT, OUTPUT, scale_key
from cocofl.freeze.operations import LoweredBlock
from cocofl.numerics import measure_scale


class ScaleMeter(fx.Interpreter):
    """Runs a trained block node by node and notes the scales at its sites."""

    def __init__(
        self, index: int, block: fx.GraphModule, lowered: LoweredBlock, found: dict[str, Tensor]
    ) -> None:
        super().__init__(block)
        self._prefix, self._sites, self._found = f"{index}.", set(lowered.sites), found

    def run_node(self, n: fx.Node) -> Any:
        """Also measure the output, and its gradient when it comes."""
        result = super().run_node(n)
        site = self._prefix + n.name
        if site in self._sites:
            self._note(scale_key(site, OUTPUT), result)
            if result.requires_grad:
                result.register_hook(partial(self._note, scale_key(site, GRADIENT)))
        return result

    def _note(self, key: str, x: Tensor) -> None:
        scale = measure_scale(x)
        # All zeros say nothing about a range, and a broken batch must not spoil the average.
        if 0 < float(scale) < float("inf"):
            self._found[key] = scale
