"""FedRolex (Alam et al., NeurIPS 2022): HeteroFL's widths, in a window that rolls over the rounds.

In HeteroFL the leading channels are trained by everybody, and the last ones only by those who can
train all. Here the window of a narrower network begins one channel later in every round and goes
on with the first where channels end, so that in the course of time every channel is trained by
every device.
"""

from __future__ import annotations

from dataclasses import replace

from cocofl.checks import check_number
from cocofl.fl.federation import Situation
from cocofl.fl.strategies.base import Plan, Strategy, Tables
from cocofl.fl.strategies.facts import SLICES, WIDTHS, StrategyFacts, declares
from cocofl.fl.strategies.widths import heterofl
from cocofl.fl.widths import WidthWork


@declares(
    StrategyFacts(
        label="FedRolex",
        citation="Alam et al., NeurIPS 2022",
        tables=WIDTHS,
        uploads=SLICES,
        colour="#E7298A",
        order=40,
    )
)
def fedrolex(
    tables: Tables, *, step: int = 1, scaler: bool = False, masked: bool = False
) -> Strategy:
    """A device trains the widest network that fits, in this round's window of every layer.

    All windows move by ``step`` channels a round, whatever their width: those of a round begin at
    one channel. The rest is HeteroFL's: merging per coordinate over those who have it, static
    BatchNorm, ``scaler`` and ``masked``.
    """
    check_number("strategy.step", step, least=1)
    tables.check_rolls()
    still = heterofl(tables, scaler=scaler, masked=masked)

    def plan(situation: Situation) -> Plan | None:
        found = still.plan(situation)
        if found is None:
            return None
        assert isinstance(found.work, WidthWork)
        return replace(found, work=replace(found.work, roll=step * situation.round_index))

    return replace(still, plan=plan)
