"""Trained blocks with less memory traffic: the same numbers, a few tensors fewer.

A ReLU may overwrite the output of a layer, norm or sum that only it reads, since none of these
needs its own output for its gradient. And the gradient of a global average, which PyTorch hands
back with its channels first, is made channels last, like everything it meets.
"""

from __future__ import annotations

import operator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cocofl.chain import BlockChain, GraphBlock

_RELUS = {nn.ReLU, F.relu, torch.relu, "relu"}
_SUMS = {operator.add, torch.add}
_REWRITTEN: WeakKeyDictionary[BlockChain, tuple[nn.Module, ...]] = WeakKeyDictionary()


def lean_blocks(chain: BlockChain) -> tuple[nn.Module, ...]:
    """The chain's blocks, sharing its modules and keys, rewritten where that saves memory."""
    if chain not in _REWRITTEN:
        _REWRITTEN[chain] = tuple(_lean(block) for block in chain.blocks)
    return _REWRITTEN[chain]


def _lean(block: nn.Module) -> nn.Module:
    if not isinstance(block, GraphBlock):
        return block
    graph = fx.Graph()
    graph.output(graph.graph_copy(block.graph, val_map={}))
    for node in graph.nodes:
        if node.op not in {"call_module", "call_function", "call_method"}:
            continue
        module = block.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind = node.target if module is None else type(module)
        if kind in _RELUS and _may_be_overwritten(node.all_input_nodes[0], block):
            _replace(node, F.relu, inplace=True)
        elif isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1), [1, 1]):
            _replace(node, global_average)
    return GraphBlock(block, graph, block.unsaved)


def _replace(node: fx.Node, function: Any, **kwargs: Any) -> None:
    """Let a node call another function; its name, by which scales are kept, stays."""
    node.op, node.target = "call_function", function
    node.args, node.kwargs = (node.all_input_nodes[0],), kwargs


def _may_be_overwritten(node: fx.Node, block: nn.Module) -> bool:
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        layer = block.get_submodule(str(node.target))
        return isinstance(layer, nn.Conv2d | nn.Linear | _BatchNorm | nn.GroupNorm)
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
        images = torch.channels_last if spread.ndim == 4 else torch.contiguous_format
        return spread.contiguous(memory_format=images)
