"""From a block's graph to operations that have an int8 twin, and float operations for the rest.

One dispatch says what each node of a block's graph *is*. Convolutions and linear layers take in
the BatchNorm, the addition and the ReLU that follow them. What has no int8 twin stays in float:
nothing is ever replaced by something that computes something else.

The result depends on the graph and on shapes, not on weights or on the span, so a chain is
lowered once and serves every span of every round.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from cocofl.chain import BlockChain, Wiring, graph_block
from cocofl.errors import CannotLower, CannotSplit, InvalidExample
from cocofl.freeze.layout import FaultyConvolutions
from cocofl.freeze.twins import twin


@dataclass(frozen=True)
class Activation:
    """ReLU, or ReLU6 where it has an upper bound."""

    upper: float | None = None


@dataclass(frozen=True)
class MapOp:
    """A convolution, linear layer or lone BatchNorm, with what was fused into it."""

    name: str
    x: str
    layer: str | None
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
    drops: bool = False
    """Whether this is a dropout, kept because some devices train the block and need it."""


Operation = MapOp | ActOp | CatOp | NodeOp


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

    @property
    def flat_nodes(self) -> frozenset[str]:
        """The nodes whose result has two axes."""
        flat = [name for name, shape in self.shapes.items() if len(shape) == 2]
        return frozenset(name.rpartition(".")[2] for name in flat)

    def graph(self, block: nn.Module) -> fx.GraphModule:
        """The graph of this block, or of a twin of it."""
        if self.whole is not None:
            return _as_one_node(block, len(self.inputs), self.whole or None)
        return as_graph(block, len(self.inputs))


_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_CONCATENATIONS = {torch.cat, torch.concat}
_DROPOUTS = {F.dropout, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_RELUS: dict[Any, Activation] = {
    F.relu: Activation(),
    torch.relu: Activation(),
    F.relu_: Activation(),
    torch.relu_: Activation(),
    "relu": Activation(),
    "relu_": Activation(),
    F.relu6: Activation(6.0),
    nn.ReLU: Activation(),
    nn.ReLU6: Activation(6.0),
}
_LAYOUTS = {
    torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.chunk, torch.split,
    torch.unsqueeze, torch.squeeze, torch.swapaxes, operator.getitem, getattr, F.channel_shuffle,
    "flatten", "reshape", "view", "permute", "transpose", "chunk", "split", "unsqueeze",
    "squeeze", "contiguous", "size", "dim", "expand", "t",
    nn.Flatten, nn.Unflatten, nn.ChannelShuffle, nn.PixelShuffle,
}  # fmt: skip
_NON_NEGATIVE = {nn.Sigmoid, nn.Hardsigmoid, torch.sigmoid, F.sigmoid, F.hardsigmoid, "sigmoid"}
_KEEP_SIGN = {
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
}  # fmt: skip


def lower(chain: BlockChain, *, keep_dropout: bool = False) -> tuple[LoweredBlock, ...]:
    """The operations of every block of the chain.

    A frozen dropout hands its input on and so is no operation, unless ``keep_dropout``.
    """
    known = _LOWERED.setdefault(chain, {})
    if keep_dropout not in known:
        modes = {module: module.training for module in chain.modules()}
        chain.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                known[keep_dropout] = tuple(_lower_chain(chain, keep_dropout))
        finally:
            for module, training in modes.items():
                module.training = training
    return known[keep_dropout]


_LOWERED: WeakKeyDictionary[BlockChain, dict[bool, tuple[LoweredBlock, ...]]] = WeakKeyDictionary()


def _lower_chain(chain: BlockChain, keep_dropout: bool) -> Iterator[LoweredBlock]:
    if chain.example is None:
        raise CannotLower(
            "freezing needs the shapes of a real batch; build the chain with "
            "cocofl.split(model, example) or BlockChain(blocks, example=batch)"
        )
    env: dict[str, Any] = dict(zip(chain.wiring[0].inputs, chain.example, strict=True))
    where = {name: f"input.{name}" for name in env}
    positive: frozenset[str] = frozenset()
    for index, (block, wiring) in enumerate(zip(chain.blocks, chain.wiring, strict=True)):
        arguments = [env[name] for name in wiring.inputs]
        seen = _look_at(index, block, arguments)
        for name in seen.overwritten_inputs(wiring):
            if any(name in later.inputs for later in chain.wiring[index + 1 :]):
                raise CannotLower(
                    f"block {index} overwrites its input {name!r}, which a later block reads too; "
                    "let it work on a clone"
                )
        inputs = tuple(where[name] for name in wiring.inputs)
        heads = _heads(seen) if index == len(chain) - 1 else frozenset[fx.Node]()
        lowered = _lower_block(index, seen, inputs, heads, positive, keep_dropout)
        positive |= lowered.non_negative
        yield lowered
        many = len(wiring.outputs) > 1
        env |= zip(wiring.outputs, seen.result if many else [seen.result], strict=True)
        handed_on = dict(
            zip(wiring.outputs, lowered.outputs if many else [lowered.outputs], strict=True)
        )
        for name, value in handed_on.items():
            if not isinstance(value, str) and index < len(chain) - 1:
                raise CannotLower(
                    f"block {index} hands on {name!r}, a {type(value).__name__}, as one value; "
                    "give each of its tensors a name in the wiring"
                )
        where |= handed_on


def as_graph(block: nn.Module, n_inputs: int = 1) -> fx.GraphModule:
    """The block's graph, traced if it was given by hand."""
    if isinstance(block, fx.GraphModule):
        return block
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about layers that stay whole
        return graph_block(block, n_inputs)


