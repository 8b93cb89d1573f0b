"""From a block's graph to operations that have an int8 form, and float operations for the rest.

One dispatch says what each node of a block's graph *is*. Convolutions and linear layers take in
the BatchNorm, the addition and the ReLU that follow them. What has no int8 form stays in float:
nothing is ever replaced by something that computes something else.

The result depends on the graph and on shapes, not on weights or on the span, so a chain is
lowered once and serves every span of every round.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from cocofl.chain import BlockChain
from cocofl.chain.graphs import left_as_it_was
from cocofl.errors import CannotLower
from cocofl.freeze.adapters import adapter
from cocofl.freeze.kernels import Geometry
from cocofl.freeze.layers import LAYERS, TransposedProduct, is_plain
from cocofl.freeze.operations import (
    Activation,
    ActOp,
    CatOp,
    LoweredBlock,
    MapOp,
    NodeOp,
    Operation,
    ValueName,
)
from cocofl.freeze.scheme import named_values
from cocofl.freeze.traced_blocks import SeenBlock, Watch, called_module, mapped, seen_on

_TRANSPOSED = TransposedProduct()
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_CONCATENATIONS = {torch.cat, torch.concat}
_DROPOUTS = {F.dropout, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_RELUS: dict[Any, Activation] = {
    **dict.fromkeys([nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_], Activation()),
    **dict.fromkeys(["relu", "relu_"], Activation()),
    **dict.fromkeys([nn.ReLU6, F.relu6], Activation(6.0)),
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
    with left_as_it_was(chain, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        return tuple(_lower_chain(chain, keep_dropout))


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
        seen = seen_on(index, block, [env[name] for name in wiring.inputs])
        later = {name for other in chain.wiring[index + 1 :] for name in other.inputs}
        for name, x in zip(wiring.inputs, seen.arguments, strict=True):
            if isinstance(x, Tensor) and x._version and name in later:
                raise CannotLower(
                    f"block {index} overwrites its input {name!r}, which a later block reads too; "
                    "let it work on a clone"
                )
        inputs = tuple(where[name] for name in wiring.inputs)
        heads = _heads(seen) if index == len(chain) - 1 else frozenset[fx.Node]()
        lowered = _lower_block(index, seen, inputs, heads, positive, keep_dropout)
        positive |= lowered.non_negative
        yield lowered
        env |= wiring.handed_on(seen.result)
        handed_on = wiring.handed_on(lowered.outputs)
        for name, value in handed_on.items():
            if not isinstance(value, str) and index < len(chain) - 1:
                raise CannotLower(
                    f"block {index} hands on {name!r}, a {type(value).__name__}, as one value; "
                    "give each of its tensors a name in the wiring"
                )
        where |= handed_on


def _heads(seen: SeenBlock) -> frozenset[fx.Node]:
    """The classifiers: linear layers that no other layer follows. They are never quantized."""
    called = {node: called_module(node, seen.block) for node in seen.graph.nodes}
    followed: set[fx.Node] = set()
    for node in reversed(seen.graph.nodes):
        if any(user in followed or is_plain(called[user], *LAYERS) for user in node.users):
            followed.add(node)
    return frozenset(n for n in called if is_plain(called[n], nn.Linear) and n not in followed)


def _lower_block(
    index: int,
    seen: SeenBlock,
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
    drops = False
    arriving = iter(inputs)
    for node in seen.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(arriving)
        elif node.op == "output":
            outputs = mapped(node.args[0], lambda n: ValueName(names[n]))
            break
        elif node in watch.bundles:
            continue  # runs as part of the nodes that take it apart
        elif (source := passed_through(node, block)) is not None:
            names[node] = names[source]
            p = _drop_probability(node, block)
            drops |= bool(p)
            if keep_dropout and p:
                names[node] = name = f"{index}.{node.name}"
                own = NodeOp(name, (node,), (names[source],), True, False, dict(names), drops=p)
                operations.append(own)
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
    fused = _fuse(operations, shapes, named_values(outputs), block)
    fused = _concatenations(fused, shapes, named_values(outputs))
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
        returns=seen.returns,
        drops=drops,
    )


def _kind(node: fx.Node, block: nn.Module) -> Any:
    """The function, method name or module class that a node calls."""
    if (module := called_module(node, block)) is not None:
        return type(module)
    return node.target if node.op in {"call_function", "call_method"} else None


def arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """What a function is called with, wherever it was given."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def passed_through(node: fx.Node, block: nn.Module) -> fx.Node | None:
    """The input of a node that, frozen, hands its input on: dropout and identity."""
    kind = _kind(node, block)
    is_module = isinstance(kind, type) and issubclass(kind, _DropoutNd | nn.Identity)
    is_function = node.op == "call_function" and kind in _DROPOUTS
    # A layer that is switched off may be called with None.
    return next(iter(node.all_input_nodes), None) if is_module or is_function else None


