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
from torch.utils import _pytree as pytree

from cocofl.chain.trace import is_layer
from cocofl.errors import InvalidExample
from cocofl.freeze.block_copy import copy_block
from cocofl.freeze.kernels import Prepared
from cocofl.freeze.nodes import node_function, run_nodes
from cocofl.freeze.operations import Activation, NodeOp
from cocofl.numerics import (
    LARGEST_CODE,
    MIDDLE,
    Codes,
    Grid,
    as_float,
    quantize,
    quantize_on_the_fly,
)

Environment = dict[str, Any]
Gradient = Codes | Tensor


class Sink:
    """Gradients on their way back, by value; what several steps send to one value adds up."""

    def __init__(self) -> None:
        self._arrived: dict[str, Gradient] = {}

    def take(self, value: str) -> Gradient | None:
        """What has arrived for a value so far; it is the caller's from now on."""
        return self._arrived.pop(value, None)

    def put(self, value: str, gradient: Gradient) -> None:
        """Add a gradient; two become their float32 sum."""
        present = self._arrived.get(value)
        if present is None:
            self._arrived[value] = gradient
        else:
            self._arrived[value] = as_float(present) + as_float(gradient)


def floats_of(value: Any) -> Any:
    """A value with the codes in it dequantized, wherever they stand in its structure."""
    if isinstance(value, Codes):
        return value.dequantize()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(floats_of(part) for part in value)
    return value


class Step(ABC):
    """One operation of a region."""

    name: str
    inputs: tuple[str, ...]

    @abstractmethod
    def forward(self, env: Environment) -> Any:
        """The value of this step."""

    @abstractmethod
    def record(self, env: Environment) -> tuple[Any, Any]:
        """The value, and the little that backward needs."""

    @abstractmethod
    def backward(self, kept: Any, gradient: Gradient, sink: Sink, /) -> None:
        """Send on the gradients of the inputs."""


class ToCodes(Step):
    """Quantizes a float value that int8 operations read; gradients pass straight through."""

    def __init__(self, name: str, source: str, grid: Grid | None, *, unsigned: bool) -> None:
        self.name, self.inputs = name, (source,)
        self._grid, self._unsigned = grid, unsigned

    def forward(self, env: Environment) -> Codes:
        """On the known grid, or on the fly."""
        x = env[self.inputs[0]]
        if x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self._grid is None:
            return quantize_on_the_fly(x, unsigned=self._unsigned)
        return quantize(x, self._grid)

    def record(self, env: Environment) -> tuple[Codes, None]:
        """Nothing to keep."""
        return self.forward(env), None

    def backward(self, _kept: None, gradient: Gradient, sink: Sink) -> None:
        """Straight through."""
        sink.put(self.inputs[0], gradient)


class MapTargets(NamedTuple):
    """Where a map's results go: grids of its output, of its gradient, and of its input's."""

    output: Grid | None
    as_codes: bool
    unsigned: bool
    gradient: Grid | None
    completes_gradient: bool
    input_gradient: Grid | None
    input_shape: tuple[int, ...] | None
    """Of a sample, for which the gradient of a convolution was prepared."""


class MapStep(Step):
    """A convolution, linear layer or affine map with what was fused into it."""

    def __init__(
        self,
        name: str,
        inputs: tuple[str, ...],
        activation: Activation | None,
        run: Prepared,
        backward: Prepared | None,
        targets: MapTargets,
    ) -> None:
        self.name, self.inputs = name, inputs
        self._activation, self._run, self._gradient, self._to = activation, run, backward, targets

    def forward(self, env: Environment) -> Gradient:
        """Codes where others read codes, else float32."""
        addend = env[self.inputs[1]] if len(self.inputs) > 1 else None
        y = self._run(env[self.inputs[0]], self._to.output, addend)
        if self._activation is not None and self._activation.upper is not None:
            y = _cap(y, self._activation.upper)
        if self._to.as_codes and not isinstance(y, Codes):
            return quantize_on_the_fly(y, unsigned=self._to.unsigned)
        return y

    def record(self, env: Environment) -> tuple[Gradient, Any]:
        """Keeps what tells where the activation let values pass: one byte an element."""
        shape, expected = tuple(env[self.inputs[0]].values.shape[1:]), self._to.input_shape
        if expected is not None and shape != expected:
            raise InvalidExample(
                f"images of {_by(shape)} reach {self.name!r}; its int8 gradient was prepared for "
                f"{_by(expected)}. Split the model with an example of the size it is trained on."
            )
        y = self.forward(env)
        if self._activation is None:
            return y, None
        if isinstance(y, Codes):
            return y, y  # the codes themselves tell, and they are alive anyway
        return y, _passed(y, self._activation)

    def backward(self, kept: Any, gradient: Gradient, sink: Sink) -> None:
        """Mask, hand the addend its share, and go back through the weights in int8."""
        assert self._gradient is not None
        if isinstance(gradient, Tensor):
            gradient = _to_codes(gradient, self._to.gradient)
        if kept is not None:
            mask = _passed(kept, self._activation) if isinstance(kept, Codes) else kept
            gradient = _masked(gradient, mask)
        x = self.inputs[0]
        if len(self.inputs) > 1:
            sink.put(self.inputs[1], gradient)
        if self._to.completes_gradient:
            sink.put(x, self._gradient(gradient, self._to.input_gradient, sink.take(x)))
        else:
            sink.put(x, self._gradient(gradient, None, None))


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _cap(y: Gradient, upper: float) -> Gradient:
    if isinstance(y, Codes):
        return Codes(y.values.clamp_max_(min(_code_of(upper, y.grid), LARGEST_CODE)), y.grid)
    return y.clamp_max_(upper)


