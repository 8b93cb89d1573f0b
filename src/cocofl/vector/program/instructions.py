"""The operations of a stacked chain, each for all devices at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cocofl.freeze.lowering import arguments
from cocofl.freeze.operations import ActOp, CatOp, MapOp, NodeOp
from cocofl.freeze.scheme import GRADIENT, OUTPUT
from cocofl.numerics import StackedGrid
from cocofl.vector.kernels.base import (
    NO_ACTIVATION,
    Activation,
    Dropping,
    Moments,
    side_by_side,
)
from cocofl.vector.kernels.plain import normalise_leading
from cocofl.vector.program.node_calls import MAPPED, MERGED, NodeCall
from cocofl.vector.program.row_layout import Segment
from cocofl.vector.program.stacked_layers import (
    Weights,
    finishes_what_it_reads,
    linear_layers,
    stacked_layer,
)
from cocofl.vector.program.step_context import (
    Environment,
    Finish,
    NormSpec,
    StepContext,
    finished,
    left_to_the_reader,
)
from cocofl.vector.rounding.points import CONVERSION
from cocofl.vector.rounding.table import ActivePoint


@dataclass(frozen=True)
class Instruction(ABC):
    """Computes one value of a block."""

    settles: ClassVar[bool] = True
    """Whether the value is to be rounded: no layer does that."""
    name: str
    block: int
    weight: Segment | None = field(default=None, kw_only=True)
    bias: Segment | None = field(default=None, kw_only=True)
    norm: NormSpec | None = field(default=None, kw_only=True)
    """A BatchNorm that is part of it."""

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """The parameters that it reads."""
        own = () if self.norm is None else (self.norm.weight, self.norm.bias)
        return self.weight, self.bias, *own

    @property
    def counted(self) -> tuple[str, ...]:
        """The values whose number of channels changes what it does to each of them."""
        return ()

    def __call__(self, env: Environment, step: StepContext) -> Tensor:
        """The value, for all devices."""
        y = self._value(env, step)
        return step.settle(self.name, y, self.block) if self.settles else y

    @abstractmethod
    def _value(self, env: Environment, step: StepContext) -> Tensor:
        """The same, not yet rounded unless it rounds by itself."""


@dataclass(frozen=True)
class Layer(Instruction):
    """A convolution, linear layer or lone BatchNorm, with what was fused into it."""

    settles = False
    op: MapOp
    reader: Layer | None = None
    """The layer that alone reads the value, and may have a kernel that finishes it as it reads."""

    @property
    def activation(self) -> Activation:
        """None, or the ReLU that it took in."""
        act = self.op.activation
        return NO_ACTIVATION if act is None else Activation(True, act.upper)

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        y, moments = self._to_image(step.coded(env, self.op.x, self.block)), None
        if self.weight is not None:
            weights = Weights(*map(self._to_image, step.weights[self.name]))
            asked, beside = step.asked(self.block), step.beside(self.weight)
            y, moments = stacked_layer(
                y, weights, self.op.geometry, asked, step.kernels, beside,
                reading=step.readings.pop(self.op.x, None),
                valid=None if self.norm is None or len(y[0]) != step.batch else step.valid,
            )  # fmt: skip
        if self._leaves_the_rest(y, step):
            return self._unfinished(y, moments, step)
        y = self.finish(y, env, step, moments)
        return y if self.op.kind is None else self.op.kind.from_image(y)

    def _leaves_the_rest(self, y: Tensor, step: StepContext) -> bool:
        """Whether the reader finishes the value: nothing else must be known of it before."""
        reader = self.reader
        if reader is None or reader.weight is None or reader.op.geometry is None:
            return False
        read_as_it_is = step.point(CONVERSION, self.name, reader.block).is_idle
        known = not step.point(OUTPUT, self.name, self.block).must_measure
        shape, geometry = reader.weight.shape, reader.op.geometry
        return known and read_as_it_is and finishes_what_it_reads(y, shape, geometry, step.kernels)

    def _unfinished(self, y: Tensor, moments: Moments | None, step: StepContext) -> Tensor:
        finish = self._what_follows(y, step, moments)
        y, step.readings[self.name] = left_to_the_reader(y, finish)
        return y

    def _to_image(self, x: Tensor) -> Tensor:
        return x if self.op.kind is None else self.op.kind.to_image(x)

    def kernel_grids(self, step: StepContext) -> tuple[StackedGrid | None, StackedGrid | None]:
        """What its kernel rounds its value and the gradient of that to, as far as it is known.

        No ReLU may stand before a gradient that it rounds.
        """
        value, gradient = (step.point(k, self.name, self.block) for k in (OUTPUT, GRADIENT))
        left = gradient.must_measure or self.activation.present
        return None if value.must_measure else value.known, None if left else gradient.known

    def finish(
        self,
        y: Tensor,
        env: Environment,
        step: StepContext,
        moments: Moments | None = None,
        *,
        is_begun: bool = False,
    ) -> Tensor:
        """All that follows the product, or (``is_begun``) what :class:`Linears` leaves of it."""
        finish = replace(self._what_follows(y, step, moments), is_begun=is_begun)
        if is_begun and self.kernel_grids(step)[1] is not None:
            finish = replace(finish, gradient=ActivePoint(step.kernels))
        addend = None
        if self.op.addend is not None:
            addend = self._to_image(step.coded(env, self.op.addend, self.block))
        offset = step.leaf(self.bias) if self.norm is None and not is_begun else None
        return finished(y, finish, addend, offset, image=self.op.geometry is not None)

    def _what_follows(self, y: Tensor, step: StepContext, moments: Moments | None) -> Finish:
        bias, image = step.leaf(self.bias), self.op.geometry is not None
        norm = None if self.norm is None else step.norm(self.norm, self.name, self.block, bias)
        finish = step.finish(self.name, y, self.block, image=image)
        return replace(finish, activation=self.activation, norm=norm, moments=moments)


@dataclass(frozen=True)
class Linears(Instruction):
    """Linear layers of the same input: read once where a kernel does that, else in turn."""

    settles = False
    layers: tuple[Layer, ...]
    shares: bool
    """Whether others read that input, too."""

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """Those of its layers."""
        return tuple(segment for layer in self.layers for segment in layer.learned)

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        """The last layer's value; the others are put where they are read, too."""
        first = self.layers[0]
        x = step.coded(env, first.op.x, self.block)
        weights = [step.weights[layer.name] for layer in self.layers]
        kernels = step.kernels.linear(x, weights[0].own.shape[1])
        if kernels is None:
            env |= {layer.name: layer(env, step) for layer in self.layers}
        else:
            biases = [step.leaf(layer.bias) for layer in self.layers]
            raw = env[first.op.x] if self.shares else None
            grids = [layer.kernel_grids(step) for layer in self.layers]
            found, passed = linear_layers(
                x, weights, biases, first.activation, kernels, raw, grids, step.asked(self.block)
            )
            if self.shares:
                env[first.op.x] = passed
            for layer, y in zip(self.layers, found, strict=True):
                env[layer.name] = layer.finish(y, env, step, is_begun=True)
        last: Tensor = env[self.name]
        return last


