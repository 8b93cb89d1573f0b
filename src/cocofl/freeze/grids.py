"""Which grid each value of a region is held on.

A grid comes from the server's scale, widened by the headroom. Values that are concatenated
share one grid, the widest among them, so that a concatenation only copies codes. A value whose
scale nobody has measured yet has none here, and is quantized on the fly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cocofl.freeze.lowering import ActOp, CatOp, NodeOp, Operation
from cocofl.numerics import Grid, grid_for

OUTPUT, GRADIENT = "output", "gradient"


def scale_key(value: str, direction: str) -> str:
    """The name under which a scale travels in a state: ``scales.<block>.<node>.<direction>``."""
    return f"scales.{value}.{direction}"


class Grids:
    """The grids of one region, looked up by value."""

    def __init__(
        self,
        operations: Iterable[Operation],
        non_negative: Collection[str],
        scales: Mapping[str, float],
        headroom: float,
    ) -> None:
        self._scales, self._headroom = scales, headroom
        self._family: dict[str, set[str]] = {}
        for op in operations:
            if isinstance(op, CatOp):
                self._join(op.name, *op.inputs)
            elif isinstance(op, ActOp) or (isinstance(op, NodeOp) and op.layout and op.inputs):
                self._join(op.name, op.inputs[0])
        self._non_negative = frozenset(non_negative)

    def _join(self, *values: str) -> None:
        family = set().union(*(self._family.get(value, {value}) for value in values))
        for value in family:
            self._family[value] = family

    def unsigned(self, value: str) -> bool:
        """Whether the codes of this value start at zero."""
        return self._non_negative.issuperset(self._family.get(value, {value}))

    def output(self, value: str) -> Grid | None:
        """The grid of a value, if its scale is known."""
        known = [
            self._scales.get(scale_key(member, OUTPUT))
            for member in self._family.get(value, {value})
        ]
        scales = [scale for scale in known if scale is not None]
        # A clamp or a reshape need not be measured, but what enters the family must be.
        if self._scales.get(scale_key(value, OUTPUT)) is None or not scales:
            return None
        return grid_for(max(scales), unsigned=self.unsigned(value), headroom=self._headroom)

    def gradient(self, value: str) -> Grid | None:
        """The grid of a value's gradient, if its scale is known."""
        scale = self._scales.get(scale_key(value, GRADIENT))
        return None if scale is None else grid_for(scale, headroom=self._headroom)
