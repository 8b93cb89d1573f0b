"""What a deployment is told: Flower's run config on the server, its node config on each device.

A Flower app is a folder with the run config, which ``flwr run`` sends to everybody. The run config
has the keys of an experiment file, ``training.lr`` for example, and a section
``flower`` of its own. Flower passes numbers, texts and booleans only, so a list or a table is
written as a text: ``decay_rounds = "[600, 800]"``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cocofl.budget import Budget
from cocofl.checks import check_number
from cocofl.config import Experiment, from_table, parse_value
from cocofl.errors import InvalidBudget, InvalidExperiment, RunFolderProblem
from cocofl.files import parsed_toml, read_limited, write_text
from cocofl.fl.codec import Codec
from cocofl.fl.merge import Mean, Merge, ServerOptimizer
from cocofl.fl.rules import AUTO
from cocofl.fl.strategies import STRATEGIES, StrategyFacts, facts_of
from cocofl.fl.strategies.facts import BLOCKS
from cocofl.flower.secure_updates import MOST_SAMPLES
from cocofl.flower.updates import MAX_CHANGE, MAX_SAMPLES
from cocofl.named import nearest

SECTION = "flower."
LEAST_DEVICES = 3
"""Of two each knows the other's numbers from the sum."""
_LIMITS = ("time", "memory", "upload")
_MOST_BUDGET_BYTES = 2**16
_HEAD = """\
# A Flower app that runs CoCoFL: `flwr run . NAME-OF-THE-SUPERLINK --stream`.
# Your own modules go beside this file; `model.name` and `data.name` name functions in them,
# such as "task:network" and "task:samples".
[project]
name = "cocofl-app"
version = "1.0.0"
description = "CoCoFL on Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "cocofl"

[tool.flwr.app.components]
serverapp = "cocofl.flower.server:app"
clientapp = "cocofl.flower.client:app"
"""
# Devices say for themselves who they are and what they have.
_NOT_DEPLOYED = ("devices", "faults", "tables", "name")


@dataclass(frozen=True)
class Deployment:
    """How the server runs its rounds over a real network."""

    folder: str = "runs/flower"
    """The run folder, on the server; a relative path is relative to where the SuperLink runs."""
    resume: bool = False
    """Go on with what is there."""
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
    quarantine: int = 0
    """A node that is an outlier so often within 20 rounds is no longer asked; 0: nobody."""
    secure_aggregation: bool = False
    """Whether the server learns sums of updates only."""
    secure_least: int = LEAST_DEVICES
    """No sum over fewer devices is opened."""

    def __post_init__(self) -> None:
        check_number("flower.nodes", self.nodes, least=1)
        check_number("flower.per_round", self.per_round, least=0)
        check_number("flower.wait_s", self.wait_s, above=0)
        check_number("flower.round_s", self.round_s, above=0)
        check_number("flower.max_samples", self.max_samples, least=1)
        check_number("flower.max_change", self.max_change, above=0)
        check_number("flower.quarantine", self.quarantine, least=0)
        check_number("flower.secure_least", self.secure_least, least=LEAST_DEVICES)


def read_run_config(config: Mapping[str, Any]) -> tuple[Experiment, Deployment]:
    """The experiment and the deployment that a run config asks for.

    >>> experiment, deployment = read_run_config({"training.lr": 0.05, "flower.nodes": 3})
    >>> experiment.training.lr, deployment.nodes
    (0.05, 3)
    """
    changes, own = dict[str, Any](), dict[str, Any]()
    for key, item in config.items():
        if key.startswith(SECTION):
            own[key.removeprefix(SECTION)] = item
        else:  # texts that are lists or tables become that; other texts stay texts
            changes[key] = parse_value(item) if str(item)[:1] in ("[", "{") else item
    return Experiment().changed(changes), from_table(Deployment, own, SECTION)


def run_config(experiment: Experiment, deployment: Deployment) -> dict[str, Any]:
    """Both as Flower's run config: dotted keys; numbers, texts and booleans.

    >>> config = run_config(Experiment(rounds=3), Deployment(nodes=5))
    >>> config["rounds"], config["training.lr"], config["flower.nodes"]
    (3, 0.1, 5)
    """
    content = {k: v for k, v in experiment.to_dict().items() if k not in _NOT_DEPLOYED}
    config = dict(_flat(content, ""))
    return config | {SECTION + key: value for key, value in asdict(deployment).items()}


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield prefix + key, json.dumps(value)
        elif value != float("inf"):
            yield prefix + key, value


