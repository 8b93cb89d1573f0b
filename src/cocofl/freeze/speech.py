"""Which values of a region are held in codes, and where they are rounded.

One set of decisions for all who compute a region: :mod:`cocofl.freeze.region` compiles it to
steps for one device, :mod:`cocofl.vector` runs it for many devices at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cocofl.freeze.grids import Grids
from cocofl.freeze.lowering import ActOp, CatOp, MapOp, NodeOp, Operation


class Speech:
    """Follows a region operation by operation and knows which values are codes by now."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._wanted = _wanted_as_codes(operations)
        self._converted: dict[str, str] = {}
        self.in_codes: set[str] = set()
        self.gradients_in_codes: set[str] = set()

    def convert(self, op: MapOp | CatOp) -> list[str]:
        """The inputs of ``op`` that are float so far and have to be quantized first."""
        known = self.in_codes | self._converted.keys()
        new = [value for value in dict.fromkeys(op.inputs) if value not in known]
        self._converted |= {value: f"{value} as codes" for value in new}
        return new

    def coded(self, value: str) -> str:
        """The name under which a value is found in codes."""
        return self._converted.get(value, value)

    def make(self, op: Operation) -> bool:
        """Whether the result of ``op`` is held in codes."""
        if isinstance(op, MapOp):
            coded = op.name in self._wanted
        elif isinstance(op, CatOp):
            coded = True
        else:
            moves = isinstance(op, ActOp) or op.layout
            coded = moves and bool(op.inputs) and op.inputs[0] in self.in_codes
        if coded:
            self.in_codes.add(op.name)
            if not isinstance(op, NodeOp):
                self.gradients_in_codes.add(op.name)
        return coded


def _wanted_as_codes(operations: Sequence[Operation]) -> set[str]:
    """Values that an int8 operation reads, be it through a reshape or a ReLU."""
    wanted: set[str] = set()
    for op in reversed(operations):
        if isinstance(op, MapOp | CatOp):
            wanted.update(op.inputs)
        elif op.name in wanted and op.inputs and (isinstance(op, ActOp) or op.layout):
            wanted.add(op.inputs[0])
    return wanted


@dataclass(frozen=True)
class Rounding:
    """The grid a value is rounded to: made of the largest of these scales, or on the fly."""

    keys: tuple[str, ...]
    unsigned: bool


@dataclass(frozen=True)
class Roundings:
    """Every rounding of a region, by the value that is rounded."""

    conversions: dict[str, Rounding] = field(default_factory=dict)
    """Of float values, for those who read codes; others read the float."""
    outputs: dict[str, Rounding] = field(default_factory=dict)
    gradients: dict[str, Rounding] = field(default_factory=dict)
    """Of the sum of all gradients that arrive at a value."""


def roundings(
    operations: Sequence[Operation],
    grids: Grids,
    inputs: Collection[str],
    ends: Sequence[str],
    *,
    passing: bool,
) -> Roundings:
    """What :class:`~cocofl.freeze.region.IntegerRegion` rounds, and to which grids.

    ``inputs`` and ``ends`` are the values that enter and leave in float32, scaled on the fly.
    """
    found, speech = Roundings(), Speech(operations)
    borders = {*inputs, *ends}
    grid_of: dict[str, Rounding | str] = {}  # of each coded value; a name stands for "on the fly"
    steps: list[tuple[Operation | None, str, tuple[str, ...]]] = []
    for op in operations:
        if isinstance(op, MapOp | CatOp):
            for value in speech.convert(op):
                keys = () if value in borders else grids.output_keys(value)
                rounding = Rounding(keys, grids.unsigned(value))
                found.conversions[value] = rounding
                grid_of[speech.coded(value)] = rounding if keys else value
                steps.append((None, speech.coded(value), (value,)))
        sources = op.inputs
        if isinstance(op, MapOp | CatOp):
            sources = tuple(map(speech.coded, op.inputs))
        if speech.make(op):
            own = Rounding(grids.output_keys(op.name), grids.unsigned(op.name))
            if isinstance(op, MapOp):
                found.outputs[op.name] = own
                grid_of[op.name] = own if own.keys else op.name
            elif isinstance(op, CatOp):
                parts = {grid_of[name] for name in sources}
                if len(parts) == 1:
                    grid_of[op.name] = parts.pop()
                else:
                    found.outputs[op.name] = own
                    grid_of[op.name] = own if own.keys else op.name
            else:
                grid_of[op.name] = grid_of[sources[0]]
                known = grid_of[op.name]
                capped = isinstance(op, ActOp) and op.activation.upper is not None
                if capped and isinstance(known, Rounding):
                    found.outputs[op.name] = known  # the cap itself becomes a code
        steps.append((op, op.name, sources))
    if passing:
        _follow_gradients(steps, grids, speech, borders, ends, found.gradients)
    return found


def _follow_gradients(
    steps: Sequence[tuple[Operation | None, str, tuple[str, ...]]],
    grids: Grids,
    speech: Speech,
    borders: Collection[str],
    ends: Sequence[str],
    found: dict[str, Rounding],
) -> None:
    """Walk back as :meth:`IntegerRegion.backward` does, noting what is rounded on the way."""
    expected = Counter([*ends, *(name for _, _, sources in steps for name in sources)])
    arrived: dict[str, bool] = {}  # whether it is in codes

    def put(value: str, coded: bool) -> None:
        expected[value] -= 1
        arrived[value] = coded and value not in arrived

    for end in ends:
        put(end, False)
    for op, name, sources in reversed(steps):
        if name not in arrived:
            continue
        coded = arrived.pop(name)
        if isinstance(op, MapOp):
            if not coded:
                found[name] = Rounding(() if name in borders else grids.gradient_keys(name), False)
            if len(sources) > 1:
                put(sources[1], True)
            keys = grids.gradient_keys(op.x) if op.x in speech.gradients_in_codes else ()
            if expected[sources[0]] == 1 and keys:
                arrived.pop(sources[0], None)
                found[sources[0]] = Rounding(keys, False)
                put(sources[0], True)
            else:
                put(sources[0], False)
        else:
            keeps = op is None or isinstance(op, ActOp | CatOp)
            for source in sources:
                put(source, coded and keeps)
