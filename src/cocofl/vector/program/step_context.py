"""What the instructions of a stacked chain need while they run, and how they finish a value.

What follows a layer are norm, addition, activation and rounding. A device that trains the layer
normalises with its batch; one that has it frozen uses what was folded; both are the same two
numbers per channel, so one computation serves all. A value that no layer made is at most rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocofl.freeze.scheme import GRADIENT, OUTPUT, scale_key
from cocofl.vector.kernels.base import (
    NO_ACTIVATION,
    Activation,
    Asked,
    Coefficients,
    Kept,
    Moments,
    Norm,
    Reading,
    from_rows,
    row_count,
    rows_of,
)
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.program.row_layout import Segment
from cocofl.vector.program.stacked_layers import Beside, Weights
from cocofl.vector.rounding.points import CONVERSION, RoundingPoint
from cocofl.vector.rounding.table import ActivePoint, Note, RoundingTable

Environment = dict[str, Any]


class Roles(NamedTuple):
    """By block and device, as masks."""

    with_batch: Tensor
    """Norms use the mini-batch and dropout drops: trained, or frozen by variant ``f``."""
    trained: Tensor
    reached: Tensor
    """A gradient is needed: the block is trained, or one before it."""


@dataclass(frozen=True)
class NormSpec:
    """A BatchNorm's layout and settings."""

    weight: Segment | None
    bias: Segment | None
    mean: Segment | None
    variance: Segment | None
    eps: float
    momentum: float | None
    tracked: int
    """Mini-batches seen before; counts where ``momentum`` is None."""


@dataclass(frozen=True, eq=False)
class Finish:
    """What follows a layer, or happens to another value."""

    kernels: KernelSet
    rows: Tensor
    """How many rows of each device count."""
    asked: Tensor
    """Which devices need a gradient here."""
    output: ActivePoint
    gradient: ActivePoint
    activation: Activation = NO_ACTIVATION
    norm: Norm | None = None
    is_begun: bool = False
    """Whether the layer's own kernel has activated already, and rounded if the grid was known."""
    moments: Moments | None = None
    """Of the layer's result, where its own kernel took them."""


def finished(
    y: Tensor,
    finish: Finish,
    addend: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    image: bool = True,
) -> Tensor:
    """``y`` (device, sample, …) normalised or shifted, added to, activated and rounded."""
    norm = finish.norm
    learned = (None, None) if norm is None else (norm.weight, norm.bias)
    added = None if addend is None else rows_of(addend, image=image)
    rows: Tensor = _Finish.apply(  # type: ignore[no-untyped-call]
        rows_of(y, image=image), added, offset, *learned, finish, None
    )
    return from_rows(rows, y, image=image)


def left_to_the_reader(y: Tensor, finish: Finish) -> tuple[Tensor, Reading]:
    """``y`` as it is, for a single reader that normalises, activates and rounds what it reads.

    What that sends back is the gradient of the finished value.
    """
    norm, rows = finish.norm, rows_of(y)
    assert norm is not None
    c = finish.kernels.norms(y).coefficients(rows.detach(), finish.rows, norm, finish.moments)
    passed: Tensor = _Finish.apply(  # type: ignore[no-untyped-call]
        rows, None, None, norm.weight, norm.bias, finish, c
    )
    return from_rows(passed, y), Reading(c, finish.activation, finish.output.known)


