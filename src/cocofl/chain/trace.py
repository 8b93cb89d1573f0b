"""One torch.fx graph of a whole model that is right in train and in eval mode.

A plain trace has two flaws for our purpose. It bakes in ``training``, so a functional dropout
traced in eval mode never drops anything again; and it gives up on the whole model for the sake of
one module with data-dependent control flow. Here the model is traced in both modes and constants
that differ are read from the block's ``training`` flag; and a submodule that cannot be traced
stays whole, as one operation.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from cocofl.errors import CannotSplit, InvalidExample

BY_HAND = (
    "Blocks can also be given by hand, each taking the output of the one before: "
    "cocofl.BlockChain([stem, block1, ..., head])."
)
# These read a size or device of the model's input without asking torch.fx, which then gives up.
FACTORIES = (
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand),
    *(torch.randn, torch.tensor, torch.zeros),
)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


class Call(NamedTuple):
    """One call of a module: it made the steps ``start:stop``."""

    path: str
    module: nn.Module
    start: int
    stop: int


@dataclass(frozen=True)
class Trace:
    """A model as a list of steps (operations) in the order in which they run.

    Constants, parameters and flags are no steps: such a node stands right before the only step
    that reads it, so that no cut can come between them.
    """

    graph: fx.Graph
    steps: tuple[fx.Node, ...]
    calls: tuple[Call, ...]
    attributes: dict[str, Any]
    opaque: dict[str, str]
    """Why submodules could not be traced, by path."""
    owners: dict[str, tuple[str, ...]]
    """By node name the paths of the modules it was made in, outermost first."""

    @functools.cached_property
    def places(self) -> dict[fx.Node, int]:
        """For each node the step that it is or belongs to; inputs are -1, the output is last."""
        places = {step: i for i, step in enumerate(self.steps)}
        for node in reversed(self.graph.nodes):
            if node.op == "placeholder":
                places[node] = -1
            elif node.op == "output":
                places[node] = len(self.steps)
            elif node not in places:
                (user,) = node.users
                places[node] = places[user]
        return places

    def parameters(self, node: fx.Node) -> dict[str, nn.Parameter]:
        """The parameters that a step, or a constant before it, reads directly."""
        if node.op not in ("call_module", "get_attr"):
            return {}
        value = self.attributes[str(node.target)]
        if isinstance(value, nn.Module):
            return {f"{node.target}.{name}": p for name, p in value.named_parameters()}
        return {str(node.target): value} if isinstance(value, nn.Parameter) else {}


def in_mode(training: bool, when_training: Any, otherwise: Any) -> Any:
    """A constant that depends on the mode, such as ``0.1 if self.training else 0.0``."""
    return when_training if training else otherwise


def trace(model: nn.Module, n_inputs: int) -> Trace:
    """Trace the model, which is left as it was; submodules that cannot be traced stay whole."""
    opaque: dict[str, str] = {}
    while True:
        try:
            result = _trace_modes(model, n_inputs, opaque)
            break
        except _Failure as failure:
            path = next((path for path in failure.suspects if path not in opaque), None)
            if path is None:
                raise CannotSplit(
                    f"cannot trace {type(model).__name__}: {failure}. {BY_HAND}"
                ) from failure.__cause__
            opaque[path] = str(failure)
    _warn_about(model, result.opaque)
    return result


def _warn_about(model: nn.Module, opaque: dict[str, str]) -> None:
    """Say once for each class of modules with parameters that they stay whole, and why."""
    paths: dict[type[nn.Module], list[str]] = {}
    for path in opaque:
        module = model.get_submodule(path)
        if next(module.parameters(), None) is not None:
            paths.setdefault(type(module), []).append(path)
    for kind, where in paths.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        warnings.warn(
            f"cocofl.split keeps {kind.__name__} ({where[0]!r}{more}) whole, as one operation in "
            f"float32, because it cannot be traced: {opaque[where[0]]}",
            stacklevel=4,
        )


class _Failure(Exception):
    """Tracing failed; ``suspects`` are the modules which, kept whole, may let it pass.

    They are in the order in which to try, from the inside out; the model itself is none of them.
    """

    def __init__(self, reason: str, suspects: Sequence[str]) -> None:
        super().__init__(f"{reason} (in {suspects[0]!r})" if suspects else reason)
        self.suspects = tuple(suspects)


class _Proxy(fx.Proxy):
    """Records ``x += y`` as what it is; torch.fx would record a sum that leaves ``x`` as it was."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda x, other: x.tracer.create_proxy("call_function", function, (x, other), {})


