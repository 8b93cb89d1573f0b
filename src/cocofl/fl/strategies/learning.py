"""What a block learns where a device trains it: all of it, or low-rank adapters beside it.

A strategy that leaves the choice to the experiment takes ``train``, ``rank`` and ``alpha``. The
network is made accordingly, with tables to match, so that nothing else of a strategy changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocofl.checks import check_choice
from cocofl.errors import InvalidExperiment
from cocofl.freeze import LowRank

WHOLE, LORA = "blocks", "lora"
OPTIONS = ("train", "rank", "alpha")


def check_learning(train: str, rank: int, alpha: float) -> None:
    """Complain about options that no network can be made for."""
    check_choice("strategy.train", train, (WHOLE, LORA))
    LowRank(rank, alpha)


def check_can_learn(given: Mapping[str, Any], known: Mapping[str, Any], strategy: str) -> None:
    """Refuse adapters for a strategy whose devices train something else than blocks."""
    for key in OPTIONS:
        if key in given and key not in known:
            raise InvalidExperiment(
                f"strategy.{key} is {given[key]!r}, but {strategy} trains no blocks that could "
                "carry low-rank adapters; cocofl, fedavg, fedavg-full and centralized do"
            )


def low_rank_of(given: Mapping[str, Any], known: Mapping[str, Any]) -> LowRank | None:
    """The adapters that an experiment asks for by the options it gives; None for whole blocks.

    ``known`` are all options of the strategy, with their defaults.
    """
    options = {**known, **given}
    if options.get("train", WHOLE) != WHOLE:
        check_learning(*(options[key] for key in OPTIONS))
        return LowRank(options["rank"], options["alpha"])
    for key in ("rank", "alpha"):
        if key in given and "train" in known:
            raise InvalidExperiment(
                f"strategy.{key} is of low-rank adapters, but strategy.train is {WHOLE!r}; set "
                f'train = "{LORA}", or leave {key} out'
            )
    return None
