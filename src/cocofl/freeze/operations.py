"""What a block consists of once it is lowered: operations on named values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

from cocofl.freeze.kernels import Geometry
from cocofl.freeze.layers import LinearLayer
from cocofl.freeze.traced_blocks import as_graph, as_one_node


@dataclass(frozen=True)
class Activation:
    """ReLU, or ReLU6 where it has an upper bound."""

    upper: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """In float."""
        return x.clamp(0, self.upper)

    def __str__(self) -> str:
        return "relu" if self.upper is None else f"relu{self.upper:g}"


@dataclass(frozen=True)
class MapOp:
    """A convolution, linear layer or lone BatchNorm, with what was fused into it."""

    name: str
    x: str
    layer: str | None
    kind: LinearLayer | None
    """What the layer is; None for a lone BatchNorm."""
    geometry: Geometry | None
    """None for a product along the last axis."""
    norm: str | None = None
    addend: str | None = None
    activation: Activation | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values it reads as codes."""
        return (self.x,) if self.addend is None else (self.x, self.addend)


@dataclass(frozen=True)
class ActOp:
    """A ReLU that nothing could take in; codes are clamped in place of values."""

    name: str
    x: str
    activation: Activation

    @property
    def inputs(self) -> tuple[str, ...]:
        """The one value it reads."""
        return (self.x,)


@dataclass(frozen=True)
class CatOp:
    """A concatenation of feature maps, which then share one grid."""

    name: str
    inputs: tuple[str, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class NodeOp:
    """A node of the graph as it is, after the nodes that make the tuples it takes apart.

    ``layout`` nodes only move elements around (or ask for a shape), so they work on codes as on
    floats; all others are computed in float. ``overwrites`` says that it works in place.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    layout: bool
    overwrites: bool
    names: dict[fx.Node, str]
    drops: Any = 0.0
    """How likely an element is dropped: by a dropout that devices who train the block need."""

    def run(
        self, read: Callable[[str], Any], function: Callable[[fx.Node], Callable[..., Any]]
    ) -> Any:
        """Its value, given how to read values and what its nodes call."""
        made: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return made[node] if node in made else read(self.names[node])

        for node in self.nodes:
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            made[node] = function(node)(*args, **kwargs)
        return made[self.nodes[-1]]


Operation = MapOp | ActOp | CatOp | NodeOp


def node_function(node: fx.Node, root: nn.Module) -> Callable[..., Any]:
    """What a node calls, in a frozen block."""
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        # A view of channels-last images may not exist; nobody writes through it here.
        method = "reshape" if node.target == "view" else str(node.target)
        return lambda self, *args, **kwargs: getattr(self, method)(*args, **kwargs)
    if node.op == "get_attr":
        value = False if node.target == "training" else attrgetter(str(node.target))(root)
        return lambda: value
    assert callable(node.target)
    return node.target


class ValueName(str):
    """Stands for a value in what a block returns; a plain string there is just that string."""


@dataclass(frozen=True)
class LoweredBlock:
    """A block as operations on named values; names carry the block's index, so they are unique."""

    operations: tuple[Operation, ...]
    descriptions: tuple[str, ...]
    """What each operation does, for a person to read."""
    inputs: tuple[str, ...]
    outputs: Any
    """A :class:`ValueName` for each value, in the structure that the block returns."""
    shapes: dict[str, tuple[int, ...]]
    non_negative: frozenset[str]
    """Values that ReLU and the like have left without negative entries."""
    sites: tuple[str, ...]
    """Values whose scales a device measures when it trains this block."""
    channels_last: bool
    """Whether the block may run on channels-last images; one with ``view`` may not."""
    whole: Any = None
    """If the block stays one operation, the structure of what it returns; () for one value."""
    returns: type | None = None
    """The class of what it returns, if that is a dataclass."""
    learned: dict[str, str] = field(default_factory=dict)
    """Values that are parameters which learn though the block is frozen, with their keys."""
    drops: bool = False
    """Whether elements are dropped where the block is trained."""

    @property
    def flat_nodes(self) -> frozenset[str]:
        """The nodes whose result has two axes."""
        flat = [name for name, shape in self.shapes.items() if len(shape) == 2]
        return frozenset(name.rpartition(".")[2] for name in flat)

    def graph(self, block: nn.Module) -> fx.GraphModule:
        """The graph of this block, or of a copy of it."""
        if self.whole is not None:
            return as_one_node(block, len(self.inputs), self.whole or None)
        return as_graph(block, len(self.inputs))
