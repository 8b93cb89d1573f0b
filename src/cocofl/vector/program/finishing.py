"""A layer with all that was fused into it, for many devices: norm, addition, activation, rounding.

A device that trains the layer normalises with its batch; one that has it frozen uses what was
folded; both are the same two numbers per channel, so one computation serves all. A value that no
layer made is at most rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocofl.numerics import StackedGrid, snap
from cocofl.vector.kernels.base import NO_ACTIVATION, Activation, Kept, Norm
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.kernels.rows import from_rows, rows_of
from cocofl.vector.rounding.table import ActivePoint


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
    """Whether the layer's own kernel has activated already."""


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
        rows_of(y, image=image), added, offset, *learned, finish
    )
    return from_rows(rows, y, image=image)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        addend: Tensor | None,
        offset: Tensor | None,
        _weight: Tensor | None,
        _bias: Tensor | None,
        finish: Finish,
    ) -> Tensor:
        run, act, point, norm = (
            finish.kernels.rows(y),
            finish.activation,
            finish.output,
            finish.norm,
        )
        c = None if norm is None else run.coefficients(y, finish.rows, norm)
        factor, shift = (None, offset) if c is None else (c.factor, c.offset)
        grid = point.known()
        now = None if point.must_measure else grid
        still = NO_ACTIVATION if finish.is_begun else act
        z = run.finish(y, factor, shift, addend, still, now)
        if point.must_measure:
            grid = point.measure(run.largest(z, finish.rows))
            if grid is not None:
                z = run.finish(z, None, None, None, NO_ACTIVATION, grid)
        capped, shares = act._replace(cap=_cap(act, grid, y)), addend is not None
        ctx.run, ctx.point = run, finish.gradient
        ctx.kept = Kept(None, None, capped, grid, finish.rows, c, norm, finish.asked, shares)
        # What the activation let pass follows from y again, unless something was added.
        keep_z = act.present and (norm is None or shares)
        ctx.save_for_backward(y if norm is not None else None, z if keep_z else None)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, z = ctx.saved_tensors
        point, run, rows, needed = ctx.point, ctx.run, ctx.kept.rows, ctx.needs_input_grad
        g = g.contiguous()
        grid = point.measure(run.largest(g, rows)) if point.must_measure else point.known()
        gy, addend, weight, bias = run.back(g, grid, ctx.kept._replace(y=y, z=z))
        offset = run.total(gy, rows) if needed[2] else None
        gradients = gy, addend, offset, weight, bias, None
        return tuple(g if own else None for g, own in zip(gradients, needed, strict=True))


def _cap(act: Activation, grid: StackedGrid | None, like: Tensor) -> Tensor | None:
    """What the activation's upper bound is for each device, once rounded."""
    if act.upper is None:
        return None
    bound = torch.full((len(like), 1), act.upper, device=like.device)
    return (bound if grid is None else snap(bound, grid)).flatten()