class _Finish(torch.autograd.Function):
    """With coefficients ``c`` nothing is done on the way forward: the reader does it."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        addend: Tensor | None,
        offset: Tensor | None,
        _weight: Tensor | None,
        _bias: Tensor | None,
        finish: Finish,
        c: Coefficients | None,
    ) -> Tensor:
        run, act = finish.kernels.rows(y), finish.activation
        point, norm = finish.output, finish.norm
        grid = point.known
        now = None if point.must_measure else grid
        z: Tensor
        if c is not None:
            z = y.view_as(y)
        elif norm is None:
            still, now = (NO_ACTIVATION, None) if finish.is_begun else (act, now)
            z = run.finish(y, offset, addend, still, now)
        else:
            normalise = finish.kernels.norms(y).normalise
            z, c = normalise(y, finish.rows, norm, addend, act, now, finish.moments)
        if point.must_measure:
            grid = point.measure(run.largest(z, finish.rows))
            if grid is not None:
                z = run.finish(z, None, None, NO_ACTIVATION, grid)
        shares = addend is not None
        ctx.kernels, ctx.point = finish.kernels, finish.gradient
        ctx.kept = Kept(None, None, act, grid, finish.rows, c, norm, finish.asked, shares)
        # What the activation let pass follows from y again, unless something was added.
        keep_z = act.present and (norm is None or shares)
        ctx.save_for_backward(y if norm is not None else None, z if keep_z else None)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, z = ctx.saved_tensors
        g, point, kept, needed = g.contiguous(), ctx.point, ctx.kept, ctx.needs_input_grad
        run, rows = ctx.kernels.rows(g), kept.rows
        kept = kept._replace(y=y, z=z)
        grid = point.measure(run.largest(g, rows)) if point.must_measure else point.known
        if kept.norm is None:
            gy = addend = run.back(g, grid, kept)
            weight = bias = None
        else:
            back = ctx.kernels.norms(g).back_through_norm
            gy, addend, weight, bias = back(g, grid, kept)
        offset = run.total(gy, rows) if needed[2] else None
        gradients = gy, addend, offset, weight, bias, None, None
        return tuple(g if own else None for g, own in zip(gradients, needed, strict=True))


@dataclass(eq=False)
class StepContext:
    """One forward pass of all devices, and the backward pass that follows."""

    kernels: KernelSet
    roles: Roles
    valid: Tensor
    """How many samples of each device's mini-batch count."""
    batch: int
    leaves: Mapping[Segment, Tensor]
    weights: Mapping[str, Weights]
    """Of each layer, by the value it makes."""
    statistics: Mapping[Segment, Tensor]
    frozen_norms: Mapping[str, tuple[Tensor, Tensor]]
    """What was folded of each: a factor and an offset."""
    steps_done: Tensor
    table: RoundingTable | None
    on_the_fly: frozenset[RoundingPoint]
    channels: Mapping[str, Tensor] = field(default_factory=dict)
    """Of values, how many entries of their last axis each device's network has; else all."""
    late: tuple[Beside, frozenset[Segment]] | None = None
    """Where gradients are computed that nobody waits for, and of which parameters."""
    averages: bool = False
    """Norms take plain means over mini-batches, whatever their momentum."""
    modes: list[list[str]] = field(default_factory=list)
    """By block and device, for what runs device by device."""
    counts: list[int] | None = None
    """What ``valid`` holds, where it is known on the host."""
    measured: Tensor | None = None
    """Scales by device and place, filled in while measuring."""
    places: Mapping[str, int] = field(default_factory=dict)
    measures: Tensor | None = None
    """Who has its last mini-batch now."""

    readings: dict[str, Reading] = field(default_factory=dict)
    """Of values that are left to their readers to finish, what is left to do."""

    _rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows(self, x: Tensor, *, image: bool = True) -> Tensor:
        """How many of each device's rows of ``x`` count."""
        n = row_count(x, image=image)
        each = n // self.batch if x.shape[1] == self.batch else 0
        if (each, n) not in self._rows:
            self._rows[each, n] = self.valid * each if each else torch.full_like(self.valid, n)
        return self._rows[each, n]

    @cached_property
    def tracking(self) -> Tensor:
        """(block, device, 1): who trains a block now."""
        return (self.roles.trained & (self.valid > 0)).unsqueeze(2)

    def beside(self, weight: Segment) -> Beside | None:
        """Where the gradient of a weight is computed, if not in its turn."""
        return self.late[0] if self.late is not None and weight in self.late[1] else None

    def asked(self, block: int) -> Asked:
        """Whose gradients a layer of the block needs."""
        return Asked(self.roles.trained[block], self.roles.reached[block])

    def point(self, kind: str, value: str, block: int) -> ActivePoint:
        """The point at a value."""
        point, known, flags = RoundingPoint(kind, value), None, None
        if self.table is not None and (known := self.table.known(point)) is not None:
            flags = self.table.flags(point) if point in self.on_the_fly else None
        return ActivePoint(self.kernels, known, flags, self._note(kind, value, block))

    def _note(self, kind: str, value: str, block: int) -> Note | None:
        place = self.places.get(scale_key(value, kind))
        measured, now = self.measured, self.measures
        if place is None or measured is None or now is None:
            return None
        mine = self.roles.trained[block] & now

        def note(scale: Tensor) -> None:
            # All zeros say nothing about a range, and a broken batch must not spoil the average.
            tells = mine & (scale > 0) & (scale < torch.inf)
            measured[:, place] = torch.where(tells, scale, measured[:, place])

        return note

    def leaf(self, segment: Segment | None) -> Tensor | None:
        """What learns, if there is such a parameter."""
        return None if segment is None else self.leaves[segment]

    def finish(self, value: str, x: Tensor, block: int, *, image: bool = True) -> Finish:
        """What happens to every value: rounded, measured, and its gradient, too."""
        output, gradient = (self.point(kind, value, block) for kind in (OUTPUT, GRADIENT))
        rows, asked = self.rows(x, image=image), self.asked(block).value
        return Finish(self.kernels, rows, asked, output, gradient)

    def settle(self, value: str, x: Tensor, block: int, *, is_rounded: bool = False) -> Tensor:
        """A value that no layer made; its kernel may have rounded it already."""
        if not x.is_floating_point() or x.ndim == 1:
            return x
        finish = self.finish(value, x, block)
        if is_rounded:
            finish = replace(finish, output=ActivePoint(self.kernels))
        return x if finish.output.is_idle and finish.gradient.is_idle else finished(x, finish)

    def coded(self, env: Environment, value: str, block: int) -> Tensor:
        """A value as int8 operations read it."""
        x: Tensor = env[value]
        point = self.point(CONVERSION, value, block)
        if point.is_idle:
            return x
        key = f"{value} as codes"
        if key not in env:
            idle = ActivePoint(self.kernels)
            finish = replace(self.finish(value, x, block), output=point, gradient=idle)
            env[key] = finished(x, finish)
        coded: Tensor = env[key]
        return coded

    def norm(self, spec: NormSpec, name: str, block: int, layer_bias: Tensor | None) -> Norm:
        """A BatchNorm of all devices."""
        momentum: Tensor | float = spec.momentum if spec.momentum is not None else 0.0
        if spec.momentum is None or self.averages:
            before = 0 if self.averages else spec.tracked
            momentum = (1.0 / (self.steps_done + before + 1))[:, None]
        with_batch = self.roles.with_batch[block]
        factor, offset = self.frozen_norms[name]
        return Norm(
            weight=self.leaf(spec.weight),
            bias=self.leaf(spec.bias),
            layer_bias=None if layer_bias is None else layer_bias.detach(),
            running_mean=None if spec.mean is None else self.statistics[spec.mean],
            running_variance=None if spec.variance is None else self.statistics[spec.variance],
            momentum=momentum,
            eps=spec.eps,
            with_batch=torch.ones_like(with_batch) if spec.mean is None else with_batch,
            tracks=self.tracking[block],
            frozen_factor=factor,
            frozen_offset=offset,
        )
