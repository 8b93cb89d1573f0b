"""``split``: from an ordinary model to a chain of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _assign_attr

from cocofl.chain.blocks import BlockChain, GraphBlock, Wiring, example_inputs
from cocofl.chain.cuts import Layout, default_cuts, fine_cuts, lay_out, named_cuts
from cocofl.chain.shared import handed_on
from cocofl.chain.trace import Trace, trace
from cocofl.errors import CannotSplit


def split(
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Tensor],
    *,
    fine: bool = False,
    cuts: Sequence[str] | None = None,
    by_running: bool = False,
) -> BlockChain:
    """Cut a model into blocks that can be trained or frozen one by one.

    The chain computes what the model computes, bit for bit, and shares its parameters, buffers and
    layers; ``chain.train()`` and ``chain.eval()`` switch the mode. By default a block is one of
    the model's own repeated modules (a residual block, a Transformer layer); a model without any
    is cut into its layers, as is every model with ``fine``. ``cuts`` names the modules (as in
    ``model.named_modules()``) or fx nodes after which to cut instead.

    ``example`` is a batch: a tensor, a tuple of them, or a dict by the names that ``forward`` has
    for them. A model that torch.fx cannot trace is run on it and recorded; ``by_running`` asks for
    that in any case.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> chain = split(model, torch.zeros(1, 4))
    >>> [chain.block_keys(i) for i in range(len(chain))]
    [('0.weight', '0.bias'), ('2.weight', '2.bias')]
    """
    if not isinstance(model, nn.Module):
        raise CannotSplit(f"the model is a {type(model).__name__}; expected an nn.Module")
    if fine and cuts is not None:
        raise CannotSplit("fine cuts everywhere and cuts says where to cut: give one of them")
    _check_is_ordinary(model)
    inputs = example_inputs(example)
    names = list(example) if isinstance(example, Mapping) else len(inputs)
    with torch.random.fork_rng(devices=[]):
        layout = lay_out(trace(model, names, inputs, by_running=by_running), inputs, model)
    if cuts is not None:
        places = named_cuts(layout, cuts)
    else:
        places = fine_cuts(layout) if fine else default_cuts(layout)
    layout = replace(layout, trace=handed_on(layout.trace, places))
    return _build(model, layout, places, inputs)


def _check_is_ordinary(model: nn.Module) -> None:
    """Refuse what PyTorch made of a model, and a model that is not made yet."""
    for path, module in model.named_modules():
        what = f"the module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotSplit(
                f"{what} is TorchScript, which has no layers to freeze; give the nn.Module that it "
                "was made of"
            )
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise CannotSplit(
                f"{what} is compiled (torch.compile); give the model it was made of, as in "
                "split(model._orig_mod, example)"
            )
        if any(nn.parameter.is_lazy(own) for own in module._parameters.values()):
            raise CannotSplit(
                f"{what}, a {type(module).__name__}, has no sizes before it has seen an input; "
                "call model(example) once before split"
            )


def graph_block(module: nn.Module, n_inputs: int) -> GraphBlock:
    """A module as a block with a graph, which shares its parameters, buffers and layers."""
    with torch.random.fork_rng(devices=[]):
        traced = trace(module, n_inputs)
    return _block(traced, traced.graph, module.state_dict(keep_vars=True))


def _build(
    model: nn.Module, layout: Layout, cuts: Sequence[int], inputs: tuple[Any, ...]
) -> BlockChain:
    traced = layout.trace
    saved = model.state_dict(keep_vars=True)
    blocks, wiring = [], []
    # The output, and constants that it returns, lie after the last step: the last block has them.
    for start, stop in pairwise([0, *cuts, len(traced.steps) + 1]):
        graph, wires = _cut_out(layout, start, stop)
        blocks.append(_block(traced, graph, saved))
        wiring.append(wires)

    keys, unused = _state_keys(blocks, saved)
    rest = nn.Module()
    for key, tensor in unused.items():
        _assign_attr(tensor, rest, key)
    named = [("", block) for block in blocks]
    chain = BlockChain(named, wiring=wiring, example=inputs, rest=rest, keys=keys)
    own = set(model.modules())
    for module in chain.modules():
        if module not in own:
            module.training = model.training
    return chain


def _cut_out(layout: Layout, start: int, stop: int) -> tuple[fx.Graph, Wiring]:
    """The steps ``start:stop`` as a graph, and what it takes and returns, main tensors first."""
    traced, places = layout.trace, layout.trace.places
    graph, copies, taken = fx.Graph(), dict[fx.Node, fx.Node](), []
    for node in traced.graph.nodes:
        used = any(start <= places[user] < stop for user in node.users)
        if (start == 0 and node.op == "placeholder") or (places[node] < start and used):
            taken.append(node)
    if start > 0:
        (main,) = layout.alive[start]
        taken.sort(key=lambda node: node is not main)
    for node in taken:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "output") and start <= places[node] < stop:
            copies[node] = graph.node_copy(node, lambda value: copies[value])
    if stop > len(traced.steps):
        result = traced.graph.output_node().args[0]
    else:
        (main,) = layout.alive[stop]
        made = [node for node in copies if places[node] >= start and node is not main]
        others = [node for node in made if any(places[user] >= stop for user in node.users)]
        result = (main, *others) if others else main
    graph.output(fx.node.map_arg(result, lambda value: copies[value]))
    returned = result if isinstance(result, tuple) and len(result) > 1 else (result,)
    if not all(isinstance(part, fx.Node) for part in returned):
        # A dict or the like counts as one value, the model's output.
        returned = (traced.graph.output_node(),)
    return graph, Wiring(_names(taken), _names(returned))


def _names(nodes: Iterable[Any]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _block(traced: Trace, graph: fx.Graph, saved: Mapping[str, Any]) -> GraphBlock:
    targets = [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]
    values = {target: traced.attributes[target] for target in targets}
    unsaved = [key for key, v in values.items() if isinstance(v, Tensor) and key not in saved]
    return GraphBlock(values, graph, unsaved)


def _state_keys(
    blocks: Sequence[nn.Module], saved: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """For each key of the model the one that its tensor has in the chain; and what no block has."""
    in_blocks = {
        key: tensor for block in blocks for key, tensor in block.state_dict(keep_vars=True).items()
    }
    key_of = {id(tensor): key for key, tensor in in_blocks.items()}
    keys, rest = {}, {}
    for key, value in saved.items():
        if key in in_blocks:
            keys[key] = key
        elif isinstance(value, Tensor):
            keys[key] = key_of.setdefault(id(value), key)
            if keys[key] == key:
                rest[key] = value
    return keys, rest
