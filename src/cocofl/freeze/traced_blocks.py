"""A block as a graph of nodes, what one run on the example shows of each node, and copies."""

from __future__ import annotations

import copy
import dataclasses
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from cocofl.chain import graph_block
from cocofl.errors import CannotLower, CannotSplit, InvalidExample
from cocofl.freeze.layout import FaultyConvolutions, channels_last


def as_graph(block: nn.Module, n_inputs: int = 1) -> fx.GraphModule:
    """The block's graph, traced if it was given by hand."""
    if isinstance(block, fx.GraphModule):
        return block
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about layers that stay whole
        return graph_block(block, n_inputs)


def called_module(node: fx.Node, block: nn.Module) -> nn.Module | None:
    """The module that a node calls, if it calls one."""
    return block.get_submodule(str(node.target)) if node.op == "call_module" else None


def as_one_node(block: nn.Module, n_inputs: int, structure: Any) -> fx.GraphModule:
    """A graph that calls the block as it is and takes its result apart."""
    root, graph = nn.Module(), fx.Graph()
    root.add_module("block", block)
    inputs = tuple(graph.placeholder(f"x{i}") for i in range(n_inputs))
    graph.output(_taken_apart(graph, graph.call_module("block", inputs), structure))
    return fx.GraphModule(root, graph)


def _taken_apart(graph: fx.Graph, node: fx.Node, structure: Any) -> Any:
    """Nodes that read each value of a nested result."""
    if structure is None:
        return node

    def part(key: Any) -> Any:
        item = graph.call_function(operator.getitem, (node, key))
        return _taken_apart(graph, item, structure[key])

    if isinstance(structure, dict):
        return {key: part(key) for key in structure}
    return _in_order(type(structure), [part(i) for i in range(len(structure))])


def _in_order(kind: type, parts: list[Any]) -> Any:
    """A list, a tuple, or one with names."""
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _structure(value: Any) -> Any:
    """The tuples, lists and dicts that a result consists of, with None for what they hold."""
    if isinstance(value, Tensor) or _is_plain(value):
        return None
    if type(value) in {tuple, list} or hasattr(type(value), "_fields"):
        return _in_order(type(value), [_structure(part) for part in value])
    if isinstance(value, dict):
        return {key: _structure(part) for key, part in value.items()}
    raise CannotLower(
        f"a block returns a {type(value).__name__}; "
        "expected tensors, or tuples, lists and dicts of them"
    )


_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensor, so that no gradient can flow through it."""
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))


class Watch(fx.Interpreter):
    """Runs a block and remembers what kind of value each node has, and what it overwrites."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False  # our own message says where
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.bundles: dict[fx.Node, Any] = {}
        """Results which are no tensors but may hold some."""
        self.overwritten: dict[fx.Node, list[fx.Node]] = {}
        self.tangled = False
        """Whether a node overwrites what others look at, be it through a view."""

    def run_node(self, n: fx.Node) -> Any:
        """Also note what there is to know."""
        before = {node: _versions(value) for node, value in self.env.items()}
        result = super().run_node(n)
        changed = [node for node, old in before.items() if _versions(self.env[node]) != old]
        if changed:
            self.overwritten[n] = changed
            self.tangled |= any(self.env[node] is not result for node in changed)
        if isinstance(result, Tensor):
            if result.is_floating_point():
                self.shapes[n] = tuple(result.shape)
        elif n.op != "output" and not _is_plain(result):
            self.bundles[n] = result
        return result