@dataclass(frozen=True)
class Rectify(Instruction):
    """A ReLU that no layer took in."""

    op: ActOp

    def _value(self, env: Environment, step: StepContext) -> Tensor:  # noqa: ARG002
        x, upper = env[self.op.x], self.op.activation.upper
        # Not a clamp, whose gradient at the very bounds is another.
        return F.relu(x) if upper is None else F.hardtanh(x, 0.0, upper)


@dataclass(frozen=True)
class Concatenate(Instruction):
    """Feature maps side by side."""

    op: CatOp

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        parts = [step.coded(env, name, self.block) for name in self.op.inputs]
        dim = self.op.dim + 1 if self.op.dim >= 0 else self.op.dim
        return side_by_side(parts, dim)


@dataclass(frozen=True)
class Normalise(Instruction):
    """A BatchNorm that stays in float: of vectors, of sequences, or without statistics."""

    settles = False
    x: str

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        assert self.norm is not None
        x = env[self.x]
        last = x.movedim(2, -1) if x.ndim == 4 else x  # rows end with their channels
        norm = step.norm(self.norm, self.name, self.block, None)
        y = finished(last, replace(step.finish(self.name, last, self.block), norm=norm))
        return y.movedim(-1, 2) if x.ndim == 4 else y


@dataclass(frozen=True)
class Score(Instruction):
    """The classifier: frozen perhaps, but never quantized."""

    x: str

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        assert self.weight is not None
        own, bias = step.leaves[self.weight], step.leaf(self.bias)
        weights = Weights(own, own.detach(), own.detach())
        asked, beside = step.asked(self.block), step.beside(self.weight)
        y, _ = stacked_layer(env[self.x], weights, None, asked, step.kernels, beside)
        if bias is not None:
            y = y + bias.to(y.dtype).view(len(bias), *[1] * (y.ndim - 2), -1)
        return y