def _code_of(value: float, grid: Grid) -> int:
    return round(value / grid.scale) + grid.zero_point


def _passed(y: Gradient, activation: Activation | None) -> Tensor:
    """1 where the activation let the value pass, 0 where it cut it off."""
    assert activation is not None
    if isinstance(y, Tensor):
        inside = y > 0 if activation.upper is None else (y > 0) & (y < activation.upper)
        return inside.to(torch.uint8)
    # min(code - zero, 1): comparing bytes is twenty times slower in PyTorch
    above = y.values if y.grid.zero_point == 0 else y.values - y.grid.zero_point
    passed = above.clamp_max(1)
    if activation.upper is not None and (top := _code_of(activation.upper, y.grid)) <= LARGEST_CODE:
        passed *= (top - y.values).clamp_max_(1)
    return passed


def _masked(gradient: Codes, mask: Tensor) -> Codes:
    """Zero the gradient where the mask is 0: flipping the top bit makes zero's code 0."""
    values = gradient.values.bitwise_xor(MIDDLE).mul_(mask).bitwise_xor_(MIDDLE)
    return Codes(values, gradient.grid)


def _to_codes(gradient: Tensor, grid: Grid | None) -> Codes:
    if gradient.ndim == 4:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    return quantize_on_the_fly(gradient) if grid is None else quantize(gradient, grid)


class ActStep(Step):
    """A ReLU on its own."""

    def __init__(self, name: str, source: str, activation: Activation) -> None:
        self.name, self.inputs, self._activation = name, (source,), activation

    def forward(self, env: Environment) -> Gradient:
        """Codes stay on their grid."""
        x: Gradient = env[self.inputs[0]]
        if isinstance(x, Codes):
            y: Gradient = Codes(x.values.clamp_min(x.grid.zero_point), x.grid)
        else:
            y = x.relu()
        return y if self._activation.upper is None else _cap(y, self._activation.upper)

    def record(self, env: Environment) -> tuple[Gradient, Tensor]:
        """Keeps the mask."""
        y = self.forward(env)
        return y, _passed(y, self._activation)

    def backward(self, kept: Tensor, gradient: Gradient, sink: Sink) -> None:
        """Where the value was cut off, so is the gradient."""
        passed = _masked(gradient, kept) if isinstance(gradient, Codes) else gradient * kept
        sink.put(self.inputs[0], passed)


class CatStep(Step):
    """A concatenation: copies codes where the parts share a grid."""

    def __init__(
        self, name: str, inputs: tuple[str, ...], dim: int, grid: Grid | None, *, unsigned: bool
    ) -> None:
        self.name, self.inputs = name, inputs
        self._dim, self._grid, self._unsigned = dim, grid, unsigned

    def forward(self, env: Environment) -> Codes:
        """Parts on different grids meet in float32."""
        parts: list[Codes] = [env[name] for name in self.inputs]
        if len({part.grid for part in parts}) == 1:
            return Codes(torch.cat([part.values for part in parts], self._dim), parts[0].grid)
        whole = torch.cat([part.dequantize() for part in parts], self._dim)
        if self._grid is None:
            return quantize_on_the_fly(whole, unsigned=self._unsigned)
        return quantize(whole, self._grid)

    def record(self, env: Environment) -> tuple[Codes, list[int]]:
        """Keeps the sizes of the parts."""
        return self.forward(env), [env[name].values.shape[self._dim] for name in self.inputs]

    def backward(self, kept: list[int], gradient: Gradient, sink: Sink) -> None:
        """Each part gets its slice."""
        values = gradient.values if isinstance(gradient, Codes) else gradient
        for name, part in zip(self.inputs, values.split_with_sizes(kept, self._dim), strict=True):
            own = part.contiguous(memory_format=torch.channels_last)
            sink.put(name, Codes(own, gradient.grid) if isinstance(gradient, Codes) else own)


