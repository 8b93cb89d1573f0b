"""A layer with all that was fused into it, for many devices: norm, addition, activation, rounding.

A device that trains the layer normalises with its batch; one that has it frozen uses what was
folded; both are the same two numbers per channel, so one computation serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocofl.numerics import StackedGrid, snap
from cocofl.vector.kernels import Activation, Norm
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.kernels.rows import from_rows, rows_of
from cocofl.vector.rounding.applied import ActivePoint


@dataclass(frozen=True, eq=False)
class Finish:
    """What follows a layer."""

    kernels: KernelSet
    activation: Activation
    rows: Tensor
    """How many rows of each device count."""
    asked: Tensor
    """Which devices need a gradient here."""
    output: ActivePoint
    gradient: ActivePoint
    is_begun: bool = False
    """Whether the layer's own kernel has activated already."""


def finished(
    y: Tensor,
    addend: Tensor | None,
    offset: Tensor | None,
    norm: Norm | None,
    finish: Finish,
    *,
    image: bool = True,
) -> Tensor:
    """``y`` (device, sample, …) normalised or shifted, added to, activated and rounded."""
    weight = bias = None
    if norm is not None:
        weight, bias = norm.weight, norm.bias
    rows: Tensor = _Finish.apply(  # type: ignore[no-untyped-call]
        rows_of(y, image=image),
        None if addend is None else rows_of(addend, image=image),
        offset,
        weight,
        bias,
        norm,
        finish,
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
        norm: Norm | None,
        finish: Finish,
    ) -> Tensor:
        run, act, point = finish.kernels.rows(y), finish.activation, finish.output
        c = None if norm is None else run.coefficients(y, finish.rows, norm)
        factor, shift = (None, offset) if c is None else (c.factor, c.offset)
        grid = point.known()
        now = None if point.must_measure else grid
        still = Activation(False) if finish.is_begun else act
        z = run.finish(y, factor, shift, addend, still, now)
        if point.must_measure:
            grid = point.measure(run.largest(z, finish.rows))
            if grid is not None:
                z = run.finish(z, None, None, None, Activation(False), grid)
        ctx.norm, ctx.finish, ctx.c, ctx.run = norm, finish, c, run
        ctx.activation = act._replace(cap=_cap(act, grid, y))
        ctx.has_addend, ctx.has_offset = addend is not None, offset is not None
        # What the activation let pass follows from y again, unless something was added.
        keep_z = act.present and (norm is None or addend is not None)
        ctx.z_grid = grid
        ctx.save_for_backward(y if norm is not None else None, z if keep_z else None)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, z = ctx.saved_tensors
        finish, point, run = ctx.finish, ctx.finish.gradient, ctx.run
        g = g.contiguous()
        grid = point.measure(run.largest(g, finish.rows)) if point.must_measure else point.known()
        share, found = run.back(
            g,
            z,
            ctx.activation,
            grid,
            y,
            finish.rows,
            ctx.c,
            ctx.norm,
            ctx.z_grid,
            asked=finish.asked,
            share=ctx.has_addend,
        )
        offset = run.total(found.y, finish.rows) if ctx.has_offset else None
        addend = share if ctx.has_addend else None
        weight, bias = found.weight, found.bias
        if ctx.norm is not None:
            weight = None if ctx.norm.weight is None else weight
            bias = None if ctx.norm.bias is None else bias
        return found.y, addend, offset, weight, bias, None, None


def _cap(act: Activation, grid: StackedGrid | None, like: Tensor) -> Tensor | None:
    """What the activation's upper bound is for each device, once rounded."""
    if act.upper is None:
        return None
    bound = torch.full((len(like), 1), act.upper, device=like.device)
    return (bound if grid is None else snap(bound, grid)).flatten()
