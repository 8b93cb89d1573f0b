"""FedBuff (Nguyen et al., AISTATS 2022): no deadline; changes are merged when a buffer is full.

As many devices as a round has are under way all the time. Whoever is done sends its change, and
another device begins with the model of that moment. When ``buffer`` changes have arrived, the
server takes their mean, each by a weight that falls with its staleness: how often the server has
merged since that device began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cocofl.checks import check_number
from cocofl.fl.arrival import Arrival
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Mean
from cocofl.fl.select import feasible
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.base import Plan, Strategy, Tables, time_share, without_deadline
from cocofl.fl.strategies.facts import FULL_TRAINING, StrategyFacts, declares
from cocofl.local_rule import LocalRule
from cocofl.span import Span


@dataclass(frozen=True)
class LateChanges(Arrival):
    """Each change is added to what the server has now, by ``server_lr / (1 + staleness)^exponent``.

    >>> import torch
    >>> late = LateChanges(buffer=10, exponent=0.5)
    >>> change = late.keep(torch.tensor([3.0]), torch.tensor([1.0]))
    >>> late.arrive(change, torch.tensor([10.0]), staleness=0)
    tensor([12.])
    >>> late.arrive(change, torch.tensor([10.0]), staleness=3)
    tensor([11.])
    """

    exponent: float = 0.5
    server_lr: float = 1.0

    def weight(self, staleness: int) -> float:
        """A power of it."""
        return float((1.0 + staleness) ** -self.exponent)

    def keep(self, sent: Tensor, start: Tensor) -> Tensor:
        """The change."""
        return sent - start

    def arrive(self, kept: Tensor, now: Tensor, staleness: int) -> Tensor:
        """What the server has, and the change on top of it."""
        return now + self.server_lr * self.weight(staleness) * kept


@declares(
    StrategyFacts(
        label="FedBuff",
        citation="Nguyen et al., AISTATS 2022",
        tables=FULL_TRAINING,
        waits=False,
        colour="#66A61E",
        order=41,
    )
)
def fedbuff(
    tables: Tables, *, buffer: int = 10, exponent: float = 0.5, server_lr: float = 1.0
) -> Strategy:
    """Full training at every device's own speed; a round of the record is a full buffer."""
    check_number("strategy.buffer", buffer, least=1)
    check_number("strategy.exponent", exponent, least=0)
    check_number("strategy.server_lr", server_lr, above=0)
    arrival = LateChanges(buffer, exponent, server_lr)
    return Strategy(in_their_own_time(tables), Mean("everyone"), only_able=True, arrival=arrival)


def in_their_own_time(
    tables: Tables, rule: LocalRule | None = None
) -> Callable[[Situation], Plan | None]:
    """How devices plan that train everything, however long that takes.

    Memory and upload have to fit. A device with a third of the time needs three times as long.
    """
    table, full = tables.spans(), Span(0, tables.n_blocks)
    work = SpanWork(full, "f", rule)

    def plan(situation: Situation) -> Plan | None:
        budget = situation.budget
        if full not in feasible(table, without_deadline(budget)) or table.limits(budget)[0] <= 0:
            return None
        return Plan(work, time_share(table, [full], budget))

    return plan
