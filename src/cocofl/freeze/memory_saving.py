"""Trained blocks with less memory traffic: the same numbers, a few tensors fewer.

A ReLU may overwrite the output of a layer, norm or sum that only it reads, since none of these
needs its own output for its gradient; and its gradient, where that has just been made by a layer or
norm which alone reads the ReLU. One that only a max pooling reads changes places with it: the
largest of values cut off at zero is the largest value, cut off at zero, and there are fewer of
them. And the gradients of a global average and of flattening, which PyTorch hands back with their
channels first, are made channels last, like everything they meet.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cocofl.chain import GraphBlock
from cocofl.freeze.layers import is_plain
from cocofl.freeze.layout import channels_last
from cocofl.freeze.traced_blocks import called_module

_RELUS = {nn.ReLU, F.relu, torch.relu, "relu"}
_SUMS = {operator.add, torch.add}
_GIVE_NEW_GRADIENTS = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm)
"""What they hand back is a tensor of their own, which nobody else reads."""
_WORTHWHILE = 2**16
"""From how many numbers on less memory traffic is worth a call from autograd to Python."""


def memory_saving(block: nn.Module) -> nn.Module:
    """The block, sharing its modules and keys, rewritten where that saves memory."""
    if not isinstance(block, GraphBlock):
        return block
    graph = copy.deepcopy(block.graph)
    _pool_before_relu(graph, block)
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        module = called_module(node, block)
        kind = node.target if module is None else type(module)
        if kind in _RELUS and _may_be_overwritten(node.all_input_nodes[0], block):
            if _owns_its_gradient(node, block):
                _replace(node, relu_in_place)
            else:
                _replace(node, F.relu, inplace=True)
        elif isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1), [1, 1]):
            _replace(node, global_average)
        elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            _replace(node, flattened)
    return GraphBlock(block, graph, block.unsaved)


def _pool_before_relu(graph: fx.Graph, block: nn.Module) -> None:
    for relu in list(graph.nodes):
        pool = next(iter(relu.users)) if len(relu.users) == 1 else relu
        max_pool = called_module(pool, block)
        if (
            type(called_module(relu, block)) is nn.ReLU
            and type(max_pool) is nn.MaxPool2d
            and not max_pool.return_indices
        ):
            pool.replace_all_uses_with(relu)
            pool.replace_input_with(relu, relu.all_input_nodes[0])
            relu.replace_input_with(relu.all_input_nodes[0], pool)
            pool.append(relu)


def _replace(node: fx.Node, function: Any, **kwargs: Any) -> None:
    """Let a node call another function; its name, by which scales are kept, stays."""
    node.op, node.target = "call_function", function
    node.args, node.kwargs = (node.all_input_nodes[0],), kwargs


def _may_be_overwritten(node: fx.Node, block: nn.Module) -> bool:
    if len(node.users) != 1:
        return False
    kinds = nn.Conv2d | nn.Linear | _BatchNorm | nn.GroupNorm | nn.MaxPool2d
    is_sum = node.op == "call_function" and node.target in _SUMS
    return is_sum or isinstance(called_module(node, block), kinds)


def _owns_its_gradient(node: fx.Node, block: nn.Module) -> bool:
    readers = [called_module(reader, block) for reader in node.users]
    return len(readers) == 1 and is_plain(readers[0], *_GIVE_NEW_GRADIENTS)


def relu_in_place(x: Tensor) -> Tensor:
    """A ReLU that overwrites its input and, on the way back, its gradient."""
    if x.numel() < _WORTHWHILE:
        return F.relu(x, inplace=True)
    result: Tensor = _InPlaceRelu.apply(x)  # type: ignore[no-untyped-call]
    return result


class _InPlaceRelu(torch.autograd.Function):
    """PyTorch's own leaves the gradient as it is, and writes another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.relu_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradient of this gradient
            masked: Tensor = gradient * (y > 0)
            return masked
        torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient)
        return gradient


def global_average(x: Tensor) -> Tensor:
    """``nn.AdaptiveAvgPool2d(1)``."""
    result: Tensor = _Condensed.apply(x, lambda x: F.adaptive_avg_pool2d(x, 1))  # type: ignore[no-untyped-call]
    return result


def flattened(x: Tensor) -> Tensor:
    """``nn.Flatten()``."""
    result: Tensor = _Condensed.apply(x, lambda x: x.flatten(1))  # type: ignore[no-untyped-call]
    return result


class _Condensed(torch.autograd.Function):
    """The averages of images, or images flattened; the gradient is handed back channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, condense: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.shape = x.shape
        return condense(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        averaged = ctx.shape.numel() // max(1, gradient.numel())
        if averaged > 1:
            return channels_last((gradient / averaged).expand(ctx.shape)), None
        return channels_last(gradient.reshape(ctx.shape)), None
