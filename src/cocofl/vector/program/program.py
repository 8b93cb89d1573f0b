"""A chain as instructions for many devices, made once from what ``freeze`` knows of its blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from cocofl.chain import BlockChain
from cocofl.errors import CannotLower
from cocofl.freeze import Network
from cocofl.freeze.layers import TransposedProduct, is_plain
from cocofl.freeze.operations import ActOp, CatOp, LoweredBlock, MapOp, NodeOp, Operation, ValueName
from cocofl.freeze.scheme import named_values
from cocofl.freeze.traced_blocks import called_module
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.program.fused_instructions import fused
from cocofl.vector.program.instructions import (
    Attend,
    Concatenate,
    Drop,
    Instruction,
    Layer,
    LookUp,
    Node,
    Normalise,
    NormaliseSamples,
    Rectify,
    Score,
)
from cocofl.vector.program.node_calls import LOOPED, Modes, NodeCall, Piece, values_on_example
from cocofl.vector.program.row_layout import ChainLayout
from cocofl.vector.program.step_context import Environment, NormSpec, StepContext
from cocofl.vector.rounding.points import RoundingPoints, Sites


class Program:
    """The instructions of a chain, in order, and where its tensors lie."""

    def __init__(self, chain: BlockChain | Network, on: torch.device) -> None:
        network = Network.of(chain)
        chain, lowered = network.chain, network.with_dropout.blocks
        self.n_blocks = len(network)
        self.layout = ChainLayout.of(chain)
        self.sites = Sites(network)
        self.kernels = KernelSet.on(on)
        self.rounding_points = RoundingPoints(network, self.sites)
        self.inputs, self._outputs = lowered[0].inputs, lowered[-1].outputs
        self.instructions = _Builder(chain, lowered, self.layout, on).build(self.sites)
        nodes = [i.call for i in self.instructions if isinstance(i, Node)]
        each = [i for one in self.instructions for i in getattr(one, "layers", (one,))]
        self.layers = [i for i in each if isinstance(i, Layer | Normalise)]
        """Those that frozen devices have folded."""
        self.lone_norms = _lone_norms(self.layers, network)
        """BatchNorms that find one value per channel in a sample: of one sample no variance."""
        self._counted = [name for made in self.instructions for name in made.counted]
        self.channels = self.channels_in(chain)
        """Of the values whose number of channels matters, how many they have."""
        returned, shapes = self._outputs, network.with_dropout.shapes
        scores = shapes.get(returned, ()) if isinstance(returned, ValueName) else ()
        self.scores = scores[-1] if len(scores) > 1 else None
        """How many there are, where a network returns nothing but a tensor of them."""
        reads = Counter(segment for made in self.instructions for segment in made.learned)
        # Gradients of the others are summed up on the way.
        self.read_once = frozenset(
            segment for segment, n in reads.items() if segment is not None and n == 1
        )
        self.is_capturable = not any(
            node.way == LOOPED and (node.has_modes or node.mixes_samples) for node in nodes
        )

    def channels_in(self, narrow: BlockChain) -> dict[str, int]:
        """The same for a narrower network, whose values have the same names."""
        shapes = Network.of(narrow).with_dropout.shapes
        return {name: shapes[name][-1] for name in self._counted if name in shapes}

    def __call__(self, inputs: tuple[Any, ...], step: StepContext) -> Any:
        """What the model returns, for all devices."""
        env: Environment = dict(zip(self.inputs, inputs, strict=True))
        for instruction in self.instructions:
            env[instruction.name] = instruction(env, step)
        return pytree.tree_map(
            lambda leaf: env[leaf] if isinstance(leaf, ValueName) else leaf, self._outputs
        )


def _lone_norms(layers: Sequence[Layer | Normalise], network: Network) -> list[Layer | Normalise]:
    assert network.chain.example is not None
    shapes, samples = network.with_dropout.shapes, len(network.chain.example[0])
    normed = [layer for layer in layers if layer.norm is not None]
    return [i for i in normed if math.prod(shapes[i.name]) == samples * shapes[i.name][1]]


class _Builder:
    def __init__(
        self,
        chain: BlockChain,
        lowered: tuple[LoweredBlock, ...],
        layout: ChainLayout,
        on: torch.device,
    ) -> None:
        self._lowered, self._slots = lowered, layout
        self._graphs = [low.graph(block) for low, block in zip(lowered, chain.blocks, strict=True)]
        self._modes, self._on = [Modes(graph) for graph in self._graphs], on
        assert chain.example is not None
        self._example = values_on_example(chain.example, lowered, self._modes)
        self._inlined: dict[str, tuple[Piece, ...]] = {}
        self._made: list[Instruction] = []

    def build(self, sites: Sites) -> list[Instruction]:
        """All instructions."""
        for block, low in enumerate(self._lowered):
            for op in low.operations:
                self._add(op, block)
        for leaf in named_values(self._lowered[-1].outputs):
            if leaf in self._inlined:
                self._materialise(leaf, int(leaf.partition(".")[0]))
        for modes in self._modes:
            modes.move(self._on)
        return fused(self._made, self._lowered, sites)

    def _add(self, op: Operation, block: int) -> None:
        if isinstance(op, NodeOp):
            self._add_node(op, block)
            return
        for name in op.inputs:
            if name in self._inlined:
                self._materialise(name, block)
        if isinstance(op, ActOp):
            self._made.append(Rectify(op.name, block, op))
        elif isinstance(op, CatOp):
            self._made.append(Concatenate(op.name, block, op))
        elif isinstance(op.kind, TransposedProduct):
            raise CannotLower(
                f"{op.layer!r} holds its weight as (in, out), and weights are stacked as (out, in)"
            )
        else:
            self._made.append(self._layer(op, block))

    def _materialise(self, name: str, block: int) -> None:
        """Make a value for all devices that so far was made by those who read it."""
        call = NodeCall(self._inlined.pop(name), self._slots)
        call.try_out(self._example)
        self._made.append(Node(name, block, call))

    def _layer(self, op: MapOp, block: int) -> Layer:
        find, graph = self._slots.parameters.find, self._graphs[block]
        norm = None if op.norm is None else self._norm(graph.get_submodule(op.norm))
        if op.layer is None:
            return Layer(op.name, block, op, norm=norm)
        layer: Any = graph.get_submodule(op.layer)
        weight, bias = find(layer.weight), find(layer.bias)
        return Layer(op.name, block, op, weight=weight, bias=bias, norm=norm)

    def _norm(self, norm: nn.Module) -> NormSpec:
        assert isinstance(norm, _BatchNorm)
        learned, tracked = self._slots.parameters.find, self._slots.statistics.find
        seen = norm.num_batches_tracked
        return NormSpec(
            learned(norm.weight),
            learned(norm.bias),
            tracked(norm.running_mean),
            tracked(norm.running_var),
            norm.eps,
            norm.momentum,
            0 if seen is None else int(seen),
        )

    def _add_node(self, op: NodeOp, block: int) -> None:
        if op.drops:
            node = op.nodes[-1]
            module = called_module(node, self._graphs[block])
            function = node.target if module is None else type(module)
            self._made.append(Drop(op.name, block, op.inputs[0], float(op.drops), function))
            return
        if (own := self._known_layer(op, block)) is not None:
            self._made.append(own)
            return
        pieces: dict[str, Piece] = {}
        for name in op.inputs:
            pieces |= {p.op.name: p for p in self._inlined.get(name, ())}
        pieces[op.name] = Piece(op, self._modes[block])
        call = NodeCall(tuple(pieces.values()), self._slots)
        if not isinstance(self._example[op.name], Tensor) or not call.inputs:
            self._inlined[op.name] = call.pieces
            return
        call.try_out(self._example)
        self._made.append(Attend.instead_of(Node(op.name, block, call), op))

    def _known_layer(self, op: NodeOp, block: int) -> Instruction | None:  # noqa: PLR0911
        """An instruction of its own for a layer that is plainly PyTorch's."""
        node = op.nodes[-1]
        if len(op.nodes) > 1 or node.op != "call_module" or len(op.inputs) != 1:
            return None
        if len(node.args) != 1 or node.kwargs or op.inputs[0] in self._inlined:
            return None
        layer: Any = self._graphs[block].get_submodule(str(node.target))
        x = self._example[op.inputs[0]]
        where = op.name, block, op.inputs[0]
        find = self._slots.parameters.find
        weight, bias = (find(getattr(layer, name, None)) for name in ("weight", "bias"))
        if is_plain(layer, nn.BatchNorm1d, nn.BatchNorm2d) and x.ndim in {2, 3, 4}:
            return Normalise(*where, norm=self._norm(layer))
        if is_plain(layer, nn.Linear) and x.ndim > 1:
            return Score(*where, weight=weight, bias=bias)
        if is_plain(layer, nn.LayerNorm, nn.GroupNorm):
            return NormaliseSamples(*where, layer, weight=weight, bias=bias)
        if not is_plain(layer, nn.Embedding) or weight is None:
            return None
        special = layer.max_norm is not None or layer.scale_grad_by_freq
        return None if special else LookUp(*where, layer.padding_idx, weight=weight)
