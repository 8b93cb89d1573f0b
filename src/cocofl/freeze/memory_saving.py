"""Trained blocks with less memory traffic: the same numbers, a few tensors fewer.

A ReLU may overwrite the output of a layer, norm or sum that only it reads, since none of these
needs its own output for its gradient. One that only a max pooling reads changes places with it:
the largest of values cut off at zero is the largest value, cut off at zero, and there are fewer
of them. And the gradients of a global average and of flattening, which PyTorch hands back with
their channels first, are made channels last, like everything they meet.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cocofl.chain import GraphBlock

_RELUS = {nn.ReLU, F.relu, torch.relu, "relu"}
_SUMS = {operator.add, torch.add}


def memory_saving(block: nn.Module) -> nn.Module:
    """The block, sharing its modules and keys, rewritten where that saves memory."""
    if not isinstance(block, GraphBlock):
        return block
    graph = fx.Graph()
    graph.output(graph.graph_copy(block.graph, val_map={}))
    _pool_before_relu(graph, block)
    for node in graph.nodes:
        if node.op not in {"call_module", "call_function", "call_method"}:
            continue
        module = block.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind = node.target if module is None else type(module)
        if kind in _RELUS and _may_be_overwritten(node.all_input_nodes[0], block):
            _replace(node, F.relu, inplace=True)
        elif isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1), [1, 1]):
            _replace(node, global_average)
        elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            _replace(node, flattened)
    return GraphBlock(block, graph, block.unsaved)


def _pool_before_relu(graph: fx.Graph, block: nn.Module) -> None:
    for relu in [node for node in graph.nodes if node.op == "call_module"]:
        (pool,) = relu.users if len(relu.users) == 1 else (None,)
        if (
            type(block.get_submodule(str(relu.target))) is nn.ReLU
            and pool is not None
            and pool.op == "call_module"
            and _is_plain_pool(block.get_submodule(str(pool.target)))
        ):
            pool.replace_all_uses_with(relu)
            pool.replace_input_with(relu, relu.all_input_nodes[0])
            relu.replace_input_with(relu.all_input_nodes[0], pool)
            pool.append(relu)


def _is_plain_pool(module: nn.Module) -> bool:
    return type(module) is nn.MaxPool2d and not module.return_indices


def _replace(node: fx.Node, function: Any, **kwargs: Any) -> None:
    """Let a node call another function; its name, by which scales are kept, stays."""
    node.op, node.target = "call_function", function
    node.args, node.kwargs = (node.all_input_nodes[0],), kwargs


def _may_be_overwritten(node: fx.Node, block: nn.Module) -> bool:
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        layer = block.get_submodule(str(node.target))
        kinds = nn.Conv2d | nn.Linear | _BatchNorm | nn.GroupNorm | nn.MaxPool2d
        return isinstance(layer, kinds)
    return node.op == "call_function" and node.target in _SUMS


def global_average(x: Tensor) -> Tensor:
    """``nn.AdaptiveAvgPool2d(1)``."""
    result: Tensor = _GlobalAverage.apply(x)  # type: ignore[no-untyped-call]
    return result


class _GlobalAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return F.adaptive_avg_pool2d(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        height, width = ctx.shape[-2:]
        spread: Tensor = (gradient / (height * width)).expand(ctx.shape)
        return _channels_last(spread)


def flattened(x: Tensor) -> Tensor:
    """``nn.Flatten()``."""
    result: Tensor = _Flattened.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Flattened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _channels_last(gradient.reshape(ctx.shape))


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(
        memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format
    )