def _as_one_node(block: nn.Module, n_inputs: int, structure: Any) -> fx.GraphModule:
    """A graph that calls the block as it is and takes its result apart."""
    root, graph = nn.Module(), fx.Graph()
    root.add_module("block", block)
    inputs = tuple(graph.placeholder(f"x{i}") for i in range(n_inputs))
    graph.output(_taken_apart(graph, graph.call_module("block", inputs), structure))
    return fx.GraphModule(root, graph)


def _taken_apart(graph: fx.Graph, node: fx.Node, structure: Any) -> Any:
    """Nodes that read each value of a nested result."""
    if structure is None:
        return node

    def part(key: Any) -> Any:
        item = graph.call_function(operator.getitem, (node, key))
        return _taken_apart(graph, item, structure[key])

    if isinstance(structure, dict):
        return {key: part(key) for key in structure}
    return type(structure)(part(i) for i in range(len(structure)))


def _structure(value: Any) -> Any:
    """The tuples, lists and dicts that a result consists of, with None for what they hold."""
    if isinstance(value, Tensor) or _is_plain(value):
        return None
    if type(value) in {tuple, list}:
        return type(value)(_structure(part) for part in value)
    if isinstance(value, dict):
        return {key: _structure(part) for key, part in value.items()}
    raise CannotLower(
        f"a block returns a {type(value).__name__}; "
        "expected tensors, or tuples, lists and dicts of them"
    )


_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensor, so that no gradient can flow through it."""
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))


class _Watch(fx.Interpreter):
    """Runs a block and remembers what kind of value each node has, and what it overwrites."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False  # our own message says where
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.bundles: dict[fx.Node, Any] = {}
        """Results which are no tensors but may hold some."""
        self.overwritten: dict[fx.Node, list[fx.Node]] = {}
        self.tangled = False
        """Whether a node overwrites what others look at, be it through a view."""

    def run_node(self, n: fx.Node) -> Any:
        """Also note what there is to know."""
        before = {node: _versions(value) for node, value in self.env.items()}
        result = super().run_node(n)
        changed = [node for node, old in before.items() if _versions(self.env[node]) != old]
        if changed:
            self.overwritten[n] = changed
            self.tangled |= any(self.env[node] is not result for node in changed)
        if isinstance(result, Tensor):
            if result.is_floating_point():
                self.shapes[n] = tuple(result.shape)
        elif n.op != "output" and not _is_plain(result):
            self.bundles[n] = result
        return result