for _name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow",
    "and", "or", "xor", "lshift", "rshift",
):  # fmt: skip
    setattr(_Proxy, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class _Tracer(fx.Tracer):
    """Records, beside the graph, which module made which step, and what the graph refers to."""

    proxy_buffer_attributes = True

    def __init__(self, n_inputs: int, opaque: dict[str, str]) -> None:
        super().__init__()
        self.n_inputs = n_inputs
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
        names = _input_names(self.root, self.n_inputs)
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return self.root.forward, inputs

    def to_bool(self, obj: fx.Proxy) -> bool:
        # A check that fails for no good input is left out of the chain.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
            frame = frame.f_back
        if frame is not None:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if line.lstrip().startswith("assert "):
                return True
        return super().to_bool(obj)

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
            if type(m) is nn.TransformerEncoder and len(args) == 1 and not kwargs:
                result = _run_encoder(m, args[0])
            else:
                result = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or tuple(self.stack)
            raise
        finally:
            self.stack.pop()
        self.calls[index] = Call(path, m, start, self.n_steps)
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise fx.proxy.TraceError("torch.no_grad() and autocast inside forward are not traced")
        node = super().create_node(*args, **kwargs)
        self.n_steps += node.op.startswith("call_")
        self.owners[node.name] = tuple(self.stack)
        return node


def is_layer(module: nn.Module) -> bool:
    """Whether it is one of PyTorch's own layers, or made by subclassing one without a forward.

    PyTorch's containers are not layers.
    """
    forward = type(module).forward
    where = getattr(forward, "__module__", None) or ""
    return where.startswith(("torch.nn", "torch.ao.nn")) and forward is not nn.Sequential.forward


def is_container(module: nn.Module) -> bool:
    """Whether it is a plain ``nn.Sequential`` or the like, which says nothing about blocks."""
    return type(module).__module__.startswith("torch.nn")


def _run_encoder(encoder: nn.TransformerEncoder, x: Any) -> Any:
    """What ``nn.TransformerEncoder`` does without masks; its own forward cannot be traced."""
    for layer in encoder.layers:
        x = layer(x)
    return x if encoder.norm is None else encoder.norm(x)


def _input_names(model: nn.Module, n_inputs: int) -> list[str]:
    """The names of the first inputs of ``model.forward``."""
    signature = inspect.signature(model.forward)
    try:
        given = signature.bind(*range(n_inputs)).arguments
    except TypeError as error:
        raise InvalidExample(
            f"the example has {n_inputs} inputs, but {type(model).__name__}.forward takes "
            f"{signature}: {error}"
        ) from error
    names: list[str] = []
    for name, value in given.items():
        several = isinstance(value, tuple)  # what ``*inputs`` takes in
        names += [f"{name}_{i}" for i in range(len(value))] if several else [name]
    return names


def _trace_modes(model: nn.Module, n_inputs: int, opaque: dict[str, str]) -> Trace:
    """Trace in train mode and in eval mode, and merge the two.

    A second trace in train mode shows what differs for other reasons, such as randomness.
    """
    train = _trace_mode(model, n_inputs, opaque, training=True)
    again = _trace_mode(model, n_inputs, opaque, training=True)
    evaluation = _trace_mode(model, n_inputs, opaque, training=False)
    _Merge(train, again, "not the same operations each time it is called", flags=False).run()
    other = "other operations in train mode than in eval mode"
    _Merge(train, evaluation, other, flags=True).run()

    _place_before_users(train.graph)
    calls = [node for node in train.graph.nodes if node.op.startswith("call_")]
    called = {call.path for call in train.calls}
    return Trace(
        graph=train.graph,
        steps=tuple(node for node in calls if node.target is not in_mode),
        calls=tuple(train.calls),
        attributes=train.values | {"training": model.training},
        opaque={path: reason for path, reason in opaque.items() if path in called},
        owners=train.owners,
    )


def _trace_mode(
    model: nn.Module, n_inputs: int, opaque: dict[str, str], *, training: bool
) -> _Tracer:
    tracer = _Tracer(n_inputs, opaque)
    recorded: dict[str, Any] = {function.__name__: _recorded(function) for function in FACTORIES}
    with left_as_it_was(model, training=training):
        try:
            with mock.patch.multiple(torch, **recorded), torch.enable_grad():
                tracer.trace(model)
        except InvalidExample:
            raise
        except Exception as error:
            raise _Failure(_describe(error), tracer.failed_in[::-1]) from error
        for node in tracer.graph.nodes:
            if node.op not in ("get_attr", "call_module"):
                continue
            value = tracer.values[node.target] = operator.attrgetter(node.target)(model)
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise _Failure(
                    "a tensor is computed from parameters that torch.fx cannot see; "
                    "parameters must be attributes of their module",
                    tracer.owners[node.name][::-1],
                )
    return tracer


class _Merge:
    """Compares two traces, and may put the flag ``training`` where their constants differ.

    With ``flags`` constants may differ, and the graph of ``one`` then serves both modes.
    """

    def __init__(self, one: _Tracer, other: _Tracer, difference: str, *, flags: bool) -> None:
        self.one, self.other = one, other
        self.difference, self.flags = difference, flags
        self.twin: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        graphs = (self.one.graph, self.other.graph)
        for a, b in itertools.zip_longest(*(list(graph.nodes) for graph in graphs)):
            if a is None or b is None or not self.same_operation(a, b):
                raise self.failure(a, b)
            self.twin[b] = a
            args, kwargs = self.merged(a, b, (a.args, a.kwargs), (b.args, b.kwargs))
            if self.flags:
                a.args, a.kwargs = args, kwargs

    def same_operation(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op == b.op == "get_attr":
            x, y = self.one.values[str(a.target)], self.other.values[str(b.target)]
            tensors = isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype
            return x is y or (tensors and torch.equal(x, y))
        return a.op == b.op and a.target == b.target

    def merged(self, a: fx.Node, b: fx.Node, x: Any, y: Any) -> Any:
        if isinstance(x, fx.Node) or isinstance(y, fx.Node):
            if not isinstance(y, fx.Node) or self.twin.get(y) is not x:
                raise self.failure(a, b)
            return x
        if type(x) is type(y) and isinstance(x, tuple | list) and len(x) == len(y):
            return type(x)([self.merged(a, b, i, j) for i, j in zip(x, y, strict=True)])
        if isinstance(x, dict) and isinstance(y, dict) and list(x) == list(y):
            return {key: self.merged(a, b, x[key], y[key]) for key in x}
        if isinstance(x, slice) and isinstance(y, slice):
            parts = ((x.start, y.start), (x.stop, y.stop), (x.step, y.step))
            return slice(*(self.merged(a, b, i, j) for i, j in parts))
        if type(x) is type(y) and (x == y or repr(x) == repr(y)):
            return x
        if self.flags and isinstance(x, CONSTANTS) and isinstance(y, CONSTANTS):
            return self.flag(a, x, y)
        raise self.failure(a, b)

    def flag(self, user: fx.Node, x: Any, y: Any) -> fx.Node:
        graph = self.one.graph
        with graph.inserting_before(user):
            flag = graph.create_node("get_attr", "training")
            if x is True and y is False:
                return flag
            return graph.create_node("call_function", in_mode, (flag, x, y))

    def failure(self, a: fx.Node | None, b: fx.Node | None) -> _Failure:
        """Suspect first what only one trace was in, and then what both were in."""
        stacks = [
            () if node is None else tracer.owners[node.name]
            for tracer, node in ((self.one, a), (self.other, b))
        ]
        root = self.one.root
        common = [path for path in stacks[0] if path in stacks[1]]
        single = [path for stack in stacks for path in stack[::-1] if path not in common]
        names = " and ".join(repr(node.name) for node in (a, b) if node is not None)
        return _Failure(
            f"it does {self.difference}: see {names}",
            [path for path in single + common[::-1] if not is_layer(root.get_submodule(path))],
        )


def _place_before_users(graph: fx.Graph) -> None:
    """Give each reader of a constant or parameter its own node, right before it."""
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                copy = graph.create_node("get_attr", node.target, name=node.name)
            user.replace_input_with(node, copy)
        graph.erase_node(node)


def _describe(error: Exception) -> str:
    """The error and the line of the model's own source that led to it."""
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_HERE, _TORCH))
    ]
    if not own:
        return message
    return f"{message}, at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}"


@contextmanager
def left_as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """In this mode, and undo what a trace or a trial run does: flags, buffers, values it keeps."""
    before = [
        (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in _REGISTRIES})
        for module in model.modules()
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for module in model.modules():
        module.training = training
    try:
        yield
    finally:
        for module, attributes, registries in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, values in registries.items():
                attributes[name].clear()
                attributes[name].update(values)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, fx.Proxy):
                return leaf.tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record
