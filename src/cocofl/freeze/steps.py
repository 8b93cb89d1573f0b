"""The steps of an int8 region: each runs forward, and backward from what it kept.

Values are float32 tensors or :class:`Codes`. A gradient is either too: codes on a signed grid
where an int8 operation made it, float32 elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from cocofl.chain.graphs import is_layer
from cocofl.errors import InvalidExample
from cocofl.freeze.kernels import Prepared
from cocofl.freeze.layout import channels_last
from cocofl.freeze.operations import Activation, node_function
from cocofl.freeze.scheme import Rounding, SchemeStep
from cocofl.freeze.traced_blocks import copy_block
from cocofl.numerics import (
    LARGEST_CODE,
    MIDDLE,
    Codes,
    Grid,
    as_float,
    quantize,
    quantize_on_the_fly,
)

Gradient = Codes | Tensor
GridOf = Callable[[Rounding | None], Grid | None]
"""From what a scheme rounds to, to the grid that this device rounds to; None for on the fly."""


class Environment(dict[str, Any]):
    """The values of a region by name."""

    constants: frozenset[str] = frozenset()
    """Those that nobody wants a gradient of, such as a mask, and what is made of them alone."""


class Sink(dict[str, Gradient]):
    """Gradients on their way back, by value; what several steps send to one value adds up."""

    def put(self, value: str, gradient: Gradient) -> None:
        """Add a gradient; two become their float32 sum."""
        present = self.get(value)
        self[value] = gradient if present is None else as_float(present) + as_float(gradient)


def _changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A value with all of one kind in it changed, wherever they stand in its structure."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_changed(part, kind, change) for part in value)
    return value


def floats_of(value: Any) -> Any:
    """A value with the codes in it dequantized."""
    return _changed(value, Codes, Codes.dequantize)


def _to_codes(x: Tensor, grid: Grid | None, *, unsigned: bool = False) -> Codes:
    """On the known grid, or on the fly."""
    x = channels_last(x)
    return quantize_on_the_fly(x, unsigned=unsigned) if grid is None else quantize(x, grid)


class Step(ABC):
    """One operation of a region."""

    def __init__(self, planned: SchemeStep) -> None:
        self.name, self.inputs = planned.name, planned.inputs
        self._op: Any = planned.op
        self.kernel = "codes" if planned.in_codes else "float32"

    def round_to(self, planned: SchemeStep, grid_of: GridOf) -> None:
        """From now on round as ``planned`` says, which differs in the scales that are known."""
        self._grid = grid_of(planned.output)
        self._unsigned = planned.output is not None and planned.output.unsigned

    @abstractmethod
    def forward(self, env: Environment, *, keep: bool) -> tuple[Any, Any]:
        """The value of this step and, to ``keep``, the little that backward needs."""

    @abstractmethod
    def backward(self, kept: Any, gradient: Gradient, sink: Sink, /) -> None:
        """Send on the gradients of the inputs."""


class ToCodes(Step):
    """Quantizes a float value that int8 operations read; gradients pass straight through."""

    def forward(self, env: Environment, *, keep: bool) -> tuple[Codes, None]:  # noqa: ARG002
        """Nothing to keep."""
        return _to_codes(env[self.inputs[0]], self._grid, unsigned=self._unsigned), None

    def backward(self, _kept: None, gradient: Gradient, sink: Sink) -> None:
        """Straight through."""
        sink.put(self.inputs[0], gradient)


class MapStep(Step):
    """A convolution, linear layer or affine map with what was fused into it."""

    def __init__(
        self,
        planned: SchemeStep,
        run: Prepared,
        backward: Prepared | None,
        input_shape: tuple[int, ...] | None,
        kernel: str,
    ) -> None:
        """``input_shape`` is that of a sample, for which a convolution's gradient was prepared."""
        super().__init__(planned)
        self.kernel, self._input_shape = kernel, input_shape
        self._run, self._gradient = run, backward
        self._activation: Activation | None = self._op.activation
        self._in_codes = planned.in_codes

    def round_to(self, planned: SchemeStep, grid_of: GridOf) -> None:
        """Gradients, too."""
        super().round_to(planned, grid_of)
        self._completes = planned.completes_gradient
        self._gradient_grid = grid_of(planned.gradient)
        self._input_gradient_grid = grid_of(planned.input_gradient)

    def forward(self, env: Environment, *, keep: bool) -> tuple[Gradient, Any]:
        """Codes where others read codes, else float32.

        Keeps what tells where the activation let values pass: one byte an element.
        """
        x, addend = env[self.inputs[0]], env[self.inputs[1]] if len(self.inputs) > 1 else None
        shape, expected = tuple(x.values.shape[1:]), self._input_shape
        if keep and expected is not None and shape != expected:
            raise InvalidExample(
                f"images of {_by(shape)} reach {self.name!r}; its int8 gradient was prepared for "
                f"{_by(expected)}. Split the model with an example of the size it is trained on."
            )
        y = _capped(self._run(x, self._grid, addend), self._activation)
        if self._in_codes and not isinstance(y, Codes):
            y = _to_codes(y, None, unsigned=self._unsigned)
        if not keep or self._activation is None:
            return y, None
        # Codes themselves tell, and they are alive anyway.
        return y, y if isinstance(y, Codes) else _passed(y, self._activation)

    def backward(self, kept: Any, gradient: Gradient, sink: Sink) -> None:
        """Mask, hand the addend its share, and go back through the weights in int8."""
        assert self._gradient is not None
        if isinstance(gradient, Tensor):
            gradient = _to_codes(gradient, self._gradient_grid)
        if kept is not None:
            mask = _passed(kept, self._activation) if isinstance(kept, Codes) else kept
            gradient = _masked(gradient, mask)
        x = self.inputs[0]
        if len(self.inputs) > 1:
            sink.put(self.inputs[1], gradient)
        others = sink.pop(x, None) if self._completes else None
        sink.put(x, self._gradient(gradient, self._input_gradient_grid, others))


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _capped(y: Gradient, activation: Activation | None) -> Gradient:
    """At the activation's upper bound, in place."""
    if activation is None or activation.upper is None:
        return y
    if isinstance(y, Codes):
        top = min(_code_of(activation.upper, y.grid), LARGEST_CODE)
        return Codes(y.values.clamp_max_(top), y.grid)
    return y.clamp_max_(activation.upper)


