"""What a deployment is told: Flower's run config on the server, its node config on each device.

The run config has the keys of an experiment file, ``training.lr`` for example, and a section
``flower`` of its own. Flower passes numbers, texts and booleans only, so a list or a table is
written as a text: ``decay_rounds = "[600, 800]"``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocofl.budget import Budget
from cocofl.checks import check_number
from cocofl.config import Experiment, from_table, parse_value
from cocofl.errors import InvalidBudget, InvalidExperiment
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.fl.strategies.facts import BLOCKS
from cocofl.flower.updates import MAX_CHANGE, MAX_SAMPLES
from cocofl.named import nearest

SECTION = "flower."
_LIMITS = ("time", "memory", "upload")


@dataclass(frozen=True)
class Deployment:
    """How the server runs its rounds over a real network."""

    folder: str = "runs/flower"
    """The run folder, on the server; a relative path is relative to where the SuperLink runs."""
    resume: bool = False
    nodes: int = 2
    """A round begins when so many nodes are there."""
    per_round: int = 0
    """How many of them are asked; 0 for all."""
    wait_s: float = 300.0
    """How long to wait for enough nodes before giving up."""
    round_s: float = 120.0
    """How long to wait for replies; who has not answered by then is late."""
    max_samples: int = MAX_SAMPLES
    """The most samples that one device's update may stand for: they are its weight in the merge."""
    max_change: float = MAX_CHANGE
    """The largest norm of a change, as a multiple of 1 + the norm of what it changes."""

    def __post_init__(self) -> None:
        check_number("flower.nodes", self.nodes, least=1)
        check_number("flower.per_round", self.per_round, least=0)
        check_number("flower.wait_s", self.wait_s, above=0)
        check_number("flower.round_s", self.round_s, above=0)
        check_number("flower.max_samples", self.max_samples, least=1)
        check_number("flower.max_change", self.max_change, above=0)


def read_run_config(config: Mapping[str, Any]) -> tuple[Experiment, Deployment]:
    """The experiment and the deployment that a run config asks for.

    >>> experiment, deployment = read_run_config({"training.lr": 0.05, "flower.nodes": 3})
    >>> experiment.training.lr, deployment.nodes
    (0.05, 3)
    """
    changes = {key: _value(item) for key, item in config.items() if not key.startswith(SECTION)}
    own = {
        key.removeprefix(SECTION): item for key, item in config.items() if key.startswith(SECTION)
    }
    return Experiment().changed(changes), from_table(Deployment, own, SECTION)


def _value(item: Any) -> Any:
    """Texts that are TOML lists or tables become that; other texts stay texts."""
    return parse_value(item) if isinstance(item, str) and item[:1] in ("[", "{") else item


def check_experiment(experiment: Experiment) -> None:
    """Complain now about a strategy that the server would refuse, after all has been started.

    One of the user's own may be on the server only.
    """
    name = experiment.strategy.name
    try:
        facts = facts_of(name)
    except InvalidExperiment:
        if ":" in name:
            return
        raise
    if facts.uploads != BLOCKS:
        able = [known for known in STRATEGIES if facts_of(known).uploads == BLOCKS]
        raise InvalidExperiment(
            f"strategy {name!r} cannot be deployed: its devices do not send whole blocks; "
            f"expected {', '.join(able)}, or one of your own whose facts say that it does"
        )


def alike_devices(experiment: Experiment, count: int) -> Experiment:
    """The experiment with so many devices of one group: who has what is the devices' own affair."""
    group = {"name": "all"}
    return experiment.changed(
        {"devices.count": count, "devices.per_round": 1, "devices.groups": [group]}
    )


def node_budget(config: Mapping[str, Any], samples: int) -> Budget:
    """A device's budget: from its node config, or from a file that another process updates.

    >>> str(node_budget({"time": "30s", "memory": 0.5, "profile": "table.json"}, 500))
    'time ≤ 30 s for 500 samples, memory ≤ 0.5'
    """
    limits = {name: config[name] for name in _LIMITS if name in config}
    file = config.get("budget-file")
    if file:
        if limits:
            raise InvalidBudget(
                f"the node config has budget-file and also {', '.join(limits)}; give one of them"
            )
        limits = _read_budget(Path(str(file)))
    budget = Budget.parse(**limits, samples=samples)
    for name, value in (("time", budget.time_s), ("memory", budget.memory_bytes)):
        if "profile" not in config and math.isfinite(value):
            raise InvalidBudget(
                f"{name} is {limits[name]!r}, but what spans cost on this device is not known: "
                "give profile in the node config, a table that `cocofl profile` made here, or "
                "give a fraction"
            )
    return budget


def _read_budget(path: Path) -> dict[str, Any]:
    try:
        limits = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # Without its budget a device must not train: it has one, and it is not known.
        raise InvalidBudget(f"cannot read the budget in {path}: {error}") from error
    for key in limits:
        if key not in _LIMITS:
            raise InvalidBudget(
                f"{path}: unknown key {key}{nearest(key, _LIMITS)}; expected {', '.join(_LIMITS)}"
            )
    return limits
