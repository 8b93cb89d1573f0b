"""What a region computes in int8: which values are codes, and what is rounded where.

A :class:`QuantizationScheme` is made once from a region's operations and the scales that are
known. :class:`~cocofl.freeze.region.IntegerRegion` carries it out for one device with real
kernels, and :mod:`cocofl.vector` for many devices at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from cocofl.freeze.grids import Grids, Rounding
from cocofl.freeze.operations import ActOp, CatOp, MapOp, NodeOp, Operation, ValueName


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

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that it returns, each once."""
        return named_values(self.outputs)


def named_values(structure: Any) -> tuple[str, ...]:
    """The values in what blocks return, each once."""
    leaves = pytree.tree_leaves(structure)
    return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, ValueName)))


def quantization_scheme(
    operations: Sequence[Operation],
    grids: Grids,
    inputs: tuple[str, ...],
    outputs: Any,
    floats: Collection[str],
    *,
    passing: bool,
) -> QuantizationScheme:
    """The scheme of a region; ``floats`` are the values that gradients can have."""
    ends = named_values(outputs)
    forward = _Forward(operations, grids, {*inputs, *ends})
    for op in operations:
        forward.add(op)
    steps = forward.steps
    if passing:
        steps = _Backward(steps, ends, floats, forward.gradients_in_codes, grids).steps()
    return QuantizationScheme(tuple(steps), inputs, outputs, passing)


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
        self.gradients_in_codes: set[str] = set()
        self.steps: list[SchemeStep] = []

    def add(self, op: Operation) -> None:
        """One more operation, after the conversions that it needs."""
        inputs = op.inputs
        if isinstance(op, MapOp | CatOp):
            for value in dict.fromkeys(op.inputs):
                self._convert(value)
            inputs = tuple(self._converted.get(value, value) for value in op.inputs)
        step = SchemeStep(op, op.name, inputs, in_codes=self._makes_codes(op))
        if isinstance(op, MapOp):
            border = op.name in self._borders
            step = replace(
                step,
                reads_unsigned=self._grids.unsigned(op.x),
                gradient=self._grids.gradient(op.name, border=border),
            )
        if step.in_codes:
            step = replace(step, output=self._rounding(op, inputs))
            if not isinstance(op, NodeOp):
                self.gradients_in_codes.add(op.name)
        self.steps.append(step)

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


class _Backward:
    """Walks back through the steps and knows which gradients have arrived, and whether in codes."""

    def __init__(
        self,
        steps: Sequence[SchemeStep],
        ends: Sequence[str],
        floats: Collection[str],
        in_codes: Collection[str],
        grids: Grids,
    ) -> None:
        self._steps, self._grids, self._in_codes = steps, grids, in_codes
        self._floats = {*floats, *(step.name for step in steps if step.op is None)}
        self._expected = Counter([*ends, *(name for step in steps for name in step.inputs)])
        self._arrived: dict[str, bool] = {}  # whether in codes
        for end in ends:
            self._put(end, False)

    def _put(self, value: str, coded: bool) -> None:
        """One more gradient: two become their float32 sum."""
        if value in self._floats:
            self._expected[value] -= 1
            self._arrived[value] = coded and value not in self._arrived

    def steps(self) -> list[SchemeStep]:
        """The steps with what is rounded on the way back."""
        return [self._with_gradient(step) for step in reversed(self._steps)][::-1]

    def _with_gradient(self, step: SchemeStep) -> SchemeStep:
        if step.name not in self._arrived:
            return step
        coded = self._arrived.pop(step.name)
        if not isinstance(step.op, MapOp):
            keeps = step.op is None or isinstance(step.op, ActOp | CatOp)
            for source in step.inputs:
                self._put(source, coded and keeps)
            return step
        for addend in step.inputs[1:]:
            self._put(addend, True)
        x, rounding = step.inputs[0], None
        completes = self._expected[x] == 1
        if completes and step.op.x in self._in_codes:
            known = self._grids.gradient(step.op.x)
            rounding = known if known.keys else None
        if rounding is not None:
            self._arrived.pop(x, None)
        self._put(x, rounding is not None)
        return replace(
            step,
            passes_gradient=True,
            gradient_in_codes=coded,
            completes_gradient=completes,
            input_gradient=rounding,
        )
