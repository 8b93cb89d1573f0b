"""Rounding a tensor, measuring it, or both, at one point of the shared computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cocofl.numerics import StackedGrid
from cocofl.vector.kernels import Activation
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.kernels.rows import from_rows, rows_of
from cocofl.vector.rounding.points import RoundingPoint
from cocofl.vector.rounding.table import RoundingTable

Note = Callable[[Tensor], None]


@dataclass(frozen=True)
class ActivePoint:
    """A point in one step: its table, whether someone scales on the fly, whom to tell the scale."""

    kernels: KernelSet
    point: RoundingPoint
    table: RoundingTable | None
    on_the_fly: bool
    note: Note | None

    @property
    def must_measure(self) -> bool:
        """Whether the tensor's own scale is needed."""
        return self.on_the_fly or self.note is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens here."""
        return self.note is None and self.known() is None

    def idle(self) -> ActivePoint:
        """The same place, where nothing is left to do."""
        return ActivePoint(self.kernels, self.point, None, on_the_fly=False, note=None)

    def known(self) -> StackedGrid | None:
        """The grids, as far as they do not depend on the tensor."""
        return None if self.table is None else self.table.known(self.point)

    def measure(self, scale: Tensor) -> StackedGrid | None:
        """The grids, given the tensor's own scale on each device."""
        if self.note is not None:
            self.note(scale)
        if self.on_the_fly and self.table is not None:
            return self.table.measured(self.point, scale)
        return self.known()


class _Rounded(torch.autograd.Function):
    """A value that no layer rounds by itself: rounded forward at one point, backward at another."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        forward: ActivePoint,
        backward: ActivePoint,
        rows: Tensor,
    ) -> Tensor:
        """Rounded where devices do."""
        ctx.backward_point, ctx.rows = backward, rows  # type: ignore[attr-defined]
        return _round_at(forward, x, rows)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, g: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Straight through, up to the gradient's own rounding."""
        return _round_at(ctx.backward_point, g, ctx.rows), None, None, None  # type: ignore[attr-defined]


def rounded(x: Tensor, forward: ActivePoint, backward: ActivePoint, rows: Tensor) -> Tensor:
    """``x`` as it is where neither point does anything."""
    if forward.is_idle and backward.is_idle:
        return x
    result: Tensor = _Rounded.apply(x, forward, backward, rows)  # type: ignore[no-untyped-call]
    return result


def _round_at(point: ActivePoint, x: Tensor, rows: Tensor) -> Tensor:
    run, grid = point.kernels.rows(x), point.known()
    flat = rows_of(x)  # in the order in which it lies, so that nothing is copied
    if point.must_measure:
        grid = point.measure(run.largest(flat, rows))
    if grid is None:
        return x.view_as(x)
    return from_rows(run.finish(flat, None, None, None, Activation(False), grid), x)
