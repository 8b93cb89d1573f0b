"""Splits by name, as an experiment file or the command line says them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cocofl.data import partition as pt
from cocofl.data.partition import Partition
from cocofl.data.split import Split
from cocofl.data.stable_random import Ints
from cocofl.errors import InvalidPartition
from cocofl.named import nearest


@dataclass(frozen=True)
class Rule:
    """How samples are divided over devices: a name in :data:`RULES`, and its parameters."""

    name: str = "iid"
    alpha: float = 0.1
    """Of ``dirichlet``, ``rc`` and ``rc-mixed``; the others have no use for it."""
    equal: bool = True
    """Of these and ``iid``: equal shares for all, the paper's rule."""


def _by_group(
    data: Split, devices: int, seed: int, rule: Rule, groups: Ints, *, mixed: bool = False
) -> Partition:
    classes, equal = _classes(data, rule), rule.equal
    return pt.resource_correlated(
        classes, devices, seed, alpha=rule.alpha, groups=groups, equal=equal, mixed=mixed
    )


def _classes(data: Split, rule: Rule) -> NDArray[np.int64]:
    if data.facts.labels != "classes":
        raise InvalidPartition(
            f"the {rule.name} split goes by the class of each sample, and this data set has "
            f"{data.facts.labels} instead; use iid, or natural where samples have owners"
        )
    return data.labels


def _owners(data: Split, rule: Rule) -> NDArray[np.int32]:
    if data.owners is None:
        raise InvalidPartition(
            f"the {rule.name} split needs to know who owns each sample (a play, writer or "
            "patient), and this data set does not say; use iid, dirichlet or rc"
        )
    return data.owners


Divide = Callable[[Split, int, int, Rule, Ints], Partition]

RULES: dict[str, Divide] = {
    "iid": lambda data, devices, seed, rule, _groups: pt.iid(
        np.zeros(len(data), np.int64), devices, seed, equal=rule.equal
    ),
    "dirichlet": lambda data, devices, seed, rule, _groups: pt.dirichlet(
        _classes(data, rule), devices, seed, alpha=rule.alpha, equal=rule.equal
    ),
    "rc": _by_group,
    "rc-mixed": partial(_by_group, mixed=True),
    "by_play": lambda data, devices, seed, rule, groups: pt.by_play(
        _owners(data, rule), devices, seed, groups=groups
    ),
    "natural": lambda data, devices, seed, rule, _groups: pt.natural(
        _owners(data, rule), devices, seed
    ),
}


def check_rule(name: str) -> None:
    """Complain about a split that nobody knows."""
    if name not in RULES:
        raise InvalidPartition(
            f"no split {name!r}{nearest(name, RULES)}; known: {', '.join(RULES)}"
        )


def divide(
    data: Split, devices: int, seed: int, rule: Rule, groups: Sequence[int] | Ints
) -> Partition:
    """Divide a split over devices; ``groups`` is the group of each device."""
    check_rule(rule.name)
    return RULES[rule.name](data, devices, seed, rule, np.asarray(groups))
