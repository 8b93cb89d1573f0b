"""What a region computes in int8: which values are codes, and what is rounded where.

A :class:`QuantizationScheme` is made once from a region's operations and the scales that are
known. :class:`~cocofl.freeze.region.IntegerRegion` carries it out for one device with real
kernels, and :mod:`cocofl.vector` for many devices at once.

What a value is rounded to, its grid, comes from the server's scale, widened by the headroom.
Values that are concatenated share one grid, the widest among them, so that a concatenation only
copies codes. A value whose scale nobody has measured yet is quantized on the fly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from cocofl.freeze.operations import ActOp, CatOp, MapOp, NodeOp, Operation, ValueName
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
        self, operations: Iterable[Operation], non_negative: Collection[str], known: Collection[str]
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


@dataclass(frozen=True)
class SchemeStep:
    """One operation, or (``op`` is None) the conversion of a float value for those who read codes.

    Gradients are described for regions that pass them on.
    """

    op: Operation | None
    name: str
    inputs: tuple[str, ...]
    """What it reads: values by name, and conversions by theirs."""
    in_codes: bool
    """Whether its result is held in codes."""
    output: Rounding | None = None
    """What the result is rounded to; None where it is float, or keeps the grid it had."""
    reads_unsigned: bool = False
    """Whether a map's input has a grid without negative values."""
    gradient: Rounding | None = None
    """What a map rounds the gradient of its result to, if that is float."""
    passes_gradient: bool = False
    """Whether a gradient arrives at all."""
    gradient_in_codes: bool = False
    """Whether it arrives in codes, and so is not rounded again."""
    completes_gradient: bool = False
    """Whether a map's share of its input's gradient is the last to come: it adds up all."""
    input_gradient: Rounding | None = None
    """What that sum is rounded to; None where it stays float."""


@dataclass(frozen=True)
class QuantizationScheme:
    """The steps of a region, in order, and the values that enter and leave it in float."""

    steps: tuple[SchemeStep, ...]
    inputs: tuple[str, ...]
    outputs: Any
    """A :class:`ValueName` for each value, in the structure that the region returns."""
    passing: bool

    @classmethod
    def of(
        cls,
        operations: Sequence[Operation],
        grids: Grids,
        inputs: tuple[str, ...],
        outputs: Any,
        floats: Collection[str],
        passing: bool,
    ) -> QuantizationScheme:
        """The scheme of a region; ``floats`` are the values that gradients can have."""
        ends = named_values(outputs)
        steps = _Forward(operations, grids, {*inputs, *ends}).steps
        if passing:
            steps = _with_gradients(steps, ends, floats, grids)
        return cls(tuple(steps), inputs, outputs, passing)

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that it returns, each once."""
        return named_values(self.outputs)


def named_values(structure: Any) -> tuple[str, ...]:
    """The values in what blocks return, each once."""
    leaves = pytree.tree_leaves(structure)
    return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, ValueName)))


class _Forward:
    """Follows a region operation by operation and knows which values are codes by now."""

    def __init__(
        self, operations: Sequence[Operation], grids: Grids, borders: Collection[str]
    ) -> None:
        """``borders`` are the values that enter and leave in float32, scaled on the fly."""
        self._grids, self._borders = grids, borders
        self._wanted = _read_as_codes(operations)
        self._converted: dict[str, str] = {}
        self._held_on: dict[str, Rounding | str] = {}
        """The grid of each value in codes; a name stands for one that is made on the fly."""
        self.steps: list[SchemeStep] = []
        for op in operations:
            self._add(op)

    def _add(self, op: Operation) -> None:
        """One more operation, after the conversions that it needs."""
        inputs = op.inputs
        if isinstance(op, MapOp | CatOp):
            for value in dict.fromkeys(op.inputs):
                self._convert(value)
            inputs = tuple(self._converted.get(value, value) for value in op.inputs)
        in_codes, unsigned, gradient = self._makes_codes(op), False, None
        if isinstance(op, MapOp):
            unsigned = self._grids.unsigned(op.x)
            gradient = self._grids.gradient(op.name, border=op.name in self._borders)
        output = self._rounding(op, inputs) if in_codes else None
        self.steps.append(SchemeStep(op, op.name, inputs, in_codes, output, unsigned, gradient))

    def _convert(self, value: str) -> None:
        if value in self._held_on or value in self._converted:
            return
        name = self._converted[value] = f"{value} as codes"
        rounding = self._grids.output(value, border=value in self._borders)
        self._held_on[name] = rounding if rounding.keys else value
        self.steps.append(SchemeStep(None, name, (value,), in_codes=True, output=rounding))

    def _makes_codes(self, op: Operation) -> bool:
        if isinstance(op, MapOp):
            return op.name in self._wanted
        if isinstance(op, CatOp):
            return True
        moves = isinstance(op, ActOp) or op.layout
        return moves and bool(op.inputs) and op.inputs[0] in self._held_on

    def _rounding(self, op: Operation, inputs: tuple[str, ...]) -> Rounding | None:
        """What a result in codes is rounded to, if it is."""
        before = [self._held_on[name] for name in inputs[:1]]
        if isinstance(op, CatOp):
            before = list({self._held_on[name] for name in inputs})
        if isinstance(op, MapOp) or len(before) > 1:
            own = self._grids.output(op.name)
            self._held_on[op.name] = own if own.keys else op.name
            return own
        self._held_on[op.name] = before[0]
        # An upper bound becomes a code itself.
        capped = isinstance(op, ActOp) and op.activation.upper is not None
        return before[0] if capped and isinstance(before[0], Rounding) else None


def _read_as_codes(operations: Sequence[Operation]) -> set[str]:
    """Values that an int8 operation reads, be it through a reshape or a ReLU."""
    wanted: set[str] = set()
    for op in reversed(operations):
        if isinstance(op, MapOp | CatOp):
            wanted.update(op.inputs)
        elif op.name in wanted and op.inputs and (isinstance(op, ActOp) or op.layout):
            wanted.add(op.inputs[0])
    return wanted


def _with_gradients(
    steps: Sequence[SchemeStep], ends: Sequence[str], floats: Collection[str], grids: Grids
) -> list[SchemeStep]:
    """The steps with what is rounded on the way back."""
    in_codes = {step.name for step in steps if step.in_codes and not isinstance(step.op, NodeOp)}
    differentiable = {*floats, *(step.name for step in steps if step.op is None)}
    expected = Counter([*ends, *(name for step in steps for name in step.inputs)])
    arrived: dict[str, bool] = {}
    """The gradients by now, and whether in codes."""

    def put(value: str, coded: bool) -> None:
        """One more gradient: two become their float32 sum."""
        if value in differentiable:
            expected[value] -= 1
            arrived[value] = coded and value not in arrived

    for end in ends:
        put(end, False)
    found: list[SchemeStep] = []
    for step in reversed(steps):
        found.append(step)
        coded = arrived.pop(step.name, None)
        if coded is None:
            continue
        if not isinstance(step.op, MapOp):
            keeps = step.op is None or isinstance(step.op, ActOp | CatOp)
            for source in step.inputs:
                put(source, coded and keeps)
            continue
        for addend in step.inputs[1:]:
            put(addend, True)
        x, rounding = step.inputs[0], None
        completes = expected[x] == 1
        if completes and step.op.x in in_codes and (known := grids.gradient(step.op.x)).keys:
            rounding = known
            arrived.pop(x, None)
        put(x, rounding is not None)
        found[-1] = replace(
            step,
            passes_gradient=True,
            gradient_in_codes=coded,
            completes_gradient=completes,
            input_gradient=rounding,
        )
    return found[::-1]
