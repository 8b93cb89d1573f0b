"""FedAsync (Xie et al., 2020): no deadline; every model is mixed into the server's when it arrives.

The server's next model is ``(1 − α) · its own + α · what the device sent``, where α falls with
the staleness of the device: how often the server has merged since that device began. Devices are
held near the model that they were sent by a proximal term.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cocofl.checks import check_choice, check_number
from cocofl.fl.arrival import Arrival
from cocofl.fl.merge import Mean
from cocofl.fl.strategies.base import Strategy, Tables
from cocofl.fl.strategies.facts import FULL_TRAINING, StrategyFacts, declares
from cocofl.fl.strategies.fedbuff import in_their_own_time
from cocofl.fl.strategies.fedprox import Proximal

FALLS = ("constant", "polynomial", "hinge")


@dataclass(frozen=True)
class LateModels(Arrival):
    """Each model is mixed with what the server has now.

    >>> [LateModels(1, 0.8, "polynomial", 0.5).weight(late) for late in (0, 3)]
    [0.8, 0.4]
    >>> [LateModels(1, 0.8, "hinge", 0.5, 4).weight(late) for late in (0, 4, 6)]
    [0.8, 0.8, 0.4]
    """

    mixing: float = 0.6
    staleness: str = "polynomial"
    exponent: float = 0.5
    patience: int = 4

    def weight(self, staleness: int) -> float:
        """α, by one of the paper's three functions."""
        falls = {
            "constant": 1.0,
            "polynomial": float((1.0 + staleness) ** -self.exponent),
            "hinge": 1.0 / (1.0 + self.exponent * max(0, staleness - self.patience)),
        }
        return self.mixing * falls[self.staleness]

    def keep(self, sent: Tensor, start: Tensor) -> Tensor:
        """The model."""
        del start
        return sent.clone()

    def arrive(self, kept: Tensor, now: Tensor, staleness: int) -> Tensor:
        """Mixed, as norm statistics are."""
        return self.mixed(kept, now, staleness)


@declares(
    StrategyFacts(
        label="FedAsync",
        citation="Xie et al., 2020",
        tables=FULL_TRAINING,
        waits=False,
        colour="#1B9E77",
        order=42,
    )
)
def fedasync(
    tables: Tables,
    *,
    mixing: float = 0.6,
    staleness: str = "polynomial",
    exponent: float = 0.5,
    patience: int = 4,
    rho: float = 0.005,
) -> Strategy:
    """Full training at every device's own speed; a round of the record is one update.

    ``mixing`` is α of a model that is not stale; ``staleness`` says how it falls: as a power
    (``exponent``), as a hinge (after ``patience`` merges, the steeper the larger ``exponent``), or
    not at all. ``rho`` weighs the proximal term.
    """
    check_number("strategy.mixing", mixing, above=0, most=1)
    check_choice("strategy.staleness", staleness, FALLS)
    check_number("strategy.exponent", exponent, least=0)
    check_number("strategy.patience", patience, least=0)
    check_number("strategy.rho", rho, least=0)
    arrival = LateModels(1, mixing, staleness, exponent, patience)
    plan = in_their_own_time(tables, Proximal(rho) if rho else None)
    return Strategy(plan, Mean("everyone"), only_able=True, arrival=arrival)
