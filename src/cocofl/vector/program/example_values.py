"""One run of a chain on its example, operation by operation, to see what each one does.

How an operation without a batched form of its own may run for many devices (as one large batch,
through ``vmap``, or device by device) is tried out here on real values, never guessed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from cocofl.chain import BlockChain
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, MapOp, Operation, node_function

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
    return op.run(lambda name: _copy(env[name]), partial(node_function, root=graph))


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