def _versions(value: Any) -> list[int]:
    """PyTorch counts how often a tensor, or what it is a view of, was written to."""
    return [leaf._version for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class _Seen:
    """A block after a run on the example."""

    block: fx.GraphModule
    graph: fx.Graph
    """A copy that no module owns, so that operations do not keep the chain's weights alive."""
    watch: _Watch
    arguments: list[Any]
    result: Any
    whole: Any
    channels_last: bool

    def overwritten_inputs(self, wiring: Wiring) -> list[str]:
        """The inputs that the block has written into."""
        pairs = zip(wiring.inputs, self.arguments, strict=True)
        return [name for name, x in pairs if isinstance(x, Tensor) and x._version]


def _look_at(index: int, block: nn.Module, arguments: list[Any]) -> _Seen:
    """Run the block on the example; what cannot be traced or told apart stays one node."""
    try:
        try:
            seen = _watched(as_graph(block, len(arguments)), arguments, None)
            if not seen.watch.tangled:
                return seen
        except CannotSplit:
            pass
        whole = _structure(block(*map(_copied, arguments)))
        one_node = _as_one_node(block, len(arguments), whole)
        return _watched(one_node, arguments, () if whole is None else whole)
    except CannotLower:
        raise
    except Exception as error:
        got = ", ".join(str(tuple(x.shape)) for x in arguments if isinstance(x, Tensor))
        raise InvalidExample(
            f"block {index} does not run on the example, which reaches it as {got}: {error}"
        ) from error


def _watched(traced: fx.GraphModule, arguments: list[Any], whole: Any) -> _Seen:
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, val_map={}))
    watch = _Watch(traced, graph)
    own = [_copied(x) for x in arguments]
    result = watch.run(*own)
    if any(node in watch.bundles for node in graph.output_node().all_input_nodes):
        _return_single_values(graph, watch.bundles)
        watch = _Watch(traced, graph)
        own = [_copied(x) for x in arguments]
        result = watch.run(*own)
    return _Seen(traced, graph, watch, own, result, whole, _runs_channels_last(traced, arguments))


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _return_single_values(graph: fx.Graph, bundles: dict[fx.Node, Any]) -> None:
    """Take results apart which the block returns as they are."""
    output = graph.output_node()

    def apart(node: fx.Node) -> Any:
        return _taken_apart(graph, node, _structure(bundles.get(node)))

    with graph.inserting_before(output):
        output.args = (_mapped(output.args[0], apart),)


def _runs_channels_last(traced: fx.GraphModule, arguments: list[Any]) -> bool:
    twin_block = twin(traced, {}).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trial = fx.Interpreter(twin_block)
    trial.extra_traceback = False
    images = torch.channels_last
    own = [
        x.contiguous(memory_format=images) if isinstance(x, Tensor) and x.ndim == 4 else x
        for x in map(_copied, arguments)
    ]
    faults = FaultyConvolutions()
    try:
        with faults:
            trial.run(*own)
    except RuntimeError:
        return False
    return not faults.seen