def _versions(value: Any) -> list[int]:
    """PyTorch counts how often a tensor, or what it is a view of, was written to."""
    return [leaf._version for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class SeenBlock:
    """A block after a run on the example."""

    block: fx.GraphModule
    graph: fx.Graph
    """A copy that no module owns, so that operations do not keep the chain's weights alive."""
    watch: Watch
    arguments: list[Any]
    """What it was given; the versions of tensors tell whether it has written into them."""
    result: Any
    whole: Any
    channels_last: bool
    returns: type | None
    """The class of its result, if that is a dataclass."""


def seen_on(index: int, block: nn.Module, arguments: list[Any]) -> SeenBlock:
    """Run the block on the example; what cannot be traced or told apart stays one node."""
    try:
        try:
            seen = _watched(as_graph(block, len(arguments)), arguments, None)
            if not seen.watch.tangled:
                return seen
        except CannotSplit:
            pass
        whole = _structure(block(*map(_copied, arguments)))
        one_node = as_one_node(block, len(arguments), whole)
        return _watched(one_node, arguments, () if whole is None else whole)
    except CannotLower:
        raise
    except Exception as error:
        got = ", ".join(str(tuple(x.shape)) for x in arguments if isinstance(x, Tensor))
        raise InvalidExample(
            f"block {index} does not run on the example, which reaches it as {got}: {error}"
        ) from error


def _watched(traced: fx.GraphModule, arguments: list[Any], whole: Any) -> SeenBlock:
    graph, fast = copy.deepcopy(traced.graph), _runs_channels_last(traced, arguments)
    for node in graph.nodes:
        if node.target is operator.setitem:
            node.target = setitem
    returns: type | None = None
    while True:
        watch, own = Watch(traced, graph), [_copied(x) for x in arguments]
        result = watch.run(*own)
        if not any(node in watch.bundles for node in graph.output_node().all_input_nodes):
            return SeenBlock(traced, graph, watch, own, result, whole, fast, returns)
        if dataclasses.is_dataclass(result):
            returns = type(result)
        _return_single_values(graph, watch.bundles)


def setitem(x: Any, index: Any, value: Any) -> Any:
    """Write into ``x`` and return it, as operations in place do: a value that others read."""
    x[index] = value
    return x


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _return_single_values(graph: fx.Graph, bundles: dict[fx.Node, Any]) -> None:
    """Take results apart which the block returns as they are."""
    output = graph.output_node()

    def apart(node: fx.Node) -> Any:
        if dataclasses.is_dataclass(node.target) and not isinstance(bundles[node], dict):
            return mapped(dict(node.kwargs), apart)
        return _taken_apart(graph, node, _structure(bundles.get(node)))

    with graph.inserting_before(output):
        output.args = (mapped(output.args[0], apart),)


def _normalises_its_input(traced: fx.GraphModule) -> bool:
    """Whether a GroupNorm comes before all that learns.

    Channels last, its backward pass reads memory that is not there where its input needs no
    gradient, and the process dies (seen with PyTorch 2.13).
    """
    learned: set[fx.Node] = set()
    for node in traced.graph.nodes:
        module = called_module(node, traced)
        is_norm = isinstance(module, nn.GroupNorm) or node.target is F.group_norm
        # The first it reads is its input, the others are its own parameters.
        below = not learned.isdisjoint(node.all_input_nodes[: 1 if is_norm else None])
        if is_norm and not below:
            return True
        parameters = module is not None and next(module.parameters(), None) is not None
        if below or parameters or node.op == "get_attr":
            learned.add(node)
    return False


def _runs_channels_last(traced: fx.GraphModule, arguments: list[Any]) -> bool:
    if _normalises_its_input(traced):
        return False
    faults = FaultyConvolutions()
    try:
        own = copy_block(traced, {}).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trial = fx.Interpreter(own)
        trial.extra_traceback = False
        with faults:
            trial.run(*[channels_last(_copied(x)) for x in arguments])
    except RuntimeError:
        return False
    return not faults.seen


def mapped(structure: Any, of: Callable[[fx.Node], Any]) -> Any:
    """What a graph returns, with each node replaced, in ordinary lists and dicts."""
    if isinstance(structure, fx.Node):
        return of(structure)
    if isinstance(structure, dict):
        return {key: mapped(part, of) for key, part in structure.items()}
    if isinstance(structure, list):
        return [mapped(part, of) for part in structure]
    if isinstance(structure, tuple):
        kind = type(structure) if hasattr(structure, "_fields") else tuple
        return _in_order(kind, [mapped(part, of) for part in structure])
    return structure


def copy_block(block: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The block with its tensors cloned, taken from ``state`` where it has them.

    What is shared inside the block (a layer, a tied weight) is shared inside the copy. Copying a
    traced block with ``deepcopy`` would generate its code anew; this shares it.
    """
    made: dict[int, Any] = {}
    for path, module in block.named_modules():
        made[id(module)] = object.__new__(type(module))
        vars(made[id(module)]).update(vars(module))
        for name, own in {**module._parameters, **module._buffers}.items():
            if own is not None and id(own) not in made:
                value = state.get(f"{path}.{name}" if path else name, own).detach().clone()
                is_parameter = isinstance(own, nn.Parameter)
                made[id(own)] = nn.Parameter(value, own.requires_grad) if is_parameter else value
    for module in block.modules():
        own_values = vars(made[id(module)])
        for registry in _REGISTRIES:
            held = vars(module)[registry].items()
            own_values[registry] = {name: None if x is None else made[id(x)] for name, x in held}
        if not isinstance(module, fx.GraphModule):
            _copy_attributes(module, made)
    result: nn.Module = made[id(block)]
    return result


def _copy_attributes(module: nn.Module, made: dict[int, Any]) -> None:
    """Let attributes of the copy refer to the copy: bound methods, lists of weights or layers."""
    own = vars(made[id(module)])
    for name, value in vars(module).items():
        empty = isinstance(value, dict | list | set) and not value
        fixed = isinstance(value, tuple) and all(isinstance(part, _UNCHANGED) for part in value)
        if name not in _REGISTRIES and not isinstance(value, _UNCHANGED) and not (empty or fixed):
            # A tensor that is no parameter may be part of an autograd graph: no deepcopy.
            is_tensor = isinstance(value, Tensor)
            own[name] = value.detach().clone() if is_tensor else copy.deepcopy(value, made)


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_UNCHANGED = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, type)