def _drop_probability(node: fx.Node, block: nn.Module) -> Any:
    """How likely a node that hands its input on when frozen drops elements when trained."""
    if (module := called_module(node, block)) is not None:
        return module.p if isinstance(module, _DropoutNd) else 0.0
    return arguments(node, "input", "p").get("p", 0.5)


def _operation(
    node: fx.Node, block: nn.Module, names: dict[fx.Node, str], watch: Watch, quantized: bool
) -> Operation:
    kind, name, shapes = _kind(node, block), names[node], watch.shapes
    nodes = (*_makers(node, watch.bundles), node)
    sources = [n for inner in nodes for n in inner.all_input_nodes if n not in nodes]
    inputs = tuple(names[n] for n in dict.fromkeys(sources))
    if node.op == "call_module" and quantized and inputs:
        own = _as_map(name, inputs[0], node, block, shapes.get(node, ()))
        if own is not None:
            return own
    if (activation := _RELUS.get(kind)) is not None:
        return ActOp(name, inputs[0], activation)
    layout = all(_only_moves(inner, block) for inner in nodes)
    overwrites = any(inner in watch.overwritten for inner in nodes)
    return NodeOp(name, nodes, inputs, layout and not overwrites, overwrites, names)


def _as_map(
    name: str, x: str, node: fx.Node, block: nn.Module, shape: tuple[int, ...]
) -> MapOp | None:
    """A layer that is a linear map, or a BatchNorm of images, which is one of each channel."""
    layer, path = block.get_submodule(str(node.target)), str(node.target)
    for kind, linear in LAYERS.items():
        if is_plain(layer, kind) and linear.accepts(layer, shape):
            return MapOp(name, x, path, linear, linear.geometry(layer))
    if _TRANSPOSED.accepts(layer, shape):
        return MapOp(name, x, path, _TRANSPOSED, None)
    if is_plain(layer, nn.BatchNorm2d) and layer.running_mean is not None:
        return MapOp(name, x, None, None, Geometry(groups=shape[1]), norm=path)
    return None


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


def _fuse(
    operations: list[Operation],
    shapes: dict[str, tuple[int, ...]],
    outputs: Iterable[str],
    block: nn.Module,
) -> list[Operation]:
    """Let each layer take in the BatchNorm, the addition and the ReLU that follow it."""
    users = Counter([*outputs, *(name for op in operations for name in op.inputs)])
    made: dict[str, Operation] = {}

    def only_feeds(name: str) -> MapOp | None:
        """The map that made this value for one reader, if it has no ReLU yet."""
        maker = made.get(name)
        if isinstance(maker, MapOp) and users[name] == 1 and maker.activation is None:
            return maker
        return None

    for op in operations:
        fused: Operation = op
        if (norm := _norm(op, block)) and (maker := only_feeds(op.inputs[0])):
            kinds = () if maker.kind is None else maker.kind.norms
            if is_plain(block.get_submodule(norm), *kinds) and not (maker.norm or maker.addend):
                fused = replace(maker, name=op.name, norm=norm)
                del made[maker.name]
        elif isinstance(op, ActOp) and (maker := only_feeds(op.x)):
            fused = replace(maker, name=op.name, activation=op.activation)
            del made[maker.name]
        elif isinstance(op, NodeOp) and is_sum_of_maps(op, shapes):
            for mine, other in (op.inputs[::-1], op.inputs):
                maker = only_feeds(mine)
                if maker and maker.addend is None and maker.kind and maker.geometry:
                    fused = replace(maker, name=op.name, addend=other)
                    del made[maker.name]
                    break
        made[op.name] = fused
    return list(made.values())


