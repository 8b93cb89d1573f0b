"""A run of frozen blocks in int8: compiled once, then forward, and backward where asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from cocofl.errors import CannotLower, InvalidSetting
from cocofl.freeze.fusion import affine, fold
from cocofl.freeze.gradient import InputGradient
from cocofl.freeze.grids import Rounding
from cocofl.freeze.kernels import Kernel, LinearMap, Prepared
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, MapOp, ValueName
from cocofl.freeze.scheme import QuantizationScheme, SchemeStep
from cocofl.freeze.steps import (
    ActStep,
    CatStep,
    Environment,
    MapStep,
    MapTargets,
    NodeStep,
    Sink,
    Step,
    ToCodes,
    floats_of,
)
from cocofl.numerics import MIDDLE, Codes, Grid, as_float, quantize_weight

ChooseKernel = Callable[[LinearMap], Kernel]


class OperationInfo(NamedTuple):
    """One line of ``describe()``."""

    block: int
    role: str
    operation: str
    kernel: str


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
        leaves, self._structure = pytree.tree_flatten(scheme.outputs)
        self._leaves: list[Any] = leaves
        self.operations: list[OperationInfo] = []
        _refuse_other_than_float32(blocks)
        shapes = {name: shape for _, low, _ in blocks for name, shape in low.shapes.items()}
        compiler = _Compiler(shapes, scales, settings, passing=scheme.passing)
        graphs = {op.name: graph for _, low, graph in blocks for op in low.operations}
        kernels: dict[str, str] = {}
        self._steps: list[Step] = []
        for step in scheme.steps:
            compiled, kernels[step.name] = compiler.compile(step, graphs.get(step.name))
            self._steps.append(compiled)
        role = "passing" if scheme.passing else "frozen"
        for index, low, _ in blocks:
            for op, text in zip(low.operations, low.descriptions, strict=True):
                self.operations.append(OperationInfo(index, role, text, kernels[op.name]))
        self._release = _last_uses(self._steps, self._ends)

    def forward(self, inputs: Sequence[Any]) -> list[Any]:
        """Run without a trace: nothing is kept, values are dropped after their last use."""
        env: Environment = dict(zip(self.inputs, inputs, strict=True))
        for step, finished in zip(self._steps, self._release, strict=True):
            env[step.name] = step.forward(env)
            for name in finished:
                env.pop(name, None)
        return self._collect(env)

    def record(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run and keep, per step, the little that backward needs."""
        env: Environment = dict(zip(self.inputs, inputs, strict=True))
        tape = []
        for step, finished in zip(self._steps, self._release, strict=True):
            env[step.name], kept = step.record(env)
            tape.append(kept)
            for name in finished:
                env.pop(name, None)
        return self._collect(env), tape

    def _collect(self, env: Environment) -> list[Any]:
        return [floats_of(env[name]) for name in self._ends]

    def backward(self, tape: list[Any], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of each input, from that of each value returned."""
        sink = Sink()
        for name, gradient in zip(self._ends, gradients, strict=True):
            if gradient is not None:
                sink.put(name, gradient)
        for step in reversed(self._steps):
            kept = tape.pop()
            if (arrived := sink.take(step.name)) is not None:
                step.backward(kept, arrived, sink)
        found = [sink.take(name) for name in self.inputs]
        floats = [None if gradient is None else as_float(gradient) for gradient in found]
        return floats if all(map(_is_finite, gradients)) else [_broken(x) for x in floats]

    def __call__(self, *inputs: Any) -> Any:
        """What the blocks return; differentiable in the inputs if the region is passing."""
        # No code stands for NaN: what came of it must not look sound.
        sound = all(map(_is_finite, inputs))
        if self.passing and torch.is_grad_enabled():
            ends = _PassThrough.apply(self, *inputs)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                ends = self.forward(inputs)
        values = dict(zip(self._ends, ends if sound else map(_broken, ends), strict=True))
        leaves = [values[x] if isinstance(x, ValueName) else x for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)


def _is_finite(x: Any) -> bool:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return True
    return math.isfinite(x.detach().sum().item())


def _broken(x: Any) -> Any:
    return x * math.nan if isinstance(x, Tensor) and x.is_floating_point() else x


class _PassThrough(torch.autograd.Function):
    """Autograd sees a whole passing region as one node."""

    @staticmethod
    def forward(ctx: Any, region: IntegerRegion, *inputs: Any) -> tuple[Any, ...]:
        result, ctx.tape = region.record(inputs)
        ctx.region = region
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
        return None, *ctx.region.backward(tape, gradients)


def _refuse_other_than_float32(blocks: Iterable[tuple[int, LoweredBlock, fx.GraphModule]]) -> None:
    for index, _, block in blocks:
        for key, parameter in block.named_parameters():
            if parameter.dtype != torch.float32:
                raise CannotLower(
                    f"int8 needs a float32 network, but {key!r} of block {index} is "
                    f"{parameter.dtype}; convert it with model.float(), or use variant='ff'"
                )


def _last_uses(steps: Sequence[Step], outputs: Iterable[str]) -> list[list[str]]:
    """Per step, the values that nobody reads after it."""
    last = {name: i for i, step in enumerate(steps) for name in (*step.inputs, step.name)}
    finished: list[list[str]] = [[] for _ in steps]
    for name, i in last.items():
        if name not in set(outputs):
            finished[i].append(name)
    return finished


class _Compiler:
    """Turns the steps of a scheme into steps that run: quantizes weights, picks kernels."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        scales: Mapping[str, float],
        settings: IntegerSettings,
        *,
        passing: bool,
    ) -> None:
        self._shapes, self._scales = shapes, scales
        self._settings, self._passing = settings, passing

    def compile(self, step: SchemeStep, block: fx.GraphModule | None) -> tuple[Step, str]:
        """A step that runs, and the name of its kernel."""
        op = step.op
        kernel = "codes" if step.in_codes else "float32"
        grid, unsigned = self._grid(step.output), step.output is not None and step.output.unsigned
        if op is None:
            return ToCodes(step.name, step.inputs[0], grid, unsigned=unsigned), kernel
        if isinstance(op, CatOp):
            return CatStep(step.name, step.inputs, op.dim, grid, unsigned=unsigned), kernel
        if isinstance(op, ActOp):
            return ActStep(step.name, op.x, op.activation), kernel
        assert block is not None
        if isinstance(op, MapOp):
            return self._map(step, op, block)
        return NodeStep(op, block), kernel

    def _grid(self, rounding: Rounding | None) -> Grid | None:
        return None if rounding is None else rounding.grid(self._scales, self._settings.headroom)

    def _map(self, step: SchemeStep, op: MapOp, block: fx.GraphModule) -> tuple[Step, str]:
        weight, bias = _folded(op, block)
        shapes = [_image_shape(op, self._shapes[name]) for name in (op.x, op.name)]
        linear_map = LinearMap(
            quantize_weight(weight, self._settings.weight_bits),
            bias,
            op.geometry,
            op.activation is not None,
            0 if step.reads_unsigned else MIDDLE,
            shapes[0],
        )
        names: list[str] = []

        def prepare(linear_map: LinearMap) -> Prepared:
            kernel = self._settings.choose(linear_map)
            names.append(kernel.name)
            return kernel.prepare(linear_map)

        run, backward = _reshaping(op, prepare(linear_map)), None
        if self._passing:
            bits = self._settings.weight_bits
            gradient = InputGradient(weight, op.geometry, shapes[0], shapes[1], prepare, bits)
            backward = _reshaping(op, gradient)
        targets = MapTargets(
            output=self._grid(step.output),
            as_codes=step.in_codes,
            unsigned=step.output is not None and step.output.unsigned,
            gradient=self._grid(step.gradient),
            completes_gradient=step.completes_gradient,
            input_gradient=self._grid(step.input_gradient),
            input_shape=self._shapes[op.x][1:] if self._passing and op.geometry else None,
        )
        compiled = MapStep(step.name, step.inputs, op.activation, run, backward, targets)
        return compiled, " / ".join(dict.fromkeys(names))


def _folded(op: MapOp, block: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The float weight, as a kernel has it, and bias of a layer with its BatchNorm folded in."""
    norm = None if op.norm is None else block.get_submodule(op.norm)
    assert norm is None or isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if op.layer is None or op.kind is None:
        assert norm is not None
        factor, offset = affine(norm)
        return factor.view(-1, 1, 1, 1), offset
    weight, bias = fold(block.get_submodule(op.layer), norm)
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
