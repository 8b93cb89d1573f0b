"""``adapt``: from a chain to one whose linear maps carry low-rank adapters.

A block stays the graph that it is. Behind each map stands one more node, which has the map's name
and adds what the adapter says; so scales that were measured in one of the two chains are those of
the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from cocofl.chain import BlockChain, GraphBlock
from cocofl.errors import InvalidSetting
from cocofl.freeze.adapters import ALPHA, PREFIX, RANK, AdaptedChain, Adapter, LowRank, adapter
from cocofl.freeze.kernels import Geometry
from cocofl.freeze.layers import LinearLayer, is_plain
from cocofl.freeze.network import Network
from cocofl.freeze.operations import LoweredBlock, MapOp, NodeOp
from cocofl.freeze.traced_blocks import called_module

Maps = dict[str, MapOp]


def adapt(chain: BlockChain, rank: int = RANK, alpha: float = ALPHA) -> AdaptedChain:
    """The chain with an adapter at each linear layer, and each convolution without groups.

    Where such a block is trained, its adapters learn and nothing else: no weight, bias or norm.
    One layer is an exception, the head: a linear layer that no other follows learns as it is, since
    it may be new. Not adapted, and not learned, is a weight that two layers share (a tied head).
    The chain is left as it was, and shares its tensors.

    >>> from cocofl import Span, freeze, split
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> chain = adapt(split(model, torch.ones(1, 4)), rank=2)
    >>> sorted(freeze(chain, Span(0, 2), backend="reference").update().tensors)
    ['2.bias', '2.weight', 'lora.0.down', 'lora.0.up']
    """
    low_rank, network, owners = LowRank(rank, alpha), Network.of(chain), _owners(chain)
    if taken := next((key for key in chain.state_dict() if key.startswith(PREFIX)), None):
        raise InvalidSetting(f"the model has a tensor {taken!r}, where adapters go; rename it")
    blocks, adapters, learned = list[nn.Module](), list[Adapter](), list[list[str]]()
    for index, (block, low) in enumerate(zip(chain.blocks, network.lowered.blocks, strict=True)):
        traced = low.graph(block)
        maps = _maps(low, traced, owners)
        heads = _heads(low, traced, owners) if index == len(chain) - 1 else {}
        own = [_adapter(index, path, op, traced, rank) for path, op in maps.items()]
        adapters += own
        learned.append([key for one in own for key in (one.down, one.up)])
        learned[-1] += [key for keys in heads.values() for key in keys]
        changed = _adapted_block(traced, maps, heads, own, low_rank) if learned[-1] else block
        blocks.append(changed)
    if not adapters:
        raise InvalidSetting(
            "this network has no linear map that could carry a low-rank adapter: no linear layer "
            'but the head, and no convolution without groups; train = "blocks" trains it'
        )
    found = AdaptedChain(chain, blocks, adapters, learned, low_rank)
    found.load_state_dict(found.fresh_adapters(0), strict=False)
    return found


def _owners(chain: BlockChain) -> dict[int, int]:
    """By tensor, how many modules have it."""
    counts: dict[int, int] = {}
    for module in chain.modules():
        for own in module._parameters.values():
            counts[id(own)] = counts.get(id(own), 0) + 1
    return counts


def _maps(low: LoweredBlock, traced: fx.GraphModule, owners: Mapping[int, int]) -> Maps:
    """The layers of a block that get an adapter, by path."""
    found: Maps = {}
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    maps = [op for op in low.operations if isinstance(op, MapOp) and op.layer is not None]
    for op in maps:
        path = str(op.layer)
        every_call = calls.count(path) == sum(other.layer == path for other in maps)
        weight = traced.get_submodule(path)._parameters["weight"]
        grouped = op.geometry is not None and op.geometry.groups > 1
        known = op.kind is not None and _undone(op.kind, traced.get_submodule(path))
        if every_call and known and not grouped and owners[id(weight)] == 1:
            found[path] = op
    return found


def _undone(kind: LinearLayer, layer: Any) -> bool:
    """Whether a change of the weight, as maps have it, can be told as the layer has it."""
    weight = kind.weight_of(layer)
    return 2 <= weight.ndim <= 4 and kind.own_weight(weight).shape == layer.weight.shape


def _heads(
    low: LoweredBlock, traced: fx.GraphModule, owners: Mapping[int, int]
) -> dict[str, list[str]]:
    """The keys of linear layers that no other layer follows: those that are never quantized."""
    nodes = [op.nodes[-1] for op in low.operations if isinstance(op, NodeOp)]
    called = {str(node.target): called_module(node, traced) for node in nodes}
    return {
        path: [f"{path}.{name}" for name, _ in layer.named_parameters()]
        for path, layer in called.items()
        if layer is not None
        and low.whole is None
        and is_plain(layer, nn.Linear)
        and all(owners[id(p)] == 1 for p in layer.parameters())
    }


def _adapter(index: int, path: str, op: MapOp, traced: fx.GraphModule, rank: int) -> Adapter:
    assert op.kind is not None
    layer: Any = traced.get_submodule(path)
    shape = tuple(op.kind.weight_of(layer).shape)
    most = min(shape[0], layer.weight.numel() // shape[0])
    if rank > most:
        raise InvalidSetting(
            f"the rank is {rank}, but {path!r} ({op.kind.describe(layer)}) has a rank of at most "
            f"{most} by itself; take a smaller one"
        )
    return Adapter(index, path, op.kind, (rank, *shape[1:]), (shape[0], rank))


def _adapted_block(
    traced: fx.GraphModule,
    maps: Maps,
    heads: Mapping[str, list[str]],
    adapters: list[Adapter],
    low_rank: LowRank,
) -> GraphBlock:
    """The block with a node behind each map, and all that learns read by a node of its own."""
    graph = copy.deepcopy(traced.graph)
    by_path = {one.layer: one for one in adapters}
    for path, calls in _calls(graph).items():
        if path in maps:
            one = by_path[path]
            factors = _read(graph, calls[0], [one.down, one.up])
            how = (*factors, low_rank.factor, *_geometry(maps[path].geometry, len(one.down_shape)))
            for node in calls:
                _add_adapter(graph, node, how)
        elif path in heads:
            read = _read(graph, calls[0], heads[path])
            for node in calls:
                node.args, node.kwargs = (_input(node), *read), {}
                node.op, node.target = "call_function", F.linear
    like = next(p for p in traced.parameters() if p.is_floating_point())
    values: dict[str, Any] = {
        key: nn.Parameter(torch.zeros(shape, dtype=like.dtype))
        for one in adapters
        for key, shape in ((one.down, one.down_shape), (one.up, one.up_shape))
    }
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr") and node.target not in values:
            values[str(node.target)] = attrgetter(str(node.target))(traced)
    block = GraphBlock(values, graph, traced.unsaved if isinstance(traced, GraphBlock) else ())
    block.training = traced.training
    return block


def _calls(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The calls of each layer, in order."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            found.setdefault(str(node.target), []).append(node)
    return found


def _read(graph: fx.Graph, before: fx.Node, keys: list[str]) -> list[fx.Node]:
    with graph.inserting_before(before):
        return [graph.create_node("get_attr", key) for key in keys]


def _input(node: fx.Node) -> fx.Node:
    (x,) = node.all_input_nodes
    return x


def _add_adapter(graph: fx.Graph, node: fx.Node, how: tuple[Any, ...]) -> None:
    """Let a node add the adapter to what its layer, now called before it, returns."""
    with graph.inserting_before(node):
        name = f"{node.name}_map"
        base = graph.create_node("call_module", node.target, node.args, node.kwargs, name=name)
    node.args, node.kwargs = (base, _input(node), *how), {}
    node.op, node.target = "call_function", adapter


def _geometry(geometry: Geometry | None, axes: int) -> Iterator[tuple[int, ...]]:
    """Stride, padding and dilation along the axes that a convolution of these weights walks."""
    if geometry is not None:
        walked = axes - 2
        for pair in (geometry.stride, geometry.padding, geometry.dilation):
            yield tuple(pair)[-walked:]
