"""What others need to know of a strategy: facts that stand beside it, so that nobody asks its name.

A strategy of one's own declares them in the same way, or takes the defaults::

    @declares(StrategyFacts(tables="spans", colour="#8B5CF6"))
    def output_side(tables): ...
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from cocofl.errors import InvalidSetting

PROPOSED, BASELINE, UPPER_BOUND = "proposed", "baseline", "upper bound"
SPANS, FULL_TRAINING, WIDTHS = "spans", "full training", "widths"
BLOCKS, SLICES = "blocks", "slices"
_KNOWN = {
    "role": (PROPOSED, BASELINE, UPPER_BOUND),
    "tables": ("", SPANS, FULL_TRAINING, WIDTHS),
    "variant": ("f", "ff", "qff"),
    "uploads": ("", BLOCKS, SLICES),
}
_COLOUR = re.compile(r"(#[0-9A-Fa-f]{6})?")


@dataclass(frozen=True)
class StrategyFacts:
    """Facts of one strategy."""

    label: str = ""
    """How a sentence calls it; by default its name."""
    citation: str = ""
    role: str = BASELINE
    """The proposed method; a baseline that obeys budgets; or an upper bound that ignores them."""
    tables: str = ""
    """Of what it must know the cost: spans, full training only, widths, or nothing."""
    variant: str = "qff"
    """Of its table of spans, where no option says another."""
    uploads: str = BLOCKS
    """Whole blocks, which a deployment can check; slices of tensors; or nothing."""
    own_network: bool = False
    """Whether it plays with another network than the experiment's, which a simulation chooses."""
    all_data_in_one_place: bool = False
    """One device has all data; a tenth of the rounds, no uploads, no groups."""
    waits: bool = True
    """Whether the server waits for a round's devices; else it merges in simulated time."""
    in_paper: bool = False
    """Whether CoCoFL's paper has numbers of it."""
    colour: str = ""
    """In figures, like ``#0072B2``; else one that is left."""
    order: int = 100
    """Where it stands in tables and legends, ascending."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            known = _KNOWN.get(field.name, (value,))
            if not isinstance(value, type(field.default)) or value not in known:
                raise InvalidSetting(
                    f"a strategy's {field.name} is {value!r}; expected "
                    f"{', '.join(map(repr, known)) if known != (value,) else field.type}"
                )
        if not _COLOUR.fullmatch(self.colour):
            raise InvalidSetting(f"a strategy's colour is {self.colour!r}; expected one as #0072B2")

    @property
    def is_bound(self) -> bool:
        """Whether it ignores budgets: what could be reached, not a rival."""
        return self.role == UPPER_BOUND


Maker = TypeVar("Maker", bound=Callable[..., Any])


def declares(facts: StrategyFacts) -> Callable[[Maker], Maker]:
    """Give a strategy's function its facts."""

    def decorate(make: Maker) -> Maker:
        make.strategy_facts = facts  # type: ignore[attr-defined]
        return make

    return decorate


def declared_by(make: Callable[..., Any]) -> StrategyFacts:
    """What a strategy's function declares, or the defaults."""
    facts = getattr(make, "strategy_facts", None)
    return facts if isinstance(facts, StrategyFacts) else StrategyFacts()
