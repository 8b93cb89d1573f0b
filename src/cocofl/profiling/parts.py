"""What a part of a network costs of which no table has a row: first blocks alone, narrow ends.

Some methods let devices train another network than the one that is profiled. What that costs is
counted like an analytic table. Beside a measured table the count says how much less it is than the
same blocks of the whole network (:meth:`~cocofl.profiling.table.ProfileTable.scaled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cocofl.profiling.analytic import COUNTED_WIDTHS, BlockWork, cost_of, work_of
from cocofl.profiling.configurations import Configuration, Cost
from cocofl.profiling.device_rates import device_named
from cocofl.profiling.subject import WIDTHS, Settings, interpolated
from cocofl.profiling.table import ProfileTable
from cocofl.span import Span


def first_blocks_table(settings: Settings, device: str) -> ProfileTable:
    """The costs of ``0:1``, ``0:2``, … where no block follows.

    A classifier behind them is not counted: it is one linear layer on means.
    """
    work, inputs = work_of(settings)
    rates, n = device_named(device), len(work)
    costs: dict[Configuration, Cost] = {
        span: cost_of(work[: len(span)], span, settings.variant, inputs, rates)
        for span in (Span(0, depth) for depth in range(1, n + 1))
    }
    return settings.table(costs, n, source="analytic", backend=f"analytic {device}")


def narrow_end_tables(settings: Settings, device: str) -> dict[float, ProfileTable]:
    """By width, the costs of spans up to the end, all blocks of which but the first have it."""
    whole, inputs = work_of(settings)
    rates, n = device_named(device), len(whole)
    spans = [Span(first, n) for first in range(n)]
    narrow = {width: work_of(settings, width)[0] for width in COUNTED_WIDTHS}

    def costs(span: Span) -> dict[Configuration, Cost]:
        mixed = {width: _mixed(whole, work, span) for width, work in narrow.items()}
        known = {
            width: cost_of(work, span, settings.variant, inputs, rates)
            for width, work in mixed.items()
        }
        return interpolated(known)

    by_span = {span: costs(span) for span in spans}
    facts = {
        "source": "analytic",
        "backend": f"analytic {device}",
        "full": cost_of(whole, Span(0, n), settings.variant, inputs, rates),
    }
    return {
        width: settings.table({span: by_span[span][width] for span in spans}, n, **facts)
        for width in WIDTHS
    }


def _mixed(whole: Sequence[BlockWork], narrow: Sequence[BlockWork], span: Span) -> list[BlockWork]:
    """All blocks up to the span's first as they are, and those behind it narrow."""
    border = min(span) + 1
    work = [*whole[:border], *narrow[border:]]
    if border < len(work):
        share = narrow[border - 1].output_bytes / whole[border - 1].output_bytes
        work[border] = _reading_all(narrow[border], whole[border], share)
    return work


def _reading_all(narrow: BlockWork, whole: BlockWork, share: float) -> BlockWork:
    """A narrow block that reads all channels of the one before it, of which it had a share.

    Its first layer has so many more inputs. Which that is nobody looks up: all layers are taken to
    have them, so this errs on the high side.
    """
    wider = {
        name: min(getattr(narrow, name) / share, getattr(whole, name))
        for name in ("macs", "parameter_bytes", "state_bytes")
    }
    return replace(narrow, **wider)
