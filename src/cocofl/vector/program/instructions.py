"""The operations of a stacked chain, each for all devices at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cocofl.freeze.kernels import Geometry
from cocofl.freeze.operations import ActOp, CatOp, MapOp, NodeOp
from cocofl.freeze.scheme import GRADIENT, OUTPUT
from cocofl.numerics import StackedGrid
from cocofl.vector.kernels import Activation, Dropping
from cocofl.vector.kernels.plain import normalise_leading
from cocofl.vector.kernels.rows import side_by_side
from cocofl.vector.program.finishing import Finish, finished
from cocofl.vector.program.node_calls import MAPPED, MERGED, NodeCall
from cocofl.vector.program.row_layout import Segment
from cocofl.vector.program.stacked_layers import Weights, linear_layers, stacked_layer
from cocofl.vector.program.step_context import Environment, NormSpec, StepContext


class Instruction(ABC):
    """Computes one value."""

    name: str
    block: int

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """The parameters that it reads."""
        return ()

    @property
    def counted(self) -> tuple[str, ...]:
        """The values whose number of channels changes what it does to each of them."""
        return ()

    @abstractmethod
    def __call__(self, env: Environment, step: StepContext) -> Any:
        """The value, for all devices."""


class Named(Instruction):
    """Goes by the name of a part of it, and belongs to that one's block."""

    @property
    @abstractmethod
    def part(self) -> Instruction | NodeCall:
        """That part."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """The value it makes."""
        return self.part.name

    @property
    def block(self) -> int:  # type: ignore[override]
        """Whose it is."""
        return self.part.block


class OfOperation(Instruction):
    """Computes what one lowered operation does, under that operation's name."""

    op: MapOp | ActOp | CatOp

    @property
    def name(self) -> str:  # type: ignore[override]
        """The value it makes."""
        return self.op.name


@dataclass(frozen=True)
class Layer(OfOperation):
    """A convolution, linear layer or lone BatchNorm, with what was fused into it."""

    op: MapOp
    block: int
    weight: Segment | None
    bias: Segment | None
    norm: NormSpec | None

    @property
    def geometry(self) -> Geometry | None:
        """None for a product along the last axis."""
        return self.op.geometry

    @property
    def reshapes(self) -> bool:
        """Whether kernels have its values in another shape than others."""
        return self.op.kind is not None and self.op.kind.reshapes

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        own = () if self.norm is None else (self.norm.weight, self.norm.bias)
        return self.weight, self.bias, *own

    @property
    def image(self) -> bool:
        """Whether channels come before height and width; a linear layer's come last."""
        return self.geometry is not None

    @property
    def activation(self) -> Activation:
        """None, or the ReLU that it took in."""
        act = self.op.activation
        return Activation(False) if act is None else Activation(True, act.upper)

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        y = self._to_image(step.coded(env, self.op.x, self.block))
        if self.weight is not None:
            weights = step.weights[self.name]
            if self.reshapes:
                weights = Weights(*map(self._to_image, weights))
            asked, beside = step.asked(self.block), step.beside(self.weight)
            y = stacked_layer(y, weights, self.geometry, asked, step.kernels, beside)
        return self._from_image(self.finish(y, env, step))

    def _to_image(self, x: Tensor) -> Tensor:
        return x if self.op.kind is None else self.op.kind.to_image(x)

    def _from_image(self, y: Tensor) -> Tensor:
        return y if self.op.kind is None else self.op.kind.from_image(y)

    def kernel_grid(self, step: StepContext) -> StackedGrid | None:
        """What its kernel rounds gradients to: grids that are known, with no ReLU before them."""
        point = step.point(GRADIENT, self.name, self.block)
        return None if point.must_measure or self.activation.present else point.known()

    def finish(
        self, y: Tensor, env: Environment, step: StepContext, *, is_begun: bool = False
    ) -> Tensor:
        """All that follows the product, or (``is_begun``) what :class:`Linears` leaves of it."""
        op = self.op
        bias = None if self.bias is None else step.leaves[self.bias]
        norm = None
        if self.norm is not None:
            norm = step.norm(
                self.norm, op.name, self.block, None if bias is None else bias.detach()
            )
        gradient = step.point(GRADIENT, op.name, self.block)
        finish = Finish(
            step.kernels,
            self.activation,
            step.rows(y, image=self.image),
            step.asked(self.block).value,
            step.point(OUTPUT, op.name, self.block),
            gradient if not is_begun or self.kernel_grid(step) is None else gradient.idle(),
            is_begun,
        )
        addend = None
        if op.addend is not None:
            addend = self._to_image(step.coded(env, op.addend, self.block))
        offset = bias if norm is None and not is_begun else None
        return finished(y, addend, offset, norm, finish, image=self.image)


