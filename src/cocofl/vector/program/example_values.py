"""One run of a chain on its example, operation by operation, to see what each one does.

How an operation without a batched form of its own may run for many devices (as one large batch,
through ``vmap``, or device by device) is tried out here on real values, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from cocofl.chain import BlockChain
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, MapOp, NodeOp, Operation

_SAMPLES = 3


def values_on_example(
    chain: BlockChain, lowered: tuple[LoweredBlock, ...], graphs: list[fx.GraphModule]
) -> dict[str, Any]:
    """Every value of the chain in evaluation mode, for a few samples of its example."""
    assert chain.example is not None
    first = chain.example[0]
    few = tuple(x[:_SAMPLES] if len(x) == len(first) else x for x in chain.example)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return _run(few, lowered, graphs)
        except RuntimeError:  # a size that is written into the model
            return _run(chain.example, lowered, graphs)


def _run(
    inputs: tuple[Any, ...], lowered: tuple[LoweredBlock, ...], graphs: list[fx.GraphModule]
) -> dict[str, Any]:
    env: dict[str, Any] = dict(zip(lowered[0].inputs, inputs, strict=True))
    for low, graph in zip(lowered, graphs, strict=True):
        for op in low.operations:
            env[op.name] = _result(op, graph, env)
    return env


def _result(op: Operation, graph: fx.GraphModule, env: dict[str, Any]) -> Any:
    if isinstance(op, MapOp):
        y = env[op.x]
        for path in (op.layer, op.norm):
            y = y if path is None else graph.get_submodule(path)(y)
        y = y if op.addend is None else y + env[op.addend]
        return y if op.activation is None else op.activation(y)
    if isinstance(op, ActOp):
        return op.activation(env[op.x])
    if isinstance(op, CatOp):
        return torch.cat([env[name] for name in op.inputs], op.dim)
    if op.drops:
        return env[op.inputs[0]]
    return call_nodes(
        op,
        lambda name: _copy(env[name]),
        lambda node: node.target != "training" and attribute_of(graph, str(node.target)),
        lambda node, args, kwargs: graph.get_submodule(str(node.target))(*args, **kwargs),
    )


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def call_nodes(
    op: NodeOp,
    read: Callable[[str], Any],
    attribute: Callable[[fx.Node], Any],
    call: Callable[[fx.Node, Any, Any], Any],
) -> Any:
    """StepContext an operation's nodes, given how to get attributes and how to call modules."""
    made: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return made[node] if node in made else read(op.names[node])

    for node in op.nodes:
        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        if node.op == "call_module":
            made[node] = call(node, args, kwargs)
        elif node.op == "call_method":
            # A view of channels-last images may not exist; nobody writes through it here.
            method = "reshape" if node.target == "view" else str(node.target)
            made[node] = getattr(args[0], method)(*args[1:], **kwargs)
        elif node.op == "get_attr":
            made[node] = attribute(node)
        else:
            assert callable(node.target)
            made[node] = node.target(*args, **kwargs)
    return made[op.nodes[-1]]


def attribute_of(root: nn.Module, path: str) -> Any:
    """What lies at a dotted path."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