def _concatenations(
    operations: Sequence[Operation],
    shapes: Mapping[str, tuple[int, ...]],
    outputs: Iterable[str],
) -> list[Operation]:
    """Concatenate codes: what maps read, or what they have made for the next block.

    All else is concatenated in float: scores of attention and masks, which may be infinite, or
    the halves that positions rotate.
    """
    made_by_maps = set[str]()
    for op in operations:
        moves = isinstance(op, ActOp) or _moves_or_concatenates(op)
        if isinstance(op, MapOp) or (moves and not made_by_maps.isdisjoint(op.inputs)):
            made_by_maps.add(op.name)
    read, found = made_by_maps.intersection(outputs), list[Operation]()
    for op in reversed(operations):
        own = op
        if op.name in read and isinstance(op, NodeOp):
            own = _concatenation(op, shapes) or op
        if isinstance(own, MapOp | CatOp):
            read.update(own.inputs)
        elif op.name in read and (isinstance(own, ActOp) or own.layout):
            read.update(own.inputs[:1])
        found.append(own)
    return found[::-1]


def _moves_or_concatenates(op: Operation) -> bool:
    return isinstance(op, NodeOp) and (op.layout or op.nodes[-1].target in _CONCATENATIONS)


def _concatenation(op: NodeOp, shapes: Mapping[str, tuple[int, ...]]) -> CatOp | None:
    """The same of images, if that is what it is."""
    (*makers, node) = op.nodes
    are_images = len(shapes.get(op.name, ())) == 4 and shapes.keys() >= set(op.inputs)
    if makers or not are_images or node.target not in _CONCATENATIONS:
        return None
    given = arguments(node, "tensors", "dim")
    parts, dim = given["tensors"], given.get("dim", given.get("axis", 0))
    if not (isinstance(parts, list | tuple) and isinstance(dim, int)):
        return None
    return CatOp(op.name, tuple(op.names[part] for part in parts), dim)


def _norm(op: Operation, block: nn.Module) -> str | None:
    """Where its module is, if this is a BatchNorm with statistics and no more."""
    if isinstance(op, MapOp):
        return op.norm if op.kind is None else None
    if not isinstance(op, NodeOp) or len(op.nodes) > 1:
        return None
    module = called_module(op.nodes[0], block)
    tracks = isinstance(module, _BatchNorm) and module.running_mean is not None
    return str(op.nodes[0].target) if tracks else None


def is_sum_of_maps(op: NodeOp, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether this adds two different feature maps of one shape, without any factor."""
    return (
        op.nodes[-1].target in _ADDITIONS
        and not {"alpha", "out"} & op.nodes[-1].kwargs.keys()
        and len(set(op.inputs)) == 2
        and len({shapes.get(name) for name in (*op.inputs, op.name)}) == 1
    )


def _non_negative(
    operations: Iterable[Operation], block: nn.Module, known: set[str]
) -> Iterator[str]:
    for op in operations:
        if isinstance(op, MapOp | ActOp):
            positive = op.activation is not None
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
    operations: Sequence[Operation], shapes: dict[str, tuple[int, ...]], outputs: Any
) -> tuple[str, ...]:
    """Every value of this block that may be held in codes, wherever the span begins and ends."""
    coded = {name for op in operations if isinstance(op, MapOp | CatOp) for name in op.inputs}
    coded |= {op.name for op in operations if not isinstance(op, NodeOp)}
    coded.update(named_values(outputs))
    return tuple(op.name for op in operations if op.name in shapes and op.name in coded)


def _describe(op: Operation, block: nn.Module) -> str:
    """What an operation does, for a person to read."""
    if isinstance(op, MapOp):
        layer = "affine"
        if op.kind is not None and op.layer is not None:
            layer = op.kind.describe(block.get_submodule(op.layer))
        activation = op.activation and str(op.activation)
        parts = (layer, op.layer and op.norm and "norm", op.addend and "add", activation)
        return " + ".join(part for part in parts if part)
    if isinstance(op, ActOp):
        return str(op.activation)
    if isinstance(op, CatOp):
        return "concatenate"
    # Of a layer that returns several values, not that one of them is taken.
    telling = next((node for node in op.nodes if node.op == "call_module"), op.nodes[-1])
    kind = _kind(telling, block) or telling.target
    if kind is adapter:
        down: Any = telling.args[2]
        return f"adapter of rank {len(attrgetter(down.target)(block))}"
    return getattr(kind, "__name__", str(kind))
