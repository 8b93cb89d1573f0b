"""A run of frozen blocks in int8: compiled once, then forward, and backward where asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.fx.graph_module import _assign_attr
from torch.utils import _pytree as pytree

from cocofl.chain.blocks import last_uses
from cocofl.errors import CannotLower, InvalidSetting
from cocofl.freeze.fusion import affine_of, fold_affine
from cocofl.freeze.gradient import InputGradient
from cocofl.freeze.kernels import Kernel, LinearMap, Prepared
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, MapOp, NodeOp, ValueName
from cocofl.freeze.scale_notes import ScaleNotes
from cocofl.freeze.scheme import GRADIENT, OUTPUT, QuantizationScheme, Rounding, SchemeStep
from cocofl.freeze.steps import (
    ActStep,
    CatStep,
    Environment,
    GridOf,
    MapStep,
    NodeStep,
    Sink,
    Step,
    ToCodes,
    floats_of,
)
from cocofl.numerics import MIDDLE, Codes, Grid, as_float, quantize_weight

ChooseKernel = Callable[[LinearMap], Kernel]


class IntegerSettings(NamedTuple):
    """How frozen blocks are computed in int8."""

    choose: ChooseKernel
    headroom: float
    weight_bits: int


class IntegerRegion:
    """Consecutive frozen blocks, holding their weights as int8 only."""

    def __init__(
        self,
        scheme: QuantizationScheme,
        blocks: Sequence[tuple[int, LoweredBlock, fx.GraphModule]],
        scales: Mapping[str, float],
        settings: IntegerSettings,
    ) -> None:
        self.passing, self.inputs, self._ends = scheme.passing, scheme.inputs, scheme.ends
        self._outputs = scheme.outputs
        _refuse_other_than_float32(blocks)
        shapes = {name: shape for _, low, _ in blocks for name, shape in low.shapes.items()}
        graphs = {op.name: graph for _, low, graph in blocks for op in low.operations}

        def grid_of(rounding: Rounding | None) -> Grid | None:
            return None if rounding is None else rounding.grid(scales, settings.headroom)

        self._steps = [
            _compiled(step, graphs.get(step.name), shapes, grid_of, settings, scheme.passing)
            for step in scheme.steps
        ]
        self.kernels = {step.name: step.kernel for step in self._steps}
        self._release = last_uses([(*s.inputs, s.name) for s in self._steps], self._ends)

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
        return floats if all(map(_is_finite, gradients)) else [_broken(x) for x in floats]

    def __call__(self, *inputs: Any, notes: ScaleNotes | None = None) -> Any:
        """What the blocks return; differentiable in the inputs if the region is passing."""
        # No code stands for NaN: what came of it must not look sound.
        sound = all(map(_is_finite, inputs))
        if self.passing and torch.is_grad_enabled():
            ends = _PassThrough.apply(self, notes, *inputs)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                ends, _ = self.forward(inputs, keep=False)
        values = dict(zip(self._ends, ends if sound else map(_broken, ends), strict=True))
        return pytree.tree_map_only(ValueName, values.__getitem__, self._outputs)


def _is_finite(x: Any) -> bool:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return True
    return math.isfinite(x.detach().sum().item())


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


def _refuse_other_than_float32(blocks: Iterable[tuple[int, LoweredBlock, fx.GraphModule]]) -> None:
    for index, _, block in blocks:
        for key, parameter in block.named_parameters():
            if parameter.dtype != torch.float32:
                raise CannotLower(
                    f"int8 needs a float32 network, but {key!r} of block {index} is "
                    f"{parameter.dtype}; convert it with model.float(), or use variant='ff'"
                )


def _compiled(
    step: SchemeStep,
    block: fx.GraphModule | None,
    shapes: Mapping[str, tuple[int, ...]],
    grid_of: GridOf,
    settings: IntegerSettings,
    passing: bool,
) -> Step:
    """A step that runs."""
    op = step.op
    if op is None:
        return ToCodes(step, grid_of)
    if isinstance(op, CatOp):
        return CatStep(step, grid_of)
    if isinstance(op, ActOp):
        return ActStep(step, grid_of)
    assert block is not None
    if isinstance(op, NodeOp):
        return NodeStep(step, grid_of, block)

    kernels: dict[str, None] = {}

    def prepare(linear_map: LinearMap) -> Prepared:
        kernel = settings.choose(linear_map)
        kernels[kernel.name] = None
        return kernel.prepare(linear_map)

    weight, bias = _folded(op, block)
    codes, relu = quantize_weight(weight, settings.weight_bits), op.activation is not None
    x_shape, y_shape = (_image_shape(op, shapes[name]) for name in (op.x, op.name))
    zero_point = 0 if step.reads_unsigned else MIDDLE
    run = prepare(LinearMap(codes, bias, op.geometry, relu, zero_point, x_shape))
    backward, input_shape = None, None
    if passing:
        bits = settings.weight_bits
        gradient = InputGradient(weight, op.geometry, x_shape, y_shape, prepare, bits)
        backward = _reshaping(op, gradient)
        input_shape = shapes[op.x][1:] if op.geometry else None
    names, forward = " / ".join(kernels), _reshaping(op, run)
    return MapStep(step, grid_of, forward, backward, input_shape, names)


def _folded(op: MapOp, block: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The float weight, as a kernel has it, and bias of a layer with its BatchNorm folded in."""
    affine = None
    if op.norm is not None:
        norm: Any = block.get_submodule(op.norm)
        affine = affine_of(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    if op.layer is None or op.kind is None:
        assert affine is not None
        return affine.factor.view(-1, 1, 1, 1), affine.offset
    layer: Any = block.get_submodule(op.layer)
    weight = op.kind.weight_of(layer).detach()
    bias = None if layer.bias is None else layer.bias.detach()
    if affine is not None:
        weight, bias = fold_affine(weight, bias, affine)
    return op.kind.to_image(weight), bias


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
