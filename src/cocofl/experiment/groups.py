"""Which runs are played together, as one computation of a cohort."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cocofl.config import Experiment
from cocofl.engine.rounds import Watcher
from cocofl.fl.strategies import facts_of
from cocofl.fl.strategies.learning import OPTIONS as LEARNING

DEVICES_AT_ONCE = 40
"""More gain little (docs/notebook/cohort.md); the more share a GPU, the later the first ends."""

_COMMON = (
    *("model.", "training.", "engine.", "upload.", "evaluation.metrics"),
    *("data.name", "data.dir", "data.preset", "data.options"),
)
# The learning rate is a device's own.
_OWN = ("training.lr", "training.decay_rounds", "training.decay_factor")

Group = Mapping[Path, Experiment]
"""Runs by their folders."""
Watch = Callable[[Path, Experiment], Sequence[Watcher]]
"""Says who is told of a run that begins, or goes on, in a folder."""
Announce = Callable[[Sequence[Path], int], None]
"""Is told which folders' runs begin, and how many rounds the first has."""


def batch_groups(
    experiments: Group, at_once: int = DEVICES_AT_ONCE, places: int = 1
) -> list[dict[Path, Experiment]]:
    """Which of them a cohort plays together: never more devices than may be ``at_once``.

    Of few runs there are smaller groups, so that every one of the ``places`` has something to do.
    """
    every = sum(one.devices.per_round for one in experiments.values())
    at_once = min(at_once, math.ceil(every / places))
    found: list[dict[Path, Experiment]] = []
    for path, one in experiments.items():
        for group in found:
            members = [*group.values(), one]
            devices = sum(member.devices.per_round for member in members)
            if devices <= at_once and _common_ground(members[0]) == _common_ground(one):
                group[path] = one
                break
        else:
            found.append({path: one})
    return found


def _common_ground(experiment: Experiment) -> dict[str, Any]:
    """What those have in common that are one computation."""
    values = experiment.by_key().items()
    common = {key: v for key, v in values if key.startswith(_COMMON) and key not in _OWN}
    common |= {key: experiment.strategy.options.get(key) for key in LEARNING}
    facts = facts_of(experiment.strategy.name)
    if facts.own_network:
        return {"alone": experiment}
    # Who has all data has many times the mini-batches: everybody else would wait.
    return common | {"central": facts.all_data_in_one_place}


def in_short(names: Sequence[str]) -> str:
    """What to call runs that are played at once; what is shown of them is the first's.

    >>> in_short(["cocofl/seed0"]), in_short(["cocofl/seed0", "cocofl/seed1", "fjord/seed0"])
    ('cocofl/seed0', 'cocofl/seed0 and 2 more')
    """
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
