"""Which grid each value of a region is rounded to.

A grid comes from the server's scale, widened by the headroom. Values that are concatenated
share one grid, the widest among them, so that a concatenation only copies codes. A value whose
scale nobody has measured yet has none here, and is quantized on the fly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cocofl.freeze.operations import ActOp, CatOp, NodeOp, Operation
from cocofl.numerics import Grid, grid_for

OUTPUT, GRADIENT = "output", "gradient"


def scale_key(value: str, direction: str) -> str:
    """The name under which a scale travels in a state: ``scales.<block>.<node>.<direction>``."""
    return f"scales.{value}.{direction}"


@dataclass(frozen=True)
class Rounding:
    """The grid a value is rounded to: made of the largest of these scales, or on the fly."""

    keys: tuple[str, ...]
    unsigned: bool

    def grid(self, scales: Mapping[str, float], headroom: float) -> Grid | None:
        """With these scales; None on the fly."""
        if not self.keys:
            return None
        scale = max(scales[key] for key in self.keys)
        return grid_for(scale, unsigned=self.unsigned, headroom=headroom)


class Grids:
    """The grids of one region, looked up by value, where these scales are ``known``."""

    def __init__(
        self,
        operations: Iterable[Operation],
        non_negative: Collection[str],
        known: Collection[str],
    ) -> None:
        self._known = known
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

    def output(self, value: str, *, border: bool = False) -> Rounding:
        """Of a value; on the fly at the ``border`` of a region."""
        # A clamp or a reshape need not be measured, but what enters the family must be.
        keys: list[str] = []
        if not border and scale_key(value, OUTPUT) in self._known:
            family = (scale_key(member, OUTPUT) for member in self._family.get(value, {value}))
            keys = sorted(key for key in family if key in self._known)
        return Rounding(tuple(keys), self.unsigned(value))

    def gradient(self, value: str, *, border: bool = False) -> Rounding:
        """Of a value's gradient."""
        key = scale_key(value, GRADIENT)
        return Rounding(() if border or key not in self._known else (key,), False)
