"""Calling nodes of a graph as they stand, for one device and for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from cocofl.freeze.operations import NodeOp


def node_function(node: fx.Node, root: nn.Module) -> Callable[..., Any]:
    """What a node calls, in a frozen block."""
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        # A view of channels-last images may not exist; nobody writes through it here.
        method = "reshape" if node.target == "view" else str(node.target)
        return lambda self, *args, **kwargs: getattr(self, method)(*args, **kwargs)
    if node.op == "get_attr":
        value = False if node.target == "training" else attribute_of(root, str(node.target))
        return lambda: value
    assert callable(node.target)
    return node.target


def run_nodes(
    op: NodeOp, read: Callable[[str], Any], function: Callable[[fx.Node], Callable[..., Any]]
) -> Any:
    """The value of an operation, given how to read values and what its nodes call."""
    made: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return made[node] if node in made else read(op.names[node])

    for node in op.nodes:
        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        made[node] = function(node)(*args, **kwargs)
    return made[op.nodes[-1]]


def attribute_of(root: nn.Module, path: str) -> Any:
    """What lies at a dotted path."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
