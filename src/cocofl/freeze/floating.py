"""Frozen blocks in float32: variants ``f`` and ``ff``."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from cocofl.freeze.lowering import as_graph


def with_batch_statistics(block: nn.Module) -> nn.Module:
    """Variant ``f``: BatchNorm normalises with the batch and leaves its statistics alone."""
    for module in block.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 0.0
    return block


def fused(block: nn.Module) -> nn.Module:
    """Variant ``ff``: evaluation mode, with each BatchNorm folded into the layer it follows."""
    block.eval()
    traced = as_graph(block)
    graph, folded = fx.Graph(), dict(traced.named_modules())
    graph.output(graph.graph_copy(traced.graph, val_map={}))
    twins: dict[str, nn.Module] = {}
    for norm_node in list(graph.nodes):
        layer_node = norm_node.all_input_nodes[0] if norm_node.all_input_nodes else None
        if norm_node.op != "call_module" or layer_node is None or layer_node.op != "call_module":
            continue
        layer, norm = folded[str(layer_node.target)], folded[str(norm_node.target)]
        used_once = len(layer_node.users) == 1 and _calls(graph, layer_node.target) == 1
        if not (used_once and isinstance(norm, _BatchNorm) and norm.running_mean is not None):
            continue
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            twins[str(layer_node.target)] = fuse_conv_bn_eval(layer, norm)
        elif isinstance(layer, nn.Linear):
            twins[str(layer_node.target)] = fuse_linear_bn_eval(layer, norm)
        else:
            continue
        norm_node.replace_all_uses_with(layer_node)
        graph.erase_node(norm_node)
    result = fx.GraphModule(traced, graph)
    for path, module in twins.items():
        result.set_submodule(path, module)
    return result.eval()


def _calls(graph: fx.Graph, target: object) -> int:
    return sum(node.op == "call_module" and node.target == target for node in graph.nodes)
