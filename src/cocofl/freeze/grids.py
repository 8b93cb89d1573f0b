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

    def output_keys(self, value: str) -> tuple[str, ...]:
        """The scales of which the largest makes a value's grid; none where it is not known."""
        # A clamp or a reshape need not be measured, but what enters the family must be.
        if scale_key(value, OUTPUT) not in self._scales:
            return ()
        keys = (scale_key(member, OUTPUT) for member in self._family.get(value, {value}))
        return tuple(sorted(key for key in keys if key in self._scales))

    def gradient_keys(self, value: str) -> tuple[str, ...]:
        """The scale that makes the grid of a value's gradient, if it is known."""
        key = scale_key(value, GRADIENT)
        return (key,) if key in self._scales else ()

    def output(self, value: str) -> Grid | None:
        """The grid of a value, if its scale is known."""
        return self._grid(self.output_keys(value), unsigned=self.unsigned(value))

    def gradient(self, value: str) -> Grid | None:
        """The grid of a value's gradient, if its scale is known."""
        return self._grid(self.gradient_keys(value), unsigned=False)

    def _grid(self, keys: tuple[str, ...], *, unsigned: bool) -> Grid | None:
        if not keys:
            return None
        scale = max(self._scales[key] for key in keys)
        return grid_for(scale, unsigned=unsigned, headroom=self._headroom)