def _mapped(structure: Any, of: Callable[[fx.Node], Any]) -> Any:
    """What a graph returns, with each node replaced, in ordinary lists and dicts."""
    if isinstance(structure, fx.Node):
        return of(structure)
    if isinstance(structure, dict):
        return {key: _mapped(part, of) for key, part in structure.items()}
    if isinstance(structure, list):
        return [_mapped(part, of) for part in structure]
    if isinstance(structure, tuple):
        parts = [_mapped(part, of) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return structure


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a layer does just what PyTorch's own does, with a weight of its own.

    A subclass may have another forward, a hook may change what goes in and comes out, and a
    weight may be computed from others.
    """
    own = type(layer)
    return (
        any(
            isinstance(layer, kind)
            and own.forward is kind.forward
            and getattr(own, "_conv_forward", None) is getattr(kind, "_conv_forward", None)
            for kind in kinds
        )
        and "weight" in layer._parameters
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )


def _heads(seen: _Seen) -> frozenset[fx.Node]:
    """The classifiers: linear layers that no other layer follows. They are never quantized."""

    def calls(node: fx.Node, *kinds: type[nn.Module]) -> bool:
        if node.op != "call_module":
            return False
        return is_plain(seen.block.get_submodule(str(node.target)), *kinds)

    followed: set[fx.Node] = set()
    for node in reversed(seen.graph.nodes):
        if any(user in followed or calls(user, nn.Conv2d, nn.Linear) for user in node.users):
            followed.add(node)
    return frozenset(n for n in seen.graph.nodes if calls(n, nn.Linear) and n not in followed)


def _lower_block(
    index: int,
    seen: _Seen,
    inputs: tuple[str, ...],
    heads: frozenset[fx.Node],
    positive: frozenset[str],
    keep_dropout: bool,
) -> LoweredBlock:
    block, watch = seen.block, seen.watch
    names: dict[fx.Node, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    operations: list[Operation] = []
    outputs: Any = None
    arriving = iter(inputs)
    for node in seen.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(arriving)
        elif node.op == "output":
            outputs = _mapped(node.args[0], lambda n: ValueName(names[n]))
            break
        elif node in watch.bundles:
            continue  # runs as part of the nodes that take it apart
        elif (source := passed_through(node, block)) is not None:
            names[node] = names[source]
            if keep_dropout and not _is_identity(node, block):
                names[node] = f"{index}.{node.name}"
                operations.append(
                    NodeOp(names[node], (node,), (names[source],), True, False, dict(names), True)
                )
        else:
            names[node] = f"{index}.{node.name}"
            operations.append(_operation(node, block, dict(names), watch, node not in heads))
            for overwritten in watch.overwritten.get(node, ()):
                # Whoever reads the input after this node sees what the node wrote into it.
                old = names[overwritten]
                for other in [n for n, name in names.items() if name == old]:
                    names[other] = names[node]
        if node in watch.shapes:
            shapes.setdefault(names[node], watch.shapes[node])
    fused = _fuse(operations, shapes, set(_leaves(outputs)), block)
    return LoweredBlock(
        operations=tuple(fused),
        descriptions=tuple(_describe(op, block) for op in fused),
        inputs=inputs,
        outputs=outputs,
        shapes=shapes,
        non_negative=frozenset(_non_negative(fused, block, set(positive))),
        sites=_sites(fused, shapes, outputs),
        channels_last=seen.channels_last,
        whole=seen.whole,
    )


def _leaves(structure: Any) -> list[str]:
    """The names of the values in what a block returns."""
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, ValueName)]


def _kind(node: fx.Node, block: nn.Module) -> Any:
    """The function, method name or module class that a node calls."""
    if node.op == "call_module":
        return type(block.get_submodule(str(node.target)))
    return node.target if node.op in {"call_function", "call_method"} else None


def passed_through(node: fx.Node, block: nn.Module) -> fx.Node | None:
    """The input of a node that, frozen, hands its input on: dropout and identity."""
    kind = _kind(node, block)
    is_module = isinstance(kind, type) and issubclass(kind, _DropoutNd | nn.Identity)
    is_function = node.op == "call_function" and kind in _DROPOUTS
    return node.all_input_nodes[0] if is_module or is_function else None


def _is_identity(node: fx.Node, block: nn.Module) -> bool:
    """Whether it hands its input on even when trained."""
    if node.op == "call_module":
        module = block.get_submodule(str(node.target))
        return not (isinstance(module, _DropoutNd) and bool(module.p))
    given = dict(zip(("input", "p"), node.args, strict=False)) | node.kwargs
    return bool(given.get("p") == 0)


def _operation(
    node: fx.Node, block: nn.Module, names: dict[fx.Node, str], watch: _Watch, quantized: bool
) -> Operation:
    kind, name, shapes = _kind(node, block), names[node], watch.shapes
    nodes = (*_makers(node, watch.bundles), node)
    sources = [n for inner in nodes for n in inner.all_input_nodes if n not in nodes]
    inputs = tuple(names[n] for n in dict.fromkeys(sources))
    if node.op == "call_module" and quantized:
        module, target = block.get_submodule(str(node.target)), str(node.target)
        rank = len(shapes.get(node, ()))
        if is_plain(module, nn.Linear) and rank > 1:
            return MapOp(name, inputs[0], layer=target)
        if is_plain(module, nn.Conv2d) and rank == 4 and _convertible(module):
            return MapOp(name, inputs[0], layer=target)
        if is_plain(module, nn.BatchNorm2d) and module.running_mean is not None:
            return MapOp(name, inputs[0], layer=None, norm=target)
    if (activation := _RELUS.get(kind)) is not None:
        return ActOp(name, inputs[0], activation)
    if kind in _CONCATENATIONS and set(node.all_input_nodes) <= set(shapes):
        parts, dim = _parts_and_dim(node)
        if len(shapes[node]) == 4 and isinstance(parts, list | tuple) and isinstance(dim, int):
            return CatOp(name, tuple(names[part] for part in parts), dim)
    layout = all(_only_moves(inner, block) for inner in nodes)
    overwrites = any(inner in watch.overwritten for inner in nodes)
    return NodeOp(name, nodes, inputs, layout and not overwrites, overwrites, names)


def _parts_and_dim(node: fx.Node) -> tuple[Any, Any]:
    """The arguments of ``torch.cat``, wherever they were given."""
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    return given["tensors"], given.get("dim", given.get("axis", 0))


def _makers(node: fx.Node, bundles: Container[fx.Node]) -> list[fx.Node]:
    """The nodes whose tuples and the like ``node`` takes apart: they run as part of it."""
    makers: list[fx.Node] = []
    for source in node.all_input_nodes:
        if source in bundles:
            makers += [*_makers(source, bundles), source]
    return list(dict.fromkeys(makers))


def _only_moves(node: fx.Node, block: nn.Module) -> bool:
    kind = _kind(node, block)
    return (
        kind in _LAYOUTS
        and not (kind is getattr and node.args[1] != "shape")
        and not any(isinstance(value, torch.dtype) for value in node.args)  # view(torch.int32)
    )


def _convertible(layer: nn.Module) -> bool:
    """Whether a convolution is a plain one whose gradient is a convolution again."""
    assert isinstance(layer, nn.Conv2d)
    strided, dilated = set(layer.stride) != {1}, set(layer.dilation) != {1}
    return (
        layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and not (strided and dilated)
    )


def _fuse(
    operations: list[Operation],
    shapes: dict[str, tuple[int, ...]],
    outputs: set[str],
    block: nn.Module,
) -> list[Operation]:
    """Let each layer take in the BatchNorm, the addition and the ReLU that follow it."""
    users = Counter(name for op in operations for name in op.inputs)
    users.update(outputs)
    made: dict[str, Operation] = {}

    def only_feeds(name: str) -> MapOp | None:
        """The map that made this value for one reader, if it has no ReLU yet."""
        maker = made.get(name)
        if isinstance(maker, MapOp) and users[name] == 1 and maker.activation is None:
            return maker
        return None

    for op in operations:
        fused: Operation = op
        if isinstance(op, MapOp) and op.layer is None and (maker := only_feeds(op.x)):
            if _is_convolution(maker, block) and maker.norm is None and maker.addend is None:
                fused = replace(maker, name=op.name, norm=op.norm)
                del made[maker.name]
        elif isinstance(op, ActOp) and (maker := only_feeds(op.x)):
            fused = replace(maker, name=op.name, activation=op.activation)
            del made[maker.name]
        elif isinstance(op, NodeOp) and is_sum_of_maps(op, shapes):
            for mine, other in (op.inputs[::-1], op.inputs):
                maker = only_feeds(mine)
                if maker and maker.addend is None and _is_convolution(maker, block):
                    fused = replace(maker, name=op.name, addend=other)
                    del made[maker.name]
                    break
        made[op.name] = fused
    return list(made.values())


def is_sum_of_maps(op: NodeOp, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether this adds two different feature maps of one shape, without any factor."""
    return (
        op.nodes[-1].target in _ADDITIONS
        and not {"alpha", "out"} & op.nodes[-1].kwargs.keys()
        and len(set(op.inputs)) == 2
        and len({shapes.get(name) for name in (*op.inputs, op.name)}) == 1
    )


def _is_convolution(op: MapOp, block: nn.Module) -> bool:
    return op.layer is not None and isinstance(block.get_submodule(op.layer), nn.Conv2d)


def _non_negative(
    operations: Iterable[Operation], block: nn.Module, known: set[str]
) -> Iterator[str]:
    for op in operations:
        if isinstance(op, MapOp):
            positive = op.activation is not None
        elif isinstance(op, ActOp):
            positive = True
        elif isinstance(op, CatOp):
            positive = known.issuperset(op.inputs)
        else:
            kind = _kind(op.nodes[-1], block)
            kept = op.layout or kind in _KEEP_SIGN
            positive = kind in _NON_NEGATIVE or (kept and known.issuperset(op.inputs[:1]))
        if positive:
            known.add(op.name)
            yield op.name


def _sites(
    operations: Iterable[Operation], shapes: dict[str, tuple[int, ...]], outputs: Any
) -> tuple[str, ...]:
    """Every value of this block that may be held in codes, wherever the span begins and ends."""
    operations = list(operations)
    read_as_codes = {n for op in operations if isinstance(op, MapOp | CatOp) for n in op.inputs}
    own = [op for op in operations if op.name in shapes]
    ends = set(_leaves(outputs))
    return tuple(
        op.name
        for op in own
        if not isinstance(op, NodeOp) or op.name in read_as_codes or op.name in ends
    )


def _describe(op: Operation, block: nn.Module) -> str:
    """What an operation does, for a person to read."""
    if isinstance(op, MapOp):
        layer = "affine" if op.layer is None else _layer_name(block.get_submodule(op.layer))
        norm = " + norm" if op.layer and op.norm else ""
        add = " + add" if op.addend else ""
        return layer + norm + add + _activation_name(op)
    if isinstance(op, ActOp):
        return _activation_name(op).removeprefix(" + ")
    if isinstance(op, CatOp):
        return "concatenate"
    node = op.nodes[-1]
    if node.op == "call_module":
        return type(block.get_submodule(str(node.target))).__name__
    return getattr(node.target, "__name__", str(node.target))


def _layer_name(layer: nn.Module) -> str:
    if isinstance(layer, nn.Conv2d):
        size = "×".join(map(str, layer.kernel_size))
        kind = "depthwise" if layer.groups == layer.in_channels > 1 else "conv"
        return f"{kind} {size} {layer.in_channels}→{layer.out_channels}"
    assert isinstance(layer, nn.Linear)
    return f"linear {layer.in_features}→{layer.out_features}"


def _activation_name(op: MapOp | ActOp) -> str:
    if op.activation is None:
        return ""
    return " + relu" if op.activation.upper is None else f" + relu{op.activation.upper:g}"
