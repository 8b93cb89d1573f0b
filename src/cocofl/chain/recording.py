"""The graph of a model, recorded while it runs on an example.

Symbolic tracing (``symbolic.py``) has no values, so it gives up where ``forward`` asks for one:
``if x.shape[1] > 1``, ``isinstance(x, Tensor)``. Here the model really runs. Every function of
PyTorch that it calls becomes a node with the vocabulary of torch.fx, and layers stay calls of
modules. Sizes stay symbolic: they are integers that remember the node they came from. What would
hold for the example only is never taken for granted: a decision that depends on the *content* of
a tensor is a failure, and the caller records a second time with another batch size and compares.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from cocofl.chain.graphs import (
    Call,
    Failure,
    Recorded,
    bound_inputs,
    does_not_run,
    has_matrix,
    in_assertion,
    is_layer,
    left_as_it_was,
    own_line,
    run_in_parts,
    tensors_in,
)

_READS_CONTENT = {
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__",
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero",
}  # fmt: skip
RANDOM = {
    "rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal",
    "rand_like", "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_",
}  # fmt: skip
# Methods that an operator stands for, as symbolic tracing writes it.
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"{name}_": getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "pow")},
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "matmul", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge",
    )},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (
        "getitem", "setitem", "invert", "and", "or", "xor", "lshift", "rshift", "floordiv", "mod",
        "iand", "ior", "ixor", "ifloordiv", "imod",
    )},
    "div": operator.truediv, "div_": operator.itruediv,
}  # fmt: skip
_REVERSED: dict[str, Callable[..., Any]] = {
    "__rsub__": operator.sub, "__rpow__": operator.pow, "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv, "__rfloordiv__": operator.floordiv,
    "__rmod__": operator.mod, "__rmatmul__": operator.matmul,
}  # fmt: skip
_CONSTANTS = (
    bool, int, float, complex, str, type(None), type(...),
    torch.dtype, torch.layout, torch.memory_format, torch.device,
)  # fmt: skip


class Size(int):
    """A size of a tensor, or what was computed from sizes: an integer that knows its node."""

    recorder: Recorder
    node: fx.Node

    def __new__(cls, value: int, recorder: Recorder, node: fx.Node) -> Size:
        """An integer like any other to those who ask for its value."""
        own = super().__new__(cls, value)
        own.recorder, own.node = recorder, node
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def _on_sizes(function: Callable[..., Any], *, swap: bool) -> Callable[..., Any]:
    def compute(self: Size, *others: Any) -> Any:
        if not all(isinstance(other, int) for other in others):
            return getattr(int, f"__{'r' * swap}{function.__name__}__")(self, *others)
        operands = (*others, self) if swap else (self, *others)
        return self.recorder.size(function(*map(int, operands)), function, operands)

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _swap in (False, True):
        _method = _on_sizes(getattr(operator, _name), swap=_swap)
        setattr(Size, f"__{'r' * _swap}{_name}__", _method)
Size.__neg__ = _on_sizes(operator.neg, swap=False)  # type: ignore[method-assign]


class Recorder(TorchFunctionMode):
    """Runs a model and writes down what it does."""

    def __init__(self, model: nn.Module, opaque: dict[str, str]) -> None:
        super().__init__()
        self.model, self.opaque = model, opaque
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.failed_in: tuple[str, ...] = ()
        self.lines: dict[fx.Node, str] = {}
        self._calls: list[tuple[str, nn.Module]] = []
        self._made_in: dict[fx.Node, tuple[int, ...]] = {}
        """The calls, by index, during which a node was made."""
        self._stack: list[int] = []
        self._inside_layer = False
        self._nodes: dict[int, fx.Node] = {}
        """By the identity of a tensor what it is now; ``_kept`` keeps identities unique."""
        self._kept: list[Any] = []
        self._auxiliary: set[fx.Node] = set()
        """Nodes that only matter if somebody reads them: sizes, devices, parts of results."""
        self._settled: set[fx.Node] = set()
        """Nodes whose value depends on nothing but sizes and chance."""
        self._learned: set[fx.Node] = set()
        self._writers: set[fx.Node] = set()
        """Nodes that write into what they are given, for others to read."""
        self._filled: set[int] = set()
        """The memory that content was written into."""
        self._devices: dict[torch.device, fx.Node] = {}
        self._paths = {id(m): path for path, m in model.named_modules(remove_duplicate=False)}
        self._paths |= {id(m): path for path, m in reversed(list(model.named_modules()))}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {id(tensor): path for path, tensor in tensors}

    # --- running -------------------------------------------------------------------------------

    def record(self, names: Sequence[str], call: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Run ``call`` on the inputs, which get these names."""
        for name, value in zip(names, inputs, strict=True):
            self._is(value, self.graph.create_node("placeholder", name))
        with self, self._modules_recorded():
            try:
                result = call(*inputs)
            except Exception:
                self.failed_in = self.failed_in or self._path_stack()
                raise
            self.graph.output(self._argument(result))
        self._drop_unread()

    @contextmanager
    def _modules_recorded(self) -> Iterator[None]:
        run, recorder = nn.Module.__call__, self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._call_module(run, module, args, kwargs)

        # A model that asks takes the paths that it has for torch.export, free of tests of content.
        with (
            mock.patch.object(nn.Module, "__call__", call),
            mock.patch.object(torch.autograd.Function, "apply", self._custom_function()),
            mock.patch.object(torch.compiler, "is_exporting", return_value=True),
            mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        ):
            yield

    def _custom_function(self) -> Any:
        """A function with its own backward pass, which only the module around it can keep."""
        apply, recorder = torch.autograd.Function.apply.__func__, self  # type: ignore[attr-defined]

        def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder._inside_layer:
                raise fx.proxy.TraceError(f"{cls.__name__}, an autograd function, is not traced")
            return apply(cls, *args, **kwargs)

        return classmethod(run)

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        outer, self._inside_layer = self._inside_layer, True
        try:
            yield
        finally:
            self._inside_layer = outer

    def _call_module(
        self, run: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        path = self._paths.get(id(module))
        if self._inside_layer or path is None:
            return run(module, *args, **kwargs)
        self._stack.append(len(self._calls))
        self._calls.append((path, module))
        try:
            if path not in self.opaque:
                if (parts := run_in_parts(module, *args, **kwargs)) is not None:
                    return parts()
                if not (is_layer(module) or has_matrix(module)):
                    return run(module, *args, **kwargs)
            self.values[path] = module
            return self._step(
                "call_module", path, args, kwargs, lambda: run(module, *args, **kwargs)
            )
        except Exception:
            self.failed_in = self.failed_in or self._path_stack()
            raise
        finally:
            self._stack.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of PyTorch and record it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._inside_layer or name in ("_set_grad_enabled", "_get_tracing_state"):
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func.__self__.__name__, func(*args), args[0])
        if name in ("size", "numel") and isinstance(args[0], Tensor):
            return self._size_of(name, func(*args, **kwargs), args, kwargs)
        if name in _READS_CONTENT:
            return self._content(name, func, args, kwargs)
        op, target, order = _as_node(func, name, args, kwargs)
        return self._step(op, target, order(args), kwargs, lambda: func(*args, **kwargs))

    def _step(self, op: str, target: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run one operation; what it returns is known by a new node, unless it is no tensor."""
        # Before it runs, and may overwrite what it is given.
        arguments, named = self._argument(args), self._argument(kwargs)
        tensors = tensors_in((args, kwargs))
        given = {id(x): x._version for x in tensors}
        with self._unrecorded():
            result = run()
        written = {_memory(x) for x in tensors if x._version != given[id(x)]}
        if not written and op != "call_module" and not tensors_in(result):
            return result
        node = self._node(op, target, arguments, named)
        sources = node.all_input_nodes
        random = getattr(target, "__name__", target) in RANDOM
        if op == "call_module" or any(s in self._learned for s in sources):
            self._learned.add(node)
        settled = op != "call_module" and all(s in self._settled for s in sources)
        if settled and self._filled.isdisjoint(map(_memory, tensors)):
            self._settled.add(node)
        if written:
            self._writers.add(node)
            self._filled |= set() if settled else written
        if not random and op != "call_module" and not sources:
            self._auxiliary.add(node)
        return self._returned(result, node, given)

    def _returned(self, result: Any, node: fx.Node, given: dict[int, int]) -> Any:
        """The result, with a node for each of its tensors."""
        if isinstance(result, Tensor):
            if not torch.is_grad_enabled() and node in self._learned:
                node = self._node("call_method", "detach", (node,), {})
            elif given.get(id(result)) == result._version:
                # It hands on its input as it is; others may still read that as what it was.
                with self._unrecorded():
                    result = result.view_as(result)
            self._is(result, node)
            return result
        if isinstance(result, tuple | list | dict):
            keys = list(result) if isinstance(result, dict) else range(len(result))
            parts = {}
            for key in keys:
                part = result[key]
                if tensors_in(part):
                    item = self._derived(operator.getitem, (node, key))
                    if node in self._learned:
                        self._learned.add(item)
                    part = self._returned(part, item, given)
                parts[key] = part
            return _with_parts(result, parts)
        if result is None or isinstance(result, _CONSTANTS):
            return result
        raise TypeError(f"a {type(result).__name__} is returned, which is no tensor")

    # --- what is read of tensors ---------------------------------------------------------------

    def _attribute(self, name: str, value: Any, tensor: Any) -> Any:
        if name == "shape":
            return self._sizes(value, self._derived(getattr, (self._argument(tensor), "shape")))
        if name == "device":
            self._devices[value] = self._derived(getattr, (self._argument(tensor), "device"))
        elif isinstance(value, Tensor) and name != "grad":
            return self._step("call_function", getattr, (tensor, name), {}, lambda: value)
        return value

    def _size_of(self, name: str, value: Any, args: Any, kwargs: Any) -> Any:
        node = self._node("call_method", name, self._argument(args), self._argument(kwargs))
        self._auxiliary.add(node)
        self._settled.add(node)
        return self._sizes(value, node) if isinstance(value, tuple) else Size(value, self, node)

    def _sizes(self, sizes: Sequence[int], node: fx.Node) -> torch.Size:
        parts = [self._derived(operator.getitem, (node, i)) for i in range(len(sizes))]
        return torch.Size([Size(n, self, part) for n, part in zip(sizes, parts, strict=True)])

    def size(self, value: int, function: Callable[..., Any], operands: Sequence[Any]) -> Size:
        """What is computed from sizes."""
        return Size(value, self, self._derived(function, self._argument(tuple(operands))))

    def _content(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Refuse a decision on the content of tensors, unless it is the same for all inputs."""
        if name == "__bool__" and in_assertion():
            return True
        nodes = self._argument((args, kwargs))
        found: list[fx.Node] = []
        fx.node.map_arg(nodes, found.append)
        if all(node in self._settled for node in found):
            if not any(is_random(node) for node in _ancestors(found)):
                return func(*args, **kwargs)
            if name == "__bool__" and len({bool(_bound(found[0], x)) for x in (0.0, 1.0)}) == 1:
                return bool(_bound(found[0], 0.0))
            raise fx.proxy.TraceError("control flow is decided by chance")
        raise fx.proxy.TraceError("control flow depends on the content of a tensor")

    # --- nodes ---------------------------------------------------------------------------------

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        if torch.is_autocast_enabled("cpu"):
            raise fx.proxy.TraceError("autocast inside forward is not traced")
        node = self.graph.create_node(op, target, args, kwargs)
        self._made_in[node] = tuple(self._stack)
        if (where := own_line()) is not None:
            self.lines[node] = f"{where[0]}:{where[1]}"
        return node

    def _derived(self, function: Callable[..., Any], args: Any) -> fx.Node:
        node = self._node("call_function", function, args, {})
        self._auxiliary.add(node)
        if function is not operator.getitem or args[0] in self._settled:
            self._settled.add(node)
        return node

    def _is(self, value: Any, node: fx.Node) -> None:
        self._nodes[id(value)] = node
        self._kept.append(value)

    def _argument(self, value: Any) -> Any:
        """What stands in the graph for a value that a step is given or the model returns."""
        if isinstance(value, Tensor):
            return self._nodes.get(id(value)) or self._attribute_node(value)
        if isinstance(value, Size):
            return value.node
        if isinstance(value, _CONSTANTS):
            return (
                self._devices.get(value, value)
                if isinstance(value, torch.device)
                else _plain(value)
            )
        return self._structure(value)

    def _structure(self, value: Any) -> Any:
        if type(value) in (tuple, list, torch.Size):
            return (list if type(value) is list else tuple)(map(self._argument, value))
        if type(value) is dict:
            return {key: self._argument(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._node("call_function", type(value), tuple(map(self._argument, value)), {})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            given = {name: part for name, part in given.items() if part is not None}
            return self._node("call_function", type(value), (), self._argument(given))
        raise TypeError(f"a {type(value).__name__} is no value that a block can take or return")

    def _attribute_node(self, tensor: Tensor) -> fx.Node:
        path = self._tensors.get(id(tensor))
        if path is None:
            if not tensor.is_leaf:
                raise TypeError("a tensor was computed where it cannot be seen")
            path = f"_tensor_constant{sum(key.startswith('_tensor_') for key in self.values)}"
            self._tensors[id(tensor)] = path
            self._kept.append(tensor)
        self.values[path] = tensor
        node = self._node("get_attr", path, (), {})
        if isinstance(tensor, nn.Parameter):
            self._learned.add(node)
        if path.startswith("_tensor_constant"):
            self._settled.add(node)
        return node

    # --- the result ----------------------------------------------------------------------------

    def _path_stack(self) -> tuple[str, ...]:
        return tuple(self._calls[index][0] for index in self._stack)

    def _drop_unread(self) -> None:
        for node in reversed(self.graph.nodes):
            unread = not (node.users or is_random(node) or node in self._writers)
            if unread and (node in self._auxiliary | self._settled or node.op == "get_attr"):
                self.graph.erase_node(node)

    def is_whole(self, path: str, module: nn.Module) -> bool:
        """Whether a module, or one that it is in, is run as it is."""
        known = is_layer(module) or has_matrix(module)
        return known or not self.opaque.keys().isdisjoint(_upward(path))

    def recorded(self) -> Recorded:
        """The graph and what is known of it."""
        steps = [node for node in self.graph.nodes if node.op.startswith("call_")]
        at: dict[int, list[int]] = {}
        for place, node in enumerate(steps):
            for index in self._made_in[node]:
                at.setdefault(index, []).append(place)
        calls = [
            Call(*self._calls[index], min(places), max(places) + 1)
            for index, places in sorted(at.items())
        ]
        owners = {
            node.name: tuple(self._calls[index][0] for index in made_in)
            for node, made_in in self._made_in.items()
        }
        lines = {node.name: line for node, line in self.lines.items()}
        return Recorded(self.model, self.graph, calls, self.values, owners, lines)


def record(
    model: nn.Module,
    names: Sequence[str] | int,
    inputs: Sequence[Any],
    opaque: dict[str, str],
    *,
    training: bool,
) -> Recorded:
    """The graph of one mode, as the example shows it."""
    recorder = Recorder(model, opaque)
    call, input_names = bound_inputs(model, names)
    with left_as_it_was(model, training=training), torch.enable_grad():
        before = _attributes(recorder)
        try:
            recorder.record(input_names, call, [value.clone() for value in inputs])
        except Exception as error:
            try:
                call(*[value.clone() for value in inputs])
            except Exception as own:
                raise does_not_run(model, inputs, "".join(recorder.failed_in[-1:]), own) from own
            raise Failure.of(error, recorder.failed_in[::-1]) from error
        if _changed(before, after := _attributes(recorder)):
            # What only the first call sets may be computed in each call of a block.
            call(*[value.clone() for value in inputs])
            if changed := _changed(after, _attributes(recorder)):
                path, name = changed
                raise Failure(f"each call of forward changes {name!r}", _upward(path))
    return recorder.recorded()


def _attributes(recorder: Recorder) -> dict[tuple[str, str], Any]:
    """What modules hold beside parameters, unless they stay whole."""
    return {
        (path, name): value
        for path, module in recorder.model.named_modules()
        if not recorder.is_whole(path, module)
        for name, value in {**vars(module), **module._buffers}.items()
    }


def _changed(
    before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]
) -> tuple[str, str] | None:
    """Where an attribute is not what it was, and its name."""
    for place in before | after:
        one, other = before.get(place, before), after.get(place, after)
        plain = isinstance(one, _CONSTANTS) and isinstance(other, _CONSTANTS)
        if one is not other and not (plain and one == other):
            return place
    return None


def _upward(path: str) -> list[str]:
    """A module and those it is in, but for the model itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _as_node(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, Any, Callable[[Any], Any]]:
    """Kind and target of the node for a function, and the order of its arguments there."""
    qualified = getattr(func, "__qualname__", "") or ""
    if not qualified.startswith(("Tensor.", "TensorBase.", "_TensorBase.")):
        return "call_function", func, tuple
    if name in _OPERATORS and not kwargs:
        return "call_function", _OPERATORS[name], tuple
    if name in _REVERSED:
        return "call_function", _REVERSED[name], lambda given: tuple(given)[::-1]
    if args and not isinstance(args[0], Tensor):
        raise TypeError(f"Tensor.{name} of a {type(args[0]).__name__}")
    return "call_method", name, tuple


def _plain(value: Any) -> Any:
    """A number as Python's own: what a subclass writes, Python may not read again."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def _with_parts(result: Any, parts: dict[Any, Any]) -> Any:
    """A result with its parts replaced."""
    if isinstance(result, dict):
        for key, part in parts.items():
            if part is not result[key]:
                result[key] = part
        return result
    values = list(parts.values())
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*values)
    named = type(result).__module__ == "torch.return_types"
    return type(result)(values) if named or type(result) in (tuple, list) else result


def _memory(tensor: Tensor) -> int:
    """Where its values lie: views of one tensor share that."""
    return tensor.untyped_storage().data_ptr()


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return getattr(node.target, "__name__", node.target) in RANDOM


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _bound(node: fx.Node, chance: float) -> Any:
    """What a node comes to if ``torch.rand`` gives its smallest or its largest number."""
    if node.target is torch.rand:
        return torch.tensor(chance).nextafter(torch.tensor(0.0))
    if node.op != "call_function" or is_random(node) or not callable(node.target):
        raise fx.proxy.TraceError("control flow is decided by chance")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _bound(n, chance))
    return node.target(*args, **kwargs)