def write_app(folder: Path, config: Mapping[str, Any]) -> Path:
    """The app in a folder; a key that ``flwr run -c`` is to change must be in its config."""
    path = folder / "pyproject.toml"
    if path.exists():
        raise RunFolderProblem(f"{path} exists already; name another folder")
    sections: dict[str, list[str]] = {}
    for key, value in config.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    lines = [_HEAD]
    for section, content in sorted(sections.items()):
        lines += [f"[tool.flwr.app.config{'.' + section if section else ''}]", *content, ""]
    write_text(path, "\n".join(lines))
    return folder


def toml_value(value: Any) -> str:
    """A value of a run config."""
    if not isinstance(value, bool | int | float | str):
        raise InvalidExperiment(
            f"{value!r} cannot be in a run config; expected a number, a text, true or false"
        )
    return json.dumps(value)


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
    if facts.own_network:
        raise InvalidExperiment(
            f"strategy {name!r} cannot be deployed: it chooses a network by what simulated devices "
            "have. Deploy that network: name its width in model.options"
        )
    if not facts.waits:
        raise InvalidExperiment(
            f"strategy {name!r} cannot be deployed: its server does not wait for the devices of a "
            "round, and a deployment goes by rounds; simulate it with `cocofl run`"
        )
    if facts.uploads != BLOCKS:
        able = [known for known in STRATEGIES if _can_be_deployed(facts_of(known))]
        raise InvalidExperiment(
            f"strategy {name!r} cannot be deployed: its devices do not send whole blocks; "
            f"expected {', '.join(able)}, or one of your own whose facts say that it does"
        )


def _can_be_deployed(facts: StrategyFacts) -> bool:
    return facts.uploads == BLOCKS and facts.waits and not facts.own_network


def check_privacy(
    experiment: Experiment, deployment: Deployment, merge: Merge, codec: Codec
) -> None:
    """Complain about what cannot be private as it is asked for, and say why."""
    if experiment.privacy.is_on and not deployment.per_round:
        raise InvalidExperiment(
            "privacy is on, and noisy sums are divided by a number of devices that is known "
            "beforehand: give flower.per_round"
        )
    if deployment.quarantine and (experiment.privacy.is_on or deployment.secure_aggregation):
        raise InvalidExperiment(
            "flower.quarantine is for nodes whose updates stand out, but with privacy or "
            "flower.secure_aggregation nobody looks at single updates; set it to 0"
        )
    if not deployment.secure_aggregation:
        return
    if not sums_suffice(merge):
        raise InvalidExperiment(
            "flower.secure_aggregation is on, and the server learns sums only, but it merges by "
            f"{merge!r:.200}, which wants more; expected Mean('everyone'), or a ServerOptimizer on "
            "top of it, and in [merge] rules = [] and share = 1"
        )
    if not codec.is_exact:
        raise InvalidExperiment(
            f"flower.secure_aggregation is on, but upload.codec is {experiment.upload.codec!r}, "
            'and encoded updates cannot be added up; expected "identity"'
        )
    if deployment.max_samples > MOST_SAMPLES:
        raise InvalidExperiment(
            f"flower.secure_aggregation is on, but flower.max_samples is {deployment.max_samples}; "
            f"sums are of at most {MOST_SAMPLES} per device"
        )


def with_sensible_rules(experiment: Experiment, deployment: Deployment) -> Experiment:
    """The same with the plain mean for ``auto``, where nobody compares single devices."""
    hides = experiment.privacy.is_on or deployment.secure_aggregation
    if not hides or AUTO not in experiment.merge.rules:
        return experiment
    return experiment.changed({"merge.rules": []})


def sums_suffice(merge: Merge) -> bool:
    """Whether a merge needs to know no more than the sum over everyone.

    >>> sums_suffice(Mean("everyone")), sums_suffice(Mean("senders"))
    (True, False)
    """
    if isinstance(merge, ServerOptimizer):
        return type(merge).begin is ServerOptimizer.begin and sums_suffice(merge.merge)
    return type(merge) is Mean and merge.over == "everyone" and merge.rules is None


def alike_devices(experiment: Experiment, count: int) -> Experiment:
    """The experiment with so many devices of one group: who has what is the devices' own affair."""
    one = {"devices.per_round": 1, "devices.groups": [{"name": "all"}]}
    return experiment.changed({"devices.count": count, **one})


def trusted_modules(config: Mapping[str, Any]) -> list[str]:
    """The modules of which a node config lets the server name functions."""
    return str(config.get("trust", "")).split()


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
        limits = parsed_toml(read_limited(path, _MOST_BUDGET_BYTES))
    except (OSError, ValueError) as error:
        # Without its budget a device must not train: it has one, and it is not known.
        raise InvalidBudget(f"cannot read the budget in {path}: {error}") from error
    for key in limits:
        if key not in _LIMITS:
            raise InvalidBudget(
                f"{path}: unknown key {key}{nearest(key, _LIMITS)}; expected {', '.join(_LIMITS)}"
            )
    return limits
