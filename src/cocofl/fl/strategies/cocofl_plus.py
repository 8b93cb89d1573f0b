"""CoCoFL+: CoCoFL (Pfeiffer et al., 2023) with the classifier on every device.

Where classes live on weak devices only, few of them train the classifier, and what it knows of
these classes is forgotten in every round without them. Here all devices train it beside their
span, and pay for that: the table charges its time, memory and upload. The other half of what we
recommend is the experiment's: ``evaluation.average`` keeps a mean of the model over rounds.
"""

from __future__ import annotations

from cocofl.fl.strategies.base import Strategy, Tables
from cocofl.fl.strategies.cocofl import cocofl
from cocofl.fl.strategies.facts import PROPOSED, SPANS, StrategyFacts, declares


@declares(
    StrategyFacts(
        label="CoCoFL+",
        citation="Pfeiffer et al., TMLR 2023, and this project",
        role=PROPOSED,
        tables=SPANS,
        colour="#004C7F",
        order=7,
    )
)
def cocofl_plus(
    tables: Tables,
    *,
    variant: str = "qff",
    selector: str = "random",
    over: str = "maximal",
    lr_power: float = 0.0,
) -> Strategy:
    """``cocofl`` with ``head``; the options are those of ``cocofl``."""
    return cocofl(
        tables, variant=variant, selector=selector, over=over, head=True, lr_power=lr_power
    )