def _code_of(value: float, grid: Grid) -> int:
    return round(value / grid.scale) + grid.zero_point


def _passed(y: Gradient, activation: Activation | None) -> Tensor:
    """Bytes that are 0 where the activation cut the value off, and only there."""
    assert activation is not None
    if isinstance(y, Tensor):
        inside = y > 0 if activation.upper is None else (y > 0) & (y < activation.upper)
        return inside.to(torch.uint8)
    # Comparing bytes is twenty times slower in PyTorch than arithmetic on them, which wraps around.
    zero, top = y.grid.zero_point, LARGEST_CODE + 1
    if activation.upper is not None:
        top = min(_code_of(activation.upper, y.grid), top)
    if top > LARGEST_CODE:
        return y.values if zero == 0 else y.values - zero
    # What is cut off below has become 255, what is cut off above the largest: both are that now.
    last = max(top - zero - 1, 0)
    return (y.values - (zero + 1)).clamp_max_(last).sub_(last)


def _masked(gradient: Codes, passed: Tensor) -> Codes:
    """Zero the gradient where ``passed`` is 0: flipping the top bit makes zero's code 0.

    In place: a gradient on its way has one owner, the step that it has arrived at.
    """
    values = gradient.values.bitwise_xor_(MIDDLE)
    # ReLU's own backward pass, which knows bytes, takes half the time of a product with a mask.
    torch.ops.aten.threshold_backward.grad_input(values, passed, 0, grad_input=values)
    values.bitwise_xor_(MIDDLE)
    return gradient


class ActStep(Step):
    """A ReLU on its own."""

    def forward(self, env: Environment, *, keep: bool) -> tuple[Gradient, Any]:
        """Codes stay on their grid. Keeps the mask."""
        x: Gradient = env[self.inputs[0]]
        if isinstance(x, Codes):
            y: Gradient = Codes(x.values.clamp_min(x.grid.zero_point), x.grid)
        else:
            y = x.relu()
        y = _capped(y, self._op.activation)
        return y, _passed(y, self._op.activation) if keep else None

    def backward(self, kept: Tensor, gradient: Gradient, sink: Sink) -> None:
        """Where the value was cut off, so is the gradient."""
        if isinstance(gradient, Codes):
            sink.put(self.inputs[0], _masked(gradient, kept))
        else:
            sink.put(self.inputs[0], gradient * (kept > 0))


class CatStep(Step):
    """A concatenation: copies codes where the parts share a grid."""

    def forward(self, env: Environment, *, keep: bool) -> tuple[Codes, Any]:  # noqa: ARG002
        """Parts on different grids meet in float32. Keeps the sizes of the parts."""
        parts: list[Codes] = [env[name] for name in self.inputs]
        dim = self._op.dim
        sizes = [part.values.shape[dim] for part in parts]
        if len({part.grid for part in parts}) == 1:
            whole = torch.cat([part.values for part in parts], dim)
            return Codes(whole, parts[0].grid), sizes
        whole = torch.cat([part.dequantize() for part in parts], dim)
        return _to_codes(whole, self._grid, unsigned=self._unsigned), sizes

    def backward(self, kept: list[int], gradient: Gradient, sink: Sink) -> None:
        """Each part gets its slice."""
        parts = _raw(gradient).split_with_sizes(kept, self._op.dim)
        for name, part in zip(self.inputs, parts, strict=True):
            own = channels_last(part)
            sink.put(name, Codes(own, gradient.grid) if isinstance(gradient, Codes) else own)


class _Replay(NamedTuple):
    """What backward needs of a node that moved codes: it moves floats of that shape again."""

    shape: torch.Size
    others: dict[str, Any]