@dataclass(frozen=True)
class Linears(Named):
    """Linear layers of the same input: read once where a kernel does that, else in turn."""

    layers: tuple[Layer, ...]
    shares: bool
    """Whether others read that input, too."""

    @property
    def part(self) -> Layer:
        """The layer that makes the last value."""
        return self.layers[-1]

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return tuple(segment for layer in self.layers for segment in layer.learned)

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`; the other values are put where they are read, too."""
        first = self.layers[0]
        x = step.coded(env, first.op.x, self.block)
        weights = [step.weights[layer.name] for layer in self.layers]
        kernels = step.kernels.linear(x, weights[0].own.shape[1])
        if kernels is None:
            env |= {layer.name: layer(env, step) for layer in self.layers}
        else:
            biases = [None if one.bias is None else step.leaves[one.bias] for one in self.layers]
            raw = env[first.op.x] if self.shares else None
            grids = [one.kernel_grid(step) for one in self.layers]
            found, passed = linear_layers(x, weights, biases, first.activation, kernels, raw, grids)
            if self.shares:
                env[first.op.x] = passed
            for layer, y in zip(self.layers, found, strict=True):
                env[layer.name] = layer.finish(y, env, step, is_begun=True)
        last: Tensor = env[self.name]
        return last


@dataclass(frozen=True)
class Rectify(OfOperation):
    """A ReLU that no layer took in."""

    op: ActOp
    block: int

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        x, upper = env[self.op.x], self.op.activation.upper
        # Not a clamp, whose gradient at the very bounds is another.
        y = F.relu(x) if upper is None else F.hardtanh(x, 0.0, upper)
        settled: Tensor = step.settle(self.name, y, self.block)
        return settled


@dataclass(frozen=True)
class Concatenate(OfOperation):
    """Feature maps side by side."""

    op: CatOp
    block: int

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        parts = [step.coded(env, name, self.block) for name in self.op.inputs]
        dim = self.op.dim + 1 if self.op.dim >= 0 else self.op.dim
        settled: Tensor = step.settle(self.name, side_by_side(parts, dim), self.block)
        return settled


@dataclass(frozen=True)
class Normalise(Instruction):
    """A BatchNorm that stays in float: of vectors, of sequences, or without statistics."""

    name: str
    block: int
    x: str
    norm: NormSpec

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return self.norm.weight, self.norm.bias

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        x = env[self.x]
        last = x.movedim(2, -1) if x.ndim == 4 else x  # rows end with their channels
        finish = Finish(
            step.kernels,
            Activation(False),
            step.rows(last),
            step.asked(self.block).value,
            step.point(OUTPUT, self.name, self.block),
            step.point(GRADIENT, self.name, self.block),
        )
        norm = step.norm(self.norm, self.name, self.block, None)
        y = finished(last, None, None, norm, finish)
        return y.movedim(-1, 2) if x.ndim == 4 else y


@dataclass(frozen=True)
class Score(Instruction):
    """The classifier: frozen perhaps, but never quantized."""

    name: str
    block: int
    x: str
    weight: Segment
    bias: Segment | None

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return self.weight, self.bias

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        x, own = env[self.x], step.leaves[self.weight]
        weights = Weights(own, own.detach(), own.detach())
        asked, beside = step.asked(self.block), step.beside(self.weight)
        y = stacked_layer(x, weights, None, asked, step.kernels, beside)
        if self.bias is not None:
            bias = step.leaves[self.bias].to(y.dtype)
            y = y + bias.view(len(bias), *[1] * (y.ndim - 2), -1)
        settled: Tensor = step.settle(self.name, y, self.block)
        return settled


@dataclass(frozen=True)
class NormaliseSamples(Instruction):
    """LayerNorm and GroupNorm: each sample by itself, then each device's own factors."""

    name: str
    block: int
    x: str
    weight: Segment | None
    bias: Segment | None
    layer: nn.LayerNorm | nn.GroupNorm

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return self.weight, self.bias

    @property
    def is_over_channels(self) -> bool:
        """Whether it is a LayerNorm of the last axis."""
        return isinstance(self.layer, nn.LayerNorm) and len(self.layer.normalized_shape) == 1

    @property
    def counted(self) -> tuple[str, ...]:
        """See :class:`Instruction`."""
        return (self.name,) if self.is_over_channels else ()

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        x: Tensor = env[self.x]
        layer, channels = self.layer, step.channels.get(self.name)
        after = x.ndim - 3 if isinstance(layer, nn.GroupNorm) else 0
        if channels is not None:
            y = normalise_leading(x, channels, layer.eps)
        elif isinstance(layer, nn.LayerNorm):
            y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        else:
            y = F.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps)
            y = y.unflatten(0, x.shape[:2])
        for segment, apply in ((self.weight, torch.mul), (self.bias, torch.add)):
            if segment is not None:
                own = step.leaves[segment].to(y.dtype)
                ones = [1] * (y.ndim - own.ndim - after)
                y = apply(y, own.view(len(own), *ones, *own.shape[1:], *[1] * after))
        settled: Tensor = step.settle(self.name, y, self.block)
        return settled


@dataclass(frozen=True)
class LookUp(Instruction):
    """An embedding: all devices' tables below each other."""

    name: str
    block: int
    x: str
    weight: Segment
    padding: int | None

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return (self.weight,)

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        tokens, tables = env[self.x], step.leaves[self.weight]
        devices, rows, _ = tables.shape
        first = torch.arange(devices, device=tokens.device) * rows
        shifted = tokens + first.view(-1, *[1] * (tokens.ndim - 1))
        y = F.embedding(shifted, tables.reshape(devices * rows, -1))
        if self.padding is not None:
            y = torch.where((tokens == self.padding).unsqueeze(-1), y.detach(), y)
        settled: Tensor = step.settle(self.name, y, self.block)
        return settled


@dataclass(frozen=True)
class Drop(Instruction):
    """Dropout on the devices that train the block; each sample draws for itself."""

    name: str
    block: int
    x: str
    node: fx.Node
    module: nn.Module | None

    @property
    def p(self) -> float:
        """How likely an element is dropped."""
        if self.module is not None:
            return float(self.module.p)  # type: ignore[arg-type]
        given: dict[str, Any] = dict(zip(("input", "p"), self.node.args, strict=False))
        return float((given | self.node.kwargs).get("p", 0.5))

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is dropped by itself, and only some of them are."""
        own = F.dropout if self.module is None else nn.Dropout
        kind = self.node.target if self.module is None else type(self.module)
        return kind is own and 0.0 < self.p < 1.0

    def dropping(self, step: StepContext) -> Dropping | None:
        """On which devices it is active now."""
        return None if step.averages else Dropping(self.p, step.roles.with_batch[self.block])

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        x: Tensor = env[self.x]
        dropping = self.dropping(step)
        if dropping is None:
            return x
        if self.is_elementwise and (kernels := step.kernels.chains(x)) is not None:
            return kernels.drop(x, dropping)
        merged = x.flatten(0, 1)
        if self.module is not None:
            # The functional form: the module itself may work in place.
            y = getattr(F, _DROPOUTS[type(self.module).__name__])(merged, p=self.p, training=True)
        else:
            assert callable(self.node.target)
            y = self.node.target(merged, p=self.p, training=True)
        active = dropping.active.view(-1, *[1] * (x.ndim - 1))
        return torch.where(active, y.unflatten(0, x.shape[:2]), x)


_DROPOUTS = {
    "Dropout": "dropout",
    "Dropout1d": "dropout1d",
    "Dropout2d": "dropout2d",
    "Dropout3d": "dropout3d",
    "AlphaDropout": "alpha_dropout",
    "FeatureAlphaDropout": "feature_alpha_dropout",
}


@dataclass(frozen=True)
class Node(Named):
    """Anything else."""

    call: NodeCall

    @property
    def part(self) -> NodeCall:
        """See :class:`Named`."""
        return self.call

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return tuple(held.segment for held in self.call.held if held.learns)

    def __call__(self, env: Environment, step: StepContext) -> Any:
        """See :class:`Instruction`."""
        call = self.call
        values = {name: env[name] for name in call.inputs}
        if call.way == MERGED:
            return step.settle(self.name, call.merged(values), self.block)
        held = {
            h: step.leaves[h.segment] if h.learns else step.statistics[h.segment] for h in call.held
        }
        if call.way == MAPPED:
            return step.settle(self.name, call.mapped(values, held), self.block)
        counts = step.counts if call.mixes_samples else None
        result = call.looped(values, held, step.modes[self.block], counts)
        return step.settle(self.name, result, self.block)


@dataclass(frozen=True)
class NormaliseSum(Named):
    """A LayerNorm over channels, and what comes before it if only the norm reads that.

    One kernel drops, adds and normalises; without it, one instruction follows the other.
    """

    norm: NormaliseSamples
    total: Node | None
    drop: Drop | None
    x: str
    """What is dropped from, added to, and normalised."""
    addend: str | None

    @property
    def part(self) -> NormaliseSamples:
        """See :class:`Named`."""
        return self.norm

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """See :class:`Instruction`."""
        return self.norm.learned

    @property
    def counted(self) -> tuple[str, ...]:
        """See :class:`Instruction`."""
        return self.norm.counted

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """See :class:`Instruction`."""
        x: Tensor = env[self.x]
        kernels = step.kernels.chains(x)
        if kernels is None:
            for part in (self.drop, self.total):
                if part is not None:
                    env[part.name] = part(env, step)
            return self.norm(env, step)
        addend = None if self.addend is None else env[self.addend]
        dropping = None if self.drop is None else self.drop.dropping(step)
        weight, bias = (
            None if segment is None else step.leaves[segment] for segment in self.norm.learned
        )
        channels, eps = step.channels.get(self.name), self.norm.layer.eps
        y = kernels.normalise(x, addend, dropping, weight, bias, eps, channels)
        settled: Tensor = step.settle(self.name, y, self.block)
        return settled


@dataclass(frozen=True)
class Attend(Instruction):
    """Each position gathers from all others: by a kernel of our own where there is one."""

    name: str
    block: int
    query: str
    key: str
    value: str
    mask: str | None
    scale: float | None
    """None for 1 over the root of a head's channels."""

    @classmethod
    def instead_of(cls, node: Node, op: NodeOp) -> Attend | Node:
        """The same as ``node``, if all that it does is attention whose weights are not dropped."""
        call = op.nodes[-1]
        alone = len(op.nodes) == len(node.call.pieces) == 1 and node.call.way == MERGED
        if not alone or call.target is not F.scaled_dot_product_attention:
            return node
        given: dict[str, Any] = dict(zip(_ATTENTION, call.args, strict=False)) | call.kwargs
        tensors = [given.pop(name, None) for name in _ATTENTION[:4]]
        scale = given.pop("scale", None)
        if any(given.values()) or isinstance(scale, fx.Node):
            return node
        query, key, value, mask = (op.names.get(x) for x in tensors)
        if query is None or key is None or value is None or (mask is None) != (tensors[3] is None):
            return node
        return cls(node.name, node.block, query, key, value, mask, scale)

    @property
    def counted(self) -> tuple[str, ...]:
        """See :class:`Instruction`."""
        return (self.query,) if self.scale is None else ()

    def __call__(self, env: Environment, step: StepContext) -> Any:
        """See :class:`Instruction`."""
        queries = self._made_up_for(env[self.query], step.channels.get(self.query))
        query, key, value = (x.flatten(0, 1) for x in (queries, env[self.key], env[self.value]))
        mask = None if self.mask is None else env[self.mask].flatten(0, 1)
        attend = step.kernels.attention(query, key, value, mask)
        if attend is None:
            y = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        else:
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            y = attend(query, key, value, mask, scale)
        return step.settle(self.name, y.unflatten(0, queries.shape[:2]), self.block)

    def _made_up_for(self, query: Tensor, channels: Tensor | None) -> Tensor:
        """Larger where a head has fewer channels: the scale is one number for all devices."""
        if channels is None or self.scale is not None:
            return query
        factor = (query.shape[-1] / channels.to(query.dtype)).sqrt()
        return query * factor.view(-1, *[1] * (query.ndim - 1))


_ATTENTION = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
)  # fmt: skip