class _Replay(NamedTuple):
    """What backward needs of a node that moved codes: it moves floats of that shape again."""

    shape: torch.Size
    others: Environment


class NodeStep(Step):
    """A node computed as it stands in the graph: in float32, or on codes where it only moves them.

    Its backward pass is autograd's own, over this one node.
    """

    def __init__(self, op: NodeOp, block: nn.Module) -> None:
        self.name, self.inputs, self._layout = op.name, op.inputs, op.layout
        self._op, self._functions = op, {node: _function(node, block) for node in op.nodes}
        self._overwrites = op.overwrites

    def forward(self, env: Environment) -> Any:
        """On codes for a layout, else on floats."""
        if self._moves_codes(env):
            source: Codes = env[self.inputs[0]]
            return _recode(self._apply(lambda name: _raw(env[name])), source.grid)
        return self._apply(lambda name: self._own(floats_of(env[name])))

    def _moves_codes(self, env: Environment) -> bool:
        return self._layout and bool(self.inputs) and isinstance(env[self.inputs[0]], Codes)

    def _own(self, value: Any) -> Any:
        return value.clone() if self._overwrites and isinstance(value, Tensor) else value

    def _apply(self, read: Callable[[str], Any]) -> Any:
        return run_nodes(self._op, read, self._functions.__getitem__)

    def record(self, env: Environment) -> tuple[Any, Any]:
        """Keeps autograd's graph of this node, if a gradient can pass it."""
        if self._moves_codes(env):
            source, others = self.inputs[0], self.inputs[1:]
            kept = _Replay(env[source].values.shape, {name: env[name] for name in others})
            return self.forward(env), kept
        leaves, result = self._traced(env)
        if isinstance(result, Tensor):
            return result.detach(), (leaves, result) if result.requires_grad else None
        return result, None

    def _traced(self, env: Environment) -> tuple[dict[str, Tensor], Any]:
        leaves = {
            name: value.detach().requires_grad_()
            for name in dict.fromkeys(self.inputs)
            if isinstance(value := floats_of(env[name]), Tensor) and value.is_floating_point()
        }
        with torch.enable_grad():
            result = self._apply(
                lambda name: self._own(leaves[name] if name in leaves else floats_of(env[name]))
            )
        return leaves, result

    def backward(self, kept: Any, gradient: Gradient, sink: Sink) -> None:
        """Autograd, over this node alone."""
        if kept is None:
            return
        arrived = as_float(gradient)
        if isinstance(kept, _Replay):
            blank = torch.empty(kept.shape, device=arrived.device)
            leaves, result = self._traced({self.inputs[0]: blank} | kept.others)
        else:
            leaves, result = kept
        found = torch.autograd.grad(result, list(leaves.values()), arrived, allow_unused=True)
        for name, part in zip(leaves, found, strict=True):
            if part is not None:
                sink.put(name, part)


def _raw(value: Any) -> Any:
    return value.values if isinstance(value, Codes) else value


def _recode(result: Any, grid: Grid) -> Any:
    if isinstance(result, Tensor):
        return Codes(result, grid)
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return type(result)(_recode(part, grid) for part in result)
    return result


def _function(node: fx.Node, block: nn.Module) -> Callable[..., Any]:
    """What a node calls, with modules and tensors copied and modules in evaluation mode."""
    function = node_function(node, block)
    if isinstance(function, nn.Module):
        module = copy_block(function, {}).eval().requires_grad_(False)
        return module if is_layer(module) else _on_contiguous(module)
    if node.op == "get_attr" and isinstance(value := function(), Tensor):
        constant = value.detach().clone()
        return lambda: constant
    return function


def _on_contiguous(module: nn.Module) -> Callable[..., Any]:
    """A module of unknown make, which may count on tensors being channels first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def plain(x: Any) -> Any:
            return x.contiguous() if isinstance(x, Tensor) else x

        return module(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))

    return call
