"""One place of the shared computation where devices round a tensor, measure it, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cocofl.numerics import StackedGrid
from cocofl.vector.fused import kernels_for
from cocofl.vector.kernels import Activation
from cocofl.vector.maps import from_rows, rows_of
from cocofl.vector.rounding import RoundingTable, Tap

Note = Callable[[Tensor], None]


@dataclass(frozen=True)
class TapPoint:
    """A tap of one run: its table, whether someone scales on the fly, whom to tell the scale."""

    tap: Tap
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

    def idle(self) -> TapPoint:
        """The same place, where nothing is left to do."""
        return TapPoint(self.tap, None, on_the_fly=False, note=None)

    def known(self) -> StackedGrid | None:
        """The grids, as far as they do not depend on the tensor."""
        return None if self.table is None else self.table.known(self.tap)

    def measure(self, scale: Tensor) -> StackedGrid | None:
        """The grids, given the tensor's own scale on each device."""
        if self.note is not None:
            self.note(scale)
        if self.on_the_fly and self.table is not None:
            return self.table.measured(self.tap, scale)
        return self.known()


class Tapped(torch.autograd.Function):
    """A value that no layer rounds by itself: rounded forward at one tap, backward at another."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        forward: TapPoint,
        backward: TapPoint,
        rows: Tensor,
    ) -> Tensor:
        """Rounded where devices do."""
        ctx.backward_tap, ctx.rows = backward, rows  # type: ignore[attr-defined]
        return _at(forward, x, rows)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, g: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Straight through, up to the gradient's own rounding."""
        return _at(ctx.backward_tap, g, ctx.rows), None, None, None  # type: ignore[attr-defined]


def tapped(x: Tensor, forward: TapPoint, backward: TapPoint, rows: Tensor) -> Tensor:
    """``x`` as it is where neither tap does anything."""
    if forward.is_idle and backward.is_idle:
        return x
    result: Tensor = Tapped.apply(x, forward, backward, rows)  # type: ignore[no-untyped-call]
    return result


def _at(point: TapPoint, x: Tensor, rows: Tensor) -> Tensor:
    run, grid = kernels_for(x), point.known()
    flat = rows_of(x)  # in the order in which it lies, so that nothing is copied
    if point.must_measure:
        grid = point.measure(run.largest(flat, rows))
    if grid is None:
        return x.view_as(x)
    return from_rows(run.finish(flat, None, None, None, Activation(False), grid), x)
