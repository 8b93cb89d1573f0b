"""A run of frozen blocks in int8: compiled once, then forward, and backward where asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from cocofl.errors import CannotLower, InvalidSetting
from cocofl.freeze.fusion import affine, fold
from cocofl.freeze.gradient import InputGradient
from cocofl.freeze.grids import Grids
from cocofl.freeze.kernels import Geometry, Kernel, LinearMap, Prepared
from cocofl.freeze.lowering import ActOp, CatOp, LoweredBlock, MapOp, Operation, ValueName
from cocofl.freeze.speech import Speech
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
from cocofl.numerics import MIDDLE, as_float, quantize_weight

ChooseKernel = Callable[[LinearMap], Kernel]


class Row(NamedTuple):
    """One line of ``describe()``."""

    block: int
    role: str
    operation: str
    kernel: str


class IntegerRegion:
    """Consecutive frozen blocks, holding their weights as int8 only."""

    def __init__(
        self,
        blocks: Sequence[tuple[int, LoweredBlock, fx.GraphModule]],
        *,
        inputs: tuple[str, ...],
        outputs: Any,
        scales: Mapping[str, float],
        non_negative: frozenset[str],
        headroom: float,
        weight_bits: int,
        choose: ChooseKernel,
        passing: bool,
    ) -> None:
        self.passing, self.inputs = passing, inputs
        leaves, self._structure = pytree.tree_flatten(outputs)
        self._leaves: list[Any] = leaves
        self._ends = list(dict.fromkeys(x for x in leaves if isinstance(x, ValueName)))
        self.rows: list[Row] = []
        _refuse_other_than_float32(blocks)
        operations = [op for _, lowered, _ in blocks for op in lowered.operations]
        shapes = {name: shape for _, low, _ in blocks for name, shape in low.shapes.items()}
        compiler = _Compiler(
            operations=operations,
            shapes=shapes,
            grids=Grids(operations, non_negative, scales, headroom),
            weight_bits=weight_bits,
            choose=choose,
            passing=passing,
            borders={*inputs, *self._ends},
        )
        self._steps: list[Step] = []
        for index, lowered, block in blocks:
            for op, description in zip(lowered.operations, lowered.descriptions, strict=True):
                steps, kernel = compiler.compile(op, block)
                self._steps += steps
                role = "passing" if passing else "frozen"
                self.rows.append(Row(index, role, description, kernel))
        self._release = _last_uses(self._steps, self._ends)
        read = [name for step in self._steps for name in step.inputs]
        self._expected = Counter([*self._ends, *read])

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
        sink = Sink(self._expected)
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
    """Turns operations into steps: decides who speaks codes, quantizes weights, picks kernels."""

    def __init__(
        self,
        *,
        operations: Sequence[Operation],
        shapes: Mapping[str, tuple[int, ...]],
        grids: Grids,
        weight_bits: int,
        choose: ChooseKernel,
        passing: bool,
        borders: Container[str],
    ) -> None:
        """``borders`` are the values that enter and leave in float32, scaled on the fly."""
        self._borders = borders
        self._shapes, self._grids, self._bits = shapes, grids, weight_bits
        self._choose, self._passing = choose, passing
        self._speech = Speech(operations)

    def compile(self, op: Operation, block: fx.GraphModule) -> tuple[list[Step], str]:
        """The steps of one operation, and the name of its kernel."""
        if isinstance(op, MapOp):
            return self._map(op, block)
        if isinstance(op, CatOp):
            steps, inputs = self._as_codes(op)
            self._speech.make(op)
            grid, unsigned = self._grids.output(op.name), self._grids.unsigned(op.name)
            return [*steps, CatStep(op.name, inputs, op.dim, grid, unsigned=unsigned)], "codes"
        coded = self._speech.make(op)
        if isinstance(op, ActOp):
            return [ActStep(op.name, op.x, op.activation)], "codes" if coded else "float32"
        return [NodeStep(op, block)], "codes" if coded else "float32"

    def _as_codes(self, op: MapOp | CatOp) -> tuple[list[Step], tuple[str, ...]]:
        """Steps that quantize what is float so far, and the names of the coded values."""
        steps: list[Step] = []
        for value in self._speech.convert(op):
            grid = None if value in self._borders else self._grids.output(value)
            unsigned = self._grids.unsigned(value)
            steps.append(ToCodes(self._speech.coded(value), value, grid, unsigned=unsigned))
        return steps, tuple(map(self._speech.coded, op.inputs))

    def _map(self, op: MapOp, block: fx.GraphModule) -> tuple[list[Step], str]:
        steps, inputs = self._as_codes(op)
        weight, bias, geometry = _folded(op, block)
        unsigned_input = self._grids.unsigned(op.x)
        linear_map = LinearMap(
            quantize_weight(weight, self._bits),
            bias,
            geometry,
            op.activation is not None,
            0 if unsigned_input else MIDDLE,
            self._shapes[op.x],
        )
        kernel = self._choose(linear_map)
        backward, names = None, [kernel.name]
        if self._passing:
            backward, more = self._input_gradient(op, weight, geometry)
            names += more
        as_codes = self._speech.make(op)
        targets = MapTargets(
            output=self._grids.output(op.name) if as_codes else None,
            as_codes=as_codes,
            unsigned=self._grids.unsigned(op.name),
            gradient=None if op.name in self._borders else self._grids.gradient(op.name),
            input_gradient=self._grids.gradient(op.x),
            input_gradient_as_codes=op.x in self._speech.gradients_in_codes,
            image_shape=self._shapes[op.x][1:] if self._passing and geometry else None,
        )
        run = kernel.prepare(linear_map)
        step = MapStep(op.name, inputs, op.activation, run, backward, targets)
        return [*steps, step], " / ".join(dict.fromkeys(names))

    def _input_gradient(
        self, op: MapOp, weight: Tensor, geometry: Geometry | None
    ) -> tuple[InputGradient, list[str]]:
        names: list[str] = []

        def prepare(linear_map: LinearMap) -> Prepared:
            kernel = self._choose(linear_map)
            names.append(kernel.name)
            return kernel.prepare(linear_map)

        shapes = self._shapes[op.x], self._shapes[op.name]
        return InputGradient(weight, geometry, *shapes, prepare, self._bits), names


def _folded(op: MapOp, block: nn.Module) -> tuple[Tensor, Tensor | None, Geometry | None]:
    """The float weight, bias and geometry of a layer with its BatchNorm folded in."""
    norm = None if op.norm is None else block.get_submodule(op.norm)
    assert norm is None or isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if op.layer is None:
        assert norm is not None
        factor, offset = affine(norm)
        return factor.view(-1, 1, 1, 1), offset, Geometry(groups=len(factor))
    layer = block.get_submodule(op.layer)
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    weight, bias = fold(layer, norm)
    if isinstance(layer, nn.Linear):
        return weight, bias, None
    assert not isinstance(layer.padding, str)
    geometry = Geometry(
        (layer.stride[0], layer.stride[1]),
        (layer.padding[0], layer.padding[1]),
        (layer.dilation[0], layer.dilation[1]),
        layer.groups,
    )
    return weight, bias, geometry
