"""Frozen norms: folded into the layer before them, into a map of their own, or left as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from cocofl.freeze.layers import is_plain
from cocofl.freeze.lowering import passed_through
from cocofl.freeze.traced_blocks import as_graph


class Affine(NamedTuple):
    """What a BatchNorm with fixed statistics does to each channel: ``factor * x + offset``."""

    factor: Tensor
    offset: Tensor


def affine_of(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Affine:
    """The same from the tensors of a BatchNorm that uses its running statistics."""
    factor = torch.rsqrt(variance + eps)
    if weight is not None:
        factor = factor * weight
    offset = -mean * factor
    if bias is not None:
        offset = offset + bias
    return Affine(factor.detach(), offset.detach())


def fold_affine(weight: Tensor, bias: Tensor | None, norm: Affine) -> tuple[Tensor, Tensor]:
    """A layer's weight and bias with the affine map after it folded in (eq. 4 of the paper)."""
    factor, offset = norm
    folded = weight * factor.view(-1, *[1] * (weight.ndim - 1))
    return folded, offset if bias is None else offset + bias * factor


def with_batch_statistics(block: nn.Module) -> nn.Module:
    """Variant ``f``: norms normalise with the batch and leave their statistics alone."""
    for module in block.modules():
        if isinstance(module, _NormBase):
            module.momentum = 0.0
    return block


def fused(block: nn.Module, flat: Container[str] = ()) -> nn.Module:
    """Variant ``ff``: evaluation mode, with each BatchNorm folded into the layer it follows.

    ``flat`` names the nodes whose result has two axes: on more, a BatchNorm after a linear layer
    normalises another axis than the one the layer makes.
    """
    block.eval()
    traced = as_graph(block)
    graph, modules = copy.deepcopy(traced.graph), dict(traced.named_modules())
    folded: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        if passed_through(node, traced) is not None:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    for norm_node in list(graph.nodes):
        layer_node = norm_node.all_input_nodes[0] if norm_node.all_input_nodes else None
        if norm_node.op != "call_module" or layer_node is None or layer_node.op != "call_module":
            continue
        path = str(layer_node.target)
        layer, norm = modules[path], modules[str(norm_node.target)]
        if not (_is_norm(norm) and len(layer_node.users) == 1 and _uses(graph, path) == 1):
            continue
        fuse: Callable[..., nn.Module] | None = None
        if is_plain(layer, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            fuse = fuse_conv_bn_eval
        elif is_plain(layer, nn.Linear) and layer_node.name in flat:
            fuse = fuse_linear_bn_eval
        if fuse is not None:
            folded[path] = modules[path] = fuse(layer, norm)
            norm_node.replace_all_uses_with(layer_node)
            graph.erase_node(norm_node)
    result = fx.GraphModule(traced, graph)
    for path, module in folded.items():
        result.set_submodule(path, module)
    return result.eval()


def _is_norm(module: nn.Module) -> bool:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return is_plain(module, *kinds) and module.running_mean is not None


def _uses(graph: fx.Graph, path: str) -> int:
    """How many nodes call the layer at ``path`` or read its tensors."""
    return sum(
        node.op in {"call_module", "get_attr"} and f"{node.target}.".startswith(f"{path}.")
        for node in graph.nodes
    )
