"""Tensors that several steps read: what must stay in one block, and what is handed on.

A *tied weight* is a parameter of two layers, such as the embedding and the head of a language
model. It belongs to the block of its first reader, which hands it on like any other value. So
gradients of both uses reach it where that block is trained, and where it is frozen the weight is a
constant to the others. A layer that is called twice stays in one block with all that lies between.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, fx, nn

from cocofl.chain.trace import Trace


def kept_together(trace: Trace) -> dict[str, tuple[int, int]]:
    """First and last step of each stretch that no cut may divide, by the tensor that they share."""
    found: dict[str, tuple[int, int]] = {}
    for tensor, uses in _uses(trace).items():
        first = uses[0][1]
        anchors = {first.target: trace.places[first]}
        for name, node in uses[1:]:
            if _can_take(trace, node, tensor):
                start = anchors.setdefault(node.target, trace.places[node])
            else:
                start = anchors[first.target]
            if start < trace.places[node]:
                found[name] = (start, max(trace.places[node], found.get(name, (0, 0))[1]))
    return found


def handed_on(trace: Trace, cuts: Sequence[int]) -> Trace:
    """The trace with tied weights as values where a cut lies between their readers."""
    for uses in _uses(trace).values():
        (name, first), places = uses[0], trace.places
        for _, node in uses[1:]:
            if bisect_right(cuts, places[first]) != bisect_right(cuts, places[node]):
                _take_as_value(trace, node, name, first)
    return dataclasses.replace(trace)  # its places are found anew


def _uses(trace: Trace) -> dict[Tensor, list[tuple[str, fx.Node]]]:
    """The steps that read each tensor as their own, if there are several, and their names for it.

    A parameter that the model reads itself has one node, and is a value to all its readers.
    """
    uses: dict[Tensor, list[tuple[str, fx.Node]]] = {}
    for node in trace.graph.nodes:
        held: dict[str, Tensor] = dict(trace.parameters(node))
        if node.op == "call_module":
            module = trace.attributes[str(node.target)]
            held |= {f"{node.target}.{name}": b for name, b in module.named_buffers()}
        for name, tensor in held.items():
            uses.setdefault(tensor, []).append((name, node))
    return {tensor: readers for tensor, readers in uses.items() if len(readers) > 1}


def _can_take(trace: Trace, node: fx.Node, tensor: Tensor) -> bool:
    """Whether a step is a plain layer that may take its weight as a value."""
    if node.op == "get_attr":
        return True
    layer = trace.attributes[str(node.target)]
    if len(node.args) != 1 or node.kwargs or getattr(layer, "weight", None) is not tensor:
        return False
    if type(layer) is nn.Embedding:
        return layer.max_norm is None and not (layer.scale_grad_by_freq or layer.sparse)
    return type(layer) is nn.Linear


def _take_as_value(trace: Trace, node: fx.Node, weight: str, first: fx.Node) -> None:
    """Make a call of a layer a function of its input and a weight that the first reader has."""
    if node.op == "get_attr":
        return
    graph, layer = trace.graph, trace.attributes[str(node.target)]
    with graph.inserting_before(first):
        value = graph.create_node("get_attr", weight)
    trace.attributes[weight] = layer.weight
    if isinstance(layer, nn.Embedding):
        node.args, node.target = (node.args[0], value, layer.padding_idx), F.embedding
    else:
        bias = None
        if layer.bias is not None:
            path = f"{node.target}.bias"
            trace.attributes[path] = layer.bias
            with graph.inserting_before(node):
                bias = graph.create_node("get_attr", path)
        node.args, node.target = (node.args[0], value, bias), F.linear
    node.op = "call_function"
