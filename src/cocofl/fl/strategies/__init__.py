"""The strategies by name: one function each, from tables and options to plan and merge."""

from __future__ import annotations

from collections.abc import Callable

from cocofl.fl.strategies.base import Plan, Strategy, Tables
from cocofl.fl.strategies.cocofl import cocofl
from cocofl.fl.strategies.fedavg import centralized, fedavg, fedavg_full
from cocofl.fl.strategies.fjord import fjord
from cocofl.fl.strategies.heterofl import heterofl

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "cocofl": cocofl,
    "heterofl": heterofl,
    "fjord": fjord,
    "fedavg": fedavg,
    "fedavg-full": fedavg_full,
    "centralized": centralized,
}

__all__ = ["STRATEGIES", "Plan", "Strategy", "Tables"]