def _watched(value: Tensor) -> Tensor:
    """A value that a gradient can be asked of, which lives no longer than somebody reads it."""
    leaf = value.detach().requires_grad_()
    own = leaf.view_as(leaf)
    leaf.data = value.new_empty(0)  # it stays in the graph, and would keep the value alive
    return own


class _Graph:
    """Autograd's graph of a node by its ends: it keeps what backward reads, and no other tensor."""

    def __init__(self, inputs: dict[str, Tensor], result: Tensor) -> None:
        self._inputs = {name: get_gradient_edge(x) for name, x in inputs.items()}
        self._like = {name: (x.shape, x.dtype) for name, x in inputs.items()}
        self._result = get_gradient_edge(result)

    def backward(self, gradient: Tensor) -> dict[str, Tensor | None]:
        """The gradients of the inputs."""
        operation: Any = self._result.node
        names = {edge.node: name for name, edge in self._inputs.items()}
        reads = [before and names.get(before, "") for before, _ in operation.next_functions]
        single = "" not in reads and callable(operation) and len(operation._input_metadata) == 1
        # One operation by itself: autograd's engine takes longer than most of them, and adds this.
        parts = operation(gradient) if single else ()
        parts = parts if isinstance(parts, tuple) else (parts,)
        shares = list(zip(reads, parts, strict=True)) if single else []
        # Inside a backward pass to some tensors only, an operation gives nothing for all others.
        if not single or any(name and part is None for name, part in shares):
            ends = list(self._inputs.values())
            found = torch.autograd.grad([self._result], ends, gradient, allow_unused=True)
            return dict(zip(self._inputs, found, strict=True))
        gradients: dict[str, Tensor | None] = {}
        for name, part in shares:
            if name is not None:
                shape, dtype = self._like[name]
                own, others = part.sum_to_size(shape).to(dtype), gradients.get(name)
                gradients[name] = own if others is None else others + own
        return gradients


class NodeStep(Step):
    """A node computed as it stands in the graph: in float32, or on codes where it only moves them.

    Its backward pass is autograd's own, over this one node.
    """

    def __init__(self, planned: SchemeStep, block: nn.Module) -> None:
        super().__init__(planned)
        self._functions = {node: _function(node, block) for node in self._op.nodes}

    def forward(self, env: Environment, *, keep: bool) -> tuple[Any, Any]:
        """On codes for a layout, else on floats. Keeps autograd's graph, if a gradient can pass."""
        source = env[self.inputs[0]] if self._op.layout and self.inputs else None
        if isinstance(source, Codes):
            result = self._apply(lambda name: _raw(env[name]))
            others = {name: env[name] for name in self.inputs[1:]}
            coded = _changed(result, Tensor, lambda moved: Codes(moved, source.grid))
            return coded, _Replay(source.values.shape, others)
        if not keep:
            return self._apply(lambda name: floats_of(env[name])), None
        result, graph = self._traced(env)
        if graph is None:
            # What is made of it needs no gradient either, and may be nothing that can have one.
            env.constants |= {self.name}
        return _changed(result, Tensor, Tensor.detach), graph

    def _apply(self, read: Callable[[str], Any]) -> Any:
        def own(name: str) -> Any:
            value = read(name)
            return value.clone() if self._op.overwrites and isinstance(value, Tensor) else value

        return self._op.run(own, self._functions.__getitem__)

    def _traced(self, env: Environment) -> tuple[Any, _Graph | None]:
        """The result and, where it is a tensor that a gradient can pass, autograd's graph."""
        floats = {name: floats_of(env[name]) for name in dict.fromkeys(self.inputs)}
        with torch.enable_grad():
            watched = {
                name: _watched(value)
                for name, value in floats.items()
                if _has_gradient(value) and name not in env.constants
            }
            result = self._apply((floats | watched).__getitem__)
        passes = isinstance(result, Tensor) and result.requires_grad
        return result, _Graph(watched, result) if passes else None

    def backward(self, kept: Any, gradient: Gradient, sink: Sink) -> None:
        """Autograd, over this node alone."""
        if kept is None:
            return
        arrived, graph = as_float(gradient), kept
        if isinstance(kept, _Replay):
            blank = torch.empty(kept.shape, device=arrived.device)
            _, graph = self._traced(Environment({self.inputs[0]: blank} | kept.others))
        for name, part in graph.backward(arrived).items():
            if part is not None:
                sink.put(name, part)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _raw(value: Any) -> Any:
    return value.values if isinstance(value, Codes) else value


def _function(node: fx.Node, block: nn.Module) -> Callable[..., Any]:
    """What a node calls, with modules and tensors copied and modules in evaluation mode."""
    function = node_function(node, block)
    if isinstance(function, nn.Module):
        module = copy_block(function, {}).eval().requires_grad_(False)

        def on_contiguous(*args: Any, **kwargs: Any) -> Any:
            """A module of unknown make may count on tensors being channels first."""
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
            return module(*args, **kwargs)

        return module if is_layer(module) else on_contiguous
    if node.op == "get_attr" and isinstance(value := function(), Tensor):
        constant = value.detach().clone()
        return lambda: constant
    return function
