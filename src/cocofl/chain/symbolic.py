"""The graph of a model by symbolic tracing with torch.fx: no values, any size of input."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from cocofl.chain.graphs import (
    Call,
    Failure,
    Recorded,
    bound_inputs,
    in_assertion,
    is_layer,
    left_as_it_was,
    run_in_parts,
)
from cocofl.errors import InvalidExample

# These read a size or device of the model's input without asking torch.fx, which then gives up.
RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm)
FACTORIES = (
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones),
    *(torch.tensor, torch.zeros, *RANDOM),
)


def trace_symbolically(
    model: nn.Module, inputs: int | Sequence[str], opaque: dict[str, str], *, training: bool
) -> Recorded:
    """The graph of one mode; the modules in ``opaque`` stay whole."""
    tracer = _Tracer(inputs, opaque)
    recorded: dict[str, Any] = {function.__name__: _recorded(function) for function in FACTORIES}
    with left_as_it_was(model, training=training):
        try:
            with mock.patch.multiple(torch, **recorded), torch.enable_grad():
                tracer.trace(model)
        except InvalidExample:
            raise
        except Exception as error:
            raise Failure.of(error, tracer.failed_in[::-1]) from error
        for node in tracer.graph.nodes:
            if node.op not in ("get_attr", "call_module"):
                continue
            value = tracer.values[node.target] = operator.attrgetter(node.target)(model)
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise Failure(
                    "a tensor is computed from parameters that torch.fx cannot see; "
                    "parameters must be attributes of their module",
                    tracer.owners[node.name][::-1],
                )
        for node in tracer.graph.nodes:
            if _writes_into_constant(node):
                raise Failure(
                    f"{node.name!r} writes into a tensor that is made in each call of forward",
                    tracer.owners[node.name][::-1],
                )
    return Recorded(model, tracer.graph, tracer.calls, tracer.values, tracer.owners)


class _Proxy(fx.Proxy):
    """Records ``x += y`` as what it is; torch.fx would record a sum that leaves ``x`` as it was."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda x, other: x.tracer.create_proxy("call_function", function, (x, other), {})


_IN_PLACE: set[Any] = {operator.setitem}
for _name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow",
    "and", "or", "xor", "lshift", "rshift",
):  # fmt: skip
    _function = getattr(operator, f"i{_name}")
    _IN_PLACE.add(_function)
    setattr(_Proxy, f"__i{_name}__", _in_place(_function))


class _Tracer(fx.Tracer):
    """Records, beside the graph, which module made which step, and what the graph refers to."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: int | Sequence[str], opaque: dict[str, str]) -> None:
        super().__init__()
        self.inputs = inputs
        self.opaque = opaque
        self.n_steps = 0
        self.calls: list[Call] = []
        self.stack: list[str] = []
        self.owners: dict[str, tuple[str, ...]] = {}
        self.failed_in: tuple[str, ...] = ()
        self.values: dict[str, Any] = {}
        """The tensors and modules that the graph refers to."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, *_: Any, **_options: Any) -> tuple[Any, list[Any]]:
        # Parameters beyond the example keep their defaults.
        call, names = bound_inputs(self.root, self.inputs)
        return call, [self.create_proxy("placeholder", name, (), {}) for name in names]

    def to_bool(self, obj: fx.Proxy) -> bool:
        # A check that fails for no good input is left out of the chain.
        return in_assertion() or super().to_bool(obj)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        # The shapes of parameters are constants; torch.fx knows no such proxy for buffers.
        self.param_shapes_constant = isinstance(attr_val, nn.Parameter)
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or is_layer(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        index, start = len(self.calls), self.n_steps
        self.calls.append(Call(path, m, start, start))
        self.stack.append(path)
        try:
            parts = None if path in self.opaque else run_in_parts(m, *args, **kwargs)
            result = parts() if parts else super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or tuple(self.stack)
            raise
        finally:
            self.stack.pop()
        self.calls[index] = Call(path, m, start, self.n_steps)
        return result

    def create_arg(self, a: Any) -> Any:
        # torch.fx would make a plain dict of a dict with attributes.
        kind: Any = type(a)
        if isinstance(a, dict) and dataclasses.is_dataclass(kind):
            given = {f.name: getattr(a, f.name) for f in dataclasses.fields(kind)}
            given = {name: self.create_arg(x) for name, x in given.items() if x is not None}
            return self.create_node("call_function", kind, (), given)
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise fx.proxy.TraceError("torch.no_grad() and autocast inside forward are not traced")
        node = super().create_node(*args, **kwargs)
        self.n_steps += node.op.startswith("call_")
        self.owners[node.name] = tuple(self.stack)
        return node


def _writes_into_constant(node: fx.Node) -> bool:
    """Whether a step overwrites a tensor that ``forward`` makes, which stands in the graph once."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.target not in _IN_PLACE and (not name.endswith("_") or name.endswith("__")):
        return False
    first = node.args[0] if node.args else None
    while isinstance(first, fx.Node) and first.target is operator.getitem:
        first = first.args[0]
    return (
        isinstance(first, fx.Node)
        and first.op == "get_attr"
        and str(first.target).startswith("_tensor_constant")
    )


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, fx.Proxy):
                return leaf.tracer.create_proxy("call_function", function, args, kwargs)
        if function in RANDOM:
            # The number would be drawn once, and stand in the graph for ever.
            raise fx.proxy.TraceError("forward draws random numbers of its own")
        return function(*args, **kwargs)

    return record
