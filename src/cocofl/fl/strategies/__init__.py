"""The strategies by name: one function each, from tables and options to plan and merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.fl.strategies.apf import apf
from cocofl.fl.strategies.base import Plan, Strategy, Tables
from cocofl.fl.strategies.cocofl import cocofl
from cocofl.fl.strategies.cocofl_plus import cocofl_plus
from cocofl.fl.strategies.depthfl import depthfl
from cocofl.fl.strategies.distreal import distreal
from cocofl.fl.strategies.embracing import embracing
from cocofl.fl.strategies.facts import StrategyFacts, declared_by, declares
from cocofl.fl.strategies.fedasync import fedasync
from cocofl.fl.strategies.fedavg import centralized, fedavg, fedavg_full
from cocofl.fl.strategies.fedbuff import fedbuff
from cocofl.fl.strategies.fedpart import fedpart
from cocofl.fl.strategies.fedprox import fedprox
from cocofl.fl.strategies.fedrolex import fedrolex
from cocofl.fl.strategies.layerout import layerout
from cocofl.fl.strategies.learning import check_can_learn, low_rank_of
from cocofl.fl.strategies.pvt import pvt
from cocofl.fl.strategies.slt import slt
from cocofl.fl.strategies.small import small
from cocofl.fl.strategies.widths import fjord, heterofl
from cocofl.named import lookup

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "cocofl": cocofl,
    "cocofl+": cocofl_plus,
    "heterofl": heterofl,
    "fjord": fjord,
    "fedavg": fedavg,
    "fedavg-full": fedavg_full,
    "centralized": centralized,
    "fedprox": fedprox,
    "small": small,
    "embracing": embracing,
    "fedpart": fedpart,
    "slt": slt,
    "pvt": pvt,
    "layerout": layerout,
    "apf": apf,
    "depthfl": depthfl,
    "fedrolex": fedrolex,
    "fedbuff": fedbuff,
    "fedasync": fedasync,
    "distreal": distreal,
}

NEEDS_NOTHING = "fedavg-full"
"""Needs no table and no budget: for who has a network to test, and nothing to train."""


def facts_of(name: str) -> StrategyFacts:
    """The facts of a strategy by name; one of the user's own is imported."""
    return declared_by(lookup(name, STRATEGIES, "strategy", InvalidExperiment))


def recorded_facts(name: str, content: Any = None) -> StrategyFacts:
    """The facts of a strategy that a file names: what a file says is never imported.

    >>> recorded_facts("heterofl").tables, recorded_facts("my.module:strategy").role
    ('widths', 'baseline')
    """
    if name in STRATEGIES:
        return declared_by(STRATEGIES[name])
    try:
        return StrategyFacts(**content)
    except (TypeError, InvalidSetting):  # none that can be read
        return StrategyFacts()


__all__ = [
    "NEEDS_NOTHING",
    "STRATEGIES",
    "Plan",
    "Strategy",
    "StrategyFacts",
    "Tables",
    "check_can_learn",
    "declares",
    "facts_of",
    "low_rank_of",
    "recorded_facts",
]