@dataclass(frozen=True)
class NormaliseSamples(Instruction):
    """LayerNorm and GroupNorm: each sample by itself, then each device's own factors.

    A LayerNorm over channels takes in the sum before it, and the dropout before that, if nobody
    else reads them: one kernel drops, adds and normalises. Without it one follows the other.
    """

    settles = False
    x: str
    layer: nn.LayerNorm | nn.GroupNorm
    total: Node | None = None
    drop: Drop | None = None

    @property
    def is_over_channels(self) -> bool:
        """Whether it is a LayerNorm of the last axis."""
        return isinstance(self.layer, nn.LayerNorm) and len(self.layer.normalized_shape) == 1

    @property
    def counted(self) -> tuple[str, ...]:
        """Its own value."""
        return (self.name,) if self.is_over_channels else ()

    def _summands(self) -> tuple[str, ...]:
        """What is dropped from, if anything is, and what is added to it."""
        given = (self.x,) if self.total is None else self.total.call.inputs
        if self.drop is None:
            return given
        return self.drop.x, *(name for name in given if name != self.drop.name)

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        x, *addend = (env[name] for name in self._summands())
        kernels = step.kernels.chains(x) if self.is_over_channels else None
        if kernels is None:
            for part in (self.drop, self.total):
                if part is not None:
                    env[part.name] = part(env, step)
            return step.settle(self.name, self._plain(env[self.x], step), self.block)
        dropping = None if self.drop is None else self.drop.dropping(step)
        weight, bias = step.leaf(self.weight), step.leaf(self.bias)
        added, channels = addend[0] if addend else None, step.channels.get(self.name)
        asked, eps = step.asked(self.block).value, self.layer.eps
        point = step.point(OUTPUT, self.name, self.block)
        grid = None if point.must_measure else point.known
        y = kernels.normalise(x, added, dropping, weight, bias, eps, asked, channels, grid)
        return step.settle(self.name, y, self.block, is_rounded=grid is not None)

    def _plain(self, x: Tensor, step: StepContext) -> Tensor:
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
        return y


@dataclass(frozen=True)
class LookUp(Instruction):
    """An embedding: all devices' tables below each other."""

    x: str
    padding: int | None

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        assert self.weight is not None
        tokens, tables = env[self.x], step.leaves[self.weight]
        devices, rows, _ = tables.shape
        first = torch.arange(devices, device=tokens.device) * rows
        shifted = tokens + first.view(-1, *[1] * (tokens.ndim - 1))
        y = F.embedding(shifted, tables.reshape(devices * rows, -1))
        if self.padding is not None:
            y = torch.where((tokens == self.padding).unsqueeze(-1), y.detach(), y)
        return y


@dataclass(frozen=True)
class Drop(Instruction):
    """Dropout on the devices that train the block; each sample draws for itself."""

    settles = False
    x: str
    p: float
    function: Any
    """PyTorch's, or the class of its module."""

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is dropped by itself, and only some of them are."""
        return self.function in (F.dropout, nn.Dropout) and 0.0 < self.p < 1.0

    def dropping(self, step: StepContext) -> Dropping | None:
        """On which devices it is active now."""
        return None if step.averages else Dropping(self.p, step.roles.with_batch[self.block])

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        x: Tensor = env[self.x]
        dropping = self.dropping(step)
        if dropping is None:
            return x
        if self.is_elementwise and (kernels := step.kernels.chains(x)) is not None:
            dropped: Tensor = kernels.drop(x, dropping, step.asked(self.block).value)
            return dropped
        merged = x.flatten(0, 1)
        if isinstance(self.function, type):
            y = self.function(self.p)(merged)  # the module itself may work in place
        else:
            y = self.function(merged, p=self.p, training=True)
        active = dropping.active.view(-1, *[1] * (x.ndim - 1))
        return torch.where(active, y.unflatten(0, x.shape[:2]), x)


@dataclass(frozen=True)
class Node(Instruction):
    """Anything else."""

    call: NodeCall

    @property
    def learned(self) -> tuple[Segment | None, ...]:
        """Those that its modules hold."""
        return tuple(held.segment for held in self.call.held if held.learns)

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        call = self.call
        values = {name: env[name] for name in call.inputs}
        held = {
            h: step.leaves[h.segment] if h.learns else step.statistics[h.segment] for h in call.held
        }
        if call.way == MERGED:
            y = call.merged(values)
        elif call.way == MAPPED:
            y = call.mapped(values, held)
        else:
            counts = step.counts if call.mixes_samples else None
            y = call.looped(values, held, step.modes[self.block], counts)
        return y


@dataclass(frozen=True)
class Attend(Instruction):
    """Each position gathers from all others: by a kernel of our own where there is one."""

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
        given = arguments(call, *_ATTENTION)
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
        """The queries, where the scale depends on their channels."""
        return (self.query,) if self.scale is None else ()

    def _value(self, env: Environment, step: StepContext) -> Tensor:
        queries, channels = env[self.query], step.channels.get(self.query)
        if channels is not None and self.scale is None:
            # Larger where a head has fewer channels: the scale is one number for all devices.
            factor = (queries.shape[-1] / channels.to(queries.dtype)).sqrt()
            queries = queries * factor.view(-1, *[1] * (queries.ndim - 1))
        query, key, value = (x.flatten(0, 1) for x in (queries, env[self.key], env[self.value]))
        mask = None if self.mask is None else env[self.mask].flatten(0, 1)
        attend = step.kernels.attention(query, key, value, mask)
        if attend is None:
            y = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        else:
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            y = attend(query, key, value, mask, scale, step.asked(self.block).value)
        return torch.unflatten(y, 0, queries.shape[:2])


_ATTENTION = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
)  # fmt: skip
