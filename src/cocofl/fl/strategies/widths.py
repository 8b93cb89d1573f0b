"""HeteroFL (Diao et al., 2021) and FjORD (Horváth et al., 2021), whose networks are narrower."""

from __future__ import annotations

from cocofl.checks import check_number
from cocofl.errors import InvalidSetting
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import SLACK, feasible_widths
from cocofl.fl.strategies.base import (
    Plan,
    Strategy,
    Tables,
    share_of_deadline,
    time_share,
)
from cocofl.fl.strategies.facts import SLICES, WIDTHS, StrategyFacts, declares
from cocofl.fl.widths import OrderedWork, WidthWork

# The paper's levels for Transformers; a CNN can have any width of the table.
TEXT_WIDTHS = (0.125, 0.4, 0.625, 0.8125, 1.0)
FJORD_WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)


@declares(
    StrategyFacts(
        label="HeteroFL",
        citation="Diao et al., ICLR 2021",
        tables=WIDTHS,
        uploads=SLICES,
        in_paper=True,
        colour="#D55E00",
        order=4,
    )
)
def heterofl(tables: Tables, *, scaler: bool = False, masked: bool = False) -> Strategy:
    """A device trains the widest network that fits.

    Nested averaging per coordinate, static BatchNorm; scaler and masked loss as options.
    """
    if masked:
        _check_classes(tables, "masked = true leaves absent classes out")
    table = tables.widths()

    def plan(situation: Situation) -> Plan | None:
        widths = feasible_widths(table, situation.budget)
        if tables.is_text:
            widths = [width for width in widths if width in TEXT_WIDTHS]
        if not widths:
            return None
        time = time_share(table, [widths[-1]], situation.budget)
        return Plan(WidthWork(widths[-1], scaler, masked), time)

    return Strategy(plan, Mean("senders"), tracks_statistics=False)


@declares(
    StrategyFacts(
        label="FjORD",
        citation="Horváth et al., NeurIPS 2021",
        tables=WIDTHS,
        uploads=SLICES,
        in_paper=True,
        colour="#CC79A7",
        order=5,
    )
)
def fjord(tables: Tables, *, distillation: float = 0.0) -> Strategy:
    """Ordered dropout: a width drawn for every mini-batch, of five those that fit.

    ``distillation`` is the teacher's share of the loss. The teacher, the widest, takes its step in
    every mini-batch, too: a device has as many levels as it has time for. One that even the lowest
    does not fit trains at the widest of the table that does. A Transformer, whose widths have to
    suit its heads, has no others.
    """
    check_number("strategy.distillation", distillation, least=0, most=1)
    if distillation:
        _check_classes(tables, f"distillation = {distillation:g} compares scores of classes")
    table = tables.widths()
    levels = TEXT_WIDTHS if tables.is_text else FJORD_WIDTHS

    def plan(situation: Situation) -> Plan | None:
        fitting = feasible_widths(table, situation.budget)
        widths = tuple(width for width in levels if width in fitting)
        if not widths and not tables.is_text:
            widths = tuple(fitting[-1:])
        if not widths:
            return None
        # A device must be able to train at its widest; on average it is faster.
        limit = table.limits(situation.budget)[0]
        while (time := mean_time(widths)) > limit * (1 + SLACK) and len(widths) > 1:
            widths = widths[:-1]
        return Plan(OrderedWork(widths, distillation), share_of_deadline(time, limit))

    def mean_time(widths: tuple[float, ...]) -> float:
        times = [table.row(width)[0] for width in widths]
        taught = len(times) - 1 if distillation else 0
        return (sum(times) + taught * times[-1]) / len(times)

    return Strategy(plan, Mean("senders"))


def _check_classes(tables: Tables, what: str) -> None:
    if tables.labels not in ("classes", "tokens"):
        raise InvalidSetting(
            f"{what}, but the labels of this data set are {tables.labels}; leave the option out"
        )
