"""DepthFL (Kim et al., ICLR 2023): the first blocks, with a classifier after each stage.

"DepthFL: Depthwise Federated Learning for Heterogeneous Clients". Weak devices train a shallower
network. So that the blocks at the input learn what deeper ones need, each stage has a classifier
of its own, and these learn from each other (self-distillation).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cocofl.checks import check_number
from cocofl.errors import InvalidSetting
from cocofl.fl.exits import DepthWork
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import fits
from cocofl.fl.strategies.base import Plan, Strategy, Tables, share_of_deadline
from cocofl.fl.strategies.facts import SLICES, SPANS, StrategyFacts, declares
from cocofl.fl.trainer import Work
from cocofl.span import Span

VARIANT = "f"


def depths_of(n_blocks: int, stages: int) -> tuple[int, ...]:
    """After how many blocks each stage ends.

    >>> depths_of(20, 4), depths_of(6, 4)
    ((5, 10, 15, 20), (2, 3, 5, 6))
    """
    return tuple(round(n_blocks * stage / stages + 1e-9) for stage in range(1, stages + 1))


@declares(
    StrategyFacts(
        label="DepthFL",
        citation="Kim et al., ICLR 2023",
        tables=SPANS,
        variant=VARIANT,
        uploads=SLICES,
        colour="#4D9221",
        order=28,
    )
)
def depthfl(
    tables: Tables, *, stages: int = 4, distillation: float = 1.0, ramp: int = 300
) -> Strategy:
    """A device trains all ``stages`` that fit; ``distillation`` weighs what exits share.

    It grows to that over ``ramp`` rounds, as in the author's code: exits know little at first.

    Each block and each exit is averaged over those who trained it. What the whole network says is
    the mean of what its exits do.
    """
    check_number("strategy.distillation", distillation, least=0)
    check_number("strategy.ramp", ramp, least=0)

    def work(trained: tuple[int, ...], round_index: int) -> DepthWork:
        return DepthWork(trained, distillation * ramped(round_index, ramp))

    return Strategy(by_depth(tables, stages, work), Mean("senders"), only_able=True)


def ramped(round_index: int, ramp: int) -> float:
    """What a weight has grown to that is whole after so many rounds.

    >>> [round(ramped(index, 300), 3) for index in (0, 150, 300, 400)]
    [0.007, 0.287, 1.0, 1.0]
    """
    missing = max(0.0, 1 - round_index / ramp) if ramp else 0.0
    return math.exp(-5 * missing**2)


def by_depth(
    tables: Tables, stages: int, work: Callable[[tuple[int, ...], int], Work]
) -> Callable[[Situation], Plan | None]:
    """How devices plan that train the most first stages that fit.

    ``work`` is told their ends, and the round.
    """
    check_number("strategy.stages", stages, least=1)
    if tables.labels != "classes":
        raise InvalidSetting(
            f"exits compare scores of classes, but the labels of this data set are "
            f"{tables.labels}; take another strategy"
        )
    if stages > tables.n_blocks:
        raise InvalidSetting(
            f"strategy.stages is {stages}, but the network has {tables.n_blocks} blocks; "
            "expected at most one stage per block"
        )
    table = tables.first_blocks(VARIANT)
    depths = depths_of(tables.n_blocks, stages)
    costs = [table.row(Span(0, depth)) for depth in depths]

    def plan(situation: Situation) -> Plan | None:
        limits = table.limits(situation.budget)
        fitting = [stage for stage, cost in enumerate(costs) if fits(cost, limits)]
        if not fitting:
            return None
        deepest = fitting[-1]
        time = share_of_deadline(costs[deepest][0], limits[0])
        return Plan(work(depths[: deepest + 1], situation.round_index), time)

    return plan
