"""A run of frozen blocks in int8: compiled once, then forward, and backward where asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.fx.graph_module import _assign_attr
from torch.utils import _pytree as pytree

from cocofl.chain.blocks import last_uses
from cocofl.errors import InvalidSetting
from cocofl.freeze.gradient import InputGradient
from cocofl.freeze.kernels import Kernel, LinearMap, Prepared
from cocofl.freeze.map_weights import MapWeights, map_weights
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, MapOp, NodeOp, ValueName
from cocofl.freeze.scale_notes import ScaleNotes
from cocofl.freeze.scheme import (
    GRADIENT,
    OUTPUT,
    QuantizationScheme,
    Rounding,
    SchemeStep,
    scale_key,
)
from cocofl.freeze.steps import (
    ActStep,
    CatStep,
    Environment,
    MapStep,
    NodeStep,
    Sink,
    Step,
    ToCodes,
    floats_of,
)
from cocofl.freeze.traced_blocks import copy_block
from cocofl.numerics import MIDDLE, Codes, Grid, as_float

ChooseKernel = Callable[[LinearMap], Kernel]
SchemeOf = Callable[[frozenset[str]], QuantizationScheme]
"""From the scales that are known to how a region is computed."""


class IntegerSettings(NamedTuple):
    """How frozen blocks are computed in int8."""

    choose: ChooseKernel
    headroom: float
    weight_bits: int
    calibrate: bool = False
    """Whether scales that nobody has sent are measured once, or on the fly in every pass."""


class IntegerRegion:
    """Consecutive frozen blocks, holding their weights as int8 only."""

    def __init__(
        self,
        scheme_of: SchemeOf,
        blocks: Sequence[tuple[LoweredBlock, nn.Module]],
        state: Mapping[str, Tensor],
        scales: Mapping[str, float],
        settings: IntegerSettings,
    ) -> None:
        """``blocks`` are the chain's own, lowered and as they are; the state's tensors count."""
        self._scheme_of, self._scales, self._headroom = scheme_of, scales, settings.headroom
        scheme = scheme_of(frozenset(scales))
        self.passing, self.inputs, self._ends = scheme.passing, scheme.inputs, scheme.ends
        self._outputs = scheme.outputs
        self._steps = _compiled(scheme, blocks, state, settings)
        self._round_to(scheme, scales)
        self.kernels = {step.name: step.kernel for step in self._steps}
        self._release = last_uses([(*s.inputs, s.name) for s in self._steps], self._ends)
        coded = {name for s in self._steps if not isinstance(s, NodeStep) for name in s.inputs}
        # The first input is what the layers made; what is only added in float may hide positions.
        self._masks = frozenset(self.inputs[1:]) - coded
        self._calibration: ScaleNotes | None = None
        if settings.calibrate and (sites := self._unknown(low for low, _ in blocks)):
            self._calibration = ScaleNotes(sites, {})

    def _round_to(self, scheme: QuantizationScheme, scales: Mapping[str, float]) -> None:
        def grid_of(rounding: Rounding | None) -> Grid | None:
            return None if rounding is None else rounding.grid(scales, self._headroom)

        for step, planned in zip(self._steps, scheme.steps, strict=True):
            step.round_to(planned, grid_of)

    def _unknown(self, lowered: Iterable[LoweredBlock]) -> frozenset[str]:
        """The values of which a pass needs a scale that nobody has sent."""
        ways = (OUTPUT, GRADIENT) if self.passing else (OUTPUT,)
        sites = (site for low in lowered for site in low.sites)
        return frozenset(
            site for site in sites if any(scale_key(site, way) not in self._scales for way in ways)
        )

    def _calibrated(self) -> None:
        """From now on use the scales of the pass that has just ended."""
        assert self._calibration is not None
        measured = {key: float(scale) for key, scale in self._calibration.found.items()}
        scales = measured | dict(self._scales)
        self._round_to(self._scheme_of(frozenset(scales)), scales)
        self._calibration = None

    def forward(
        self,
        inputs: Sequence[Any],
        *,
        keep: bool,
        constant: Sequence[bool] | None = None,
        notes: ScaleNotes | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """The values it returns and, to ``keep`` per step, the little that backward needs.

        Values are dropped after their last use. Of ``constant`` inputs no gradient is computed.
        Scales go to the ``notes``.
        """
        env = Environment(zip(self.inputs, inputs, strict=True))
        if constant is not None:
            named = zip(self.inputs, constant, strict=True)
            env.constants = frozenset(name for name, is_constant in named if is_constant)
        tape = []
        for step, finished in zip(self._steps, self._release, strict=True):
            env[step.name], kept = step.forward(env, keep=keep)
            if notes is not None and notes.wants(step.name):
                notes.note(step.name, OUTPUT, floats_of(env[step.name]))
            if keep:
                tape.append(kept)
            for name in finished:
                env.pop(name, None)
        return [floats_of(env[name]) for name in self._ends], tape

    def backward(
        self,
        tape: list[Any],
        gradients: Sequence[Tensor | None],
        notes: ScaleNotes | None = None,
    ) -> list[Tensor | None]:
        """The gradient of each input, from that of each value returned."""
        sink = Sink()
        for name, gradient in zip(self._ends, gradients, strict=True):
            if gradient is not None:
                sink.put(name, gradient)
        for step in reversed(self._steps):
            kept = tape.pop()
            if (arrived := sink.pop(step.name, None)) is not None:
                if notes is not None and notes.wants(step.name):
                    notes.note(step.name, GRADIENT, as_float(arrived))
                step.backward(kept, arrived, sink)
        found = [sink.pop(name, None) for name in self.inputs]
        floats = [None if gradient is None else as_float(gradient) for gradient in found]
        if not all(map(_is_finite, gradients)):
            return [_broken(x) for x in floats]
        if notes is not None and notes is self._calibration:
            self._calibrated()
        return floats

    def __call__(self, *inputs: Any, notes: ScaleNotes | None = None) -> Any:
        """What the blocks return; differentiable in the inputs if the region is passing."""
        # No code stands for NaN: what came of it must not look sound.
        named = zip(self.inputs, inputs, strict=True)
        sound = all(_is_finite(x) or (name in self._masks and _hides(x)) for name, x in named)
        calibration = self._calibration if sound else None
        if self.passing and torch.is_grad_enabled():
            noted = calibration if notes is None else notes
            ends = _PassThrough.apply(self, noted, *inputs)  # type: ignore[no-untyped-call]
        else:
            calibration = None if self.passing else calibration
            with torch.no_grad():
                ends, _ = self.forward(inputs, keep=False, notes=calibration)
            if calibration is not None:
                self._calibrated()
        values = dict(zip(self._ends, ends if sound else map(_broken, ends), strict=True))
        return pytree.tree_map_only(ValueName, values.__getitem__, self._outputs)


def _is_finite(x: Any) -> bool:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return True
    # Large numbers, as in masks, may be finite when their sum is not.
    return math.isfinite(x.detach().sum().item()) or bool(x.detach().isfinite().all())


def _hides(x: Tensor) -> bool:
    """Whether what is not finite are scores of positions that attention is not to see."""
    return not (x.detach().isnan() | x.detach().isposinf()).any()


def _broken(x: Any) -> Any:
    return x * math.nan if isinstance(x, Tensor) and x.is_floating_point() else x


class _PassThrough(torch.autograd.Function):
    """Autograd sees a whole passing region as one node."""

    @staticmethod
    def forward(
        ctx: Any, region: IntegerRegion, notes: ScaleNotes | None, *inputs: Any
    ) -> tuple[Any, ...]:
        constant = [not needed for needed in ctx.needs_input_grad[2:]]
        result, ctx.tape = region.forward(inputs, keep=True, constant=constant, notes=notes)
        ctx.region, ctx.notes = region, notes
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tape, ctx.tape = ctx.tape, None
        if tape is None:
            raise InvalidSetting(
                "an int8 region goes backward once per forward pass, and then lets go of what it "
                "kept; run the network forward again (retain_graph cannot help here)"
            )
        return None, None, *ctx.region.backward(tape, gradients, ctx.notes)


class LearningRegion(nn.Module):
    """A block in int8 that learns beside its frozen maps: what learns is an input of the region."""

    def __init__(self, region: IntegerRegion, learned: Mapping[str, Tensor]) -> None:
        """``learned`` is by key, in the order in which the region takes it."""
        super().__init__()
        self.region = region
        self.notes: ScaleNotes | None = None
        """Where the next pass notes its scales."""
        self._learned = [nn.Parameter(x.detach().clone()) for x in learned.values()]
        for key, parameter in zip(learned, self._learned, strict=True):
            _assign_attr(parameter, self, key)

    def forward(self, *inputs: Any) -> Any:
        """What the block returns."""
        notes, self.notes = self.notes, None
        return self.region(*inputs, *self._learned, notes=notes)


def _compiled(
    scheme: QuantizationScheme,
    blocks: Sequence[tuple[LoweredBlock, nn.Module]],
    state: Mapping[str, Tensor],
    settings: IntegerSettings,
) -> list[Step]:
    """Steps that run; what they round to is not said yet."""
    shapes = {name: shape for low, _ in blocks for name, shape in low.shapes.items()}
    block_of = {op.name: index for index, (low, _) in enumerate(blocks) for op in low.operations}
    maps = [op for low, _ in blocks for op in low.operations if isinstance(op, MapOp)]
    held = [(op, blocks[block_of[op.name]][1]) for op in maps]
    weights = map_weights(held, state, settings.weight_bits, passing=scheme.passing)
    by_name = dict(zip((op.name for op in maps), weights, strict=True))

    @cache
    def graph_of(index: int) -> fx.GraphModule:
        low, block = blocks[index]
        return low.graph(copy_block(block, state))

    def compiled(step: SchemeStep) -> Step:
        op = step.op
        if op is None:
            return ToCodes(step)
        if isinstance(op, CatOp):
            return CatStep(step)
        if isinstance(op, ActOp):
            return ActStep(step)
        if isinstance(op, NodeOp):
            return NodeStep(step, graph_of(block_of[op.name]))
        return _map_step(step, op, by_name[op.name], shapes, settings.choose)

    return [compiled(step) for step in scheme.steps]


def _map_step(
    step: SchemeStep,
    op: MapOp,
    weights: MapWeights,
    shapes: Mapping[str, tuple[int, ...]],
    choose: ChooseKernel,
) -> MapStep:
    kernels: dict[str, None] = {}

    def prepare(linear_map: LinearMap) -> Prepared:
        kernel = choose(linear_map)
        kernels[kernel.name] = None
        return kernel.prepare(linear_map)

    x_shape, y_shape = (_image_shape(op, shapes[name]) for name in (op.x, op.name))
    zero_point, relu = 0 if step.reads_unsigned else MIDDLE, op.activation is not None
    linear = LinearMap(weights.forward, weights.bias, op.geometry, relu, zero_point, x_shape)
    forward = _reshaping(op, prepare(linear))
    backward, input_shape = None, None
    if weights.backward is not None:
        gradient = InputGradient(weights.backward, op.geometry, x_shape, y_shape, prepare)
        backward = _reshaping(op, gradient)
        input_shape = shapes[op.x][1:] if op.geometry else None
    return MapStep(step, forward, backward, input_shape, " / ".join(kernels))


def _image_shape(op: MapOp, shape: tuple[int, ...]) -> tuple[int, ...]:
    if op.kind is None or not op.kind.reshapes:
        return shape
    return tuple(op.kind.to_image(torch.empty(shape, device="meta")).shape)


def _reshaping(op: MapOp, run: Prepared) -> Prepared:
    """The same on values as the layer has them, where kernels have them in another shape."""
    kind = op.kind
    if kind is None or not kind.reshapes:
        return run

    def shaped(x: Codes | Tensor | None, change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(x, Codes):
            return Codes(change(x.values), x.grid)
        return None if x is None else change(x)

    def reshaped(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        y = run(shaped(x, kind.to_image), out, shaped(addend, kind.to_image))
        result: Codes | Tensor = shaped(y, kind.from_image)
        return result

    return reshaped
