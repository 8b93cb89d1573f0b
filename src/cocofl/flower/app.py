"""A Flower app as a folder: what ``flwr run`` sends to everybody."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cocofl.config import Experiment
from cocofl.errors import InvalidExperiment, RunFolderProblem
from cocofl.flower.settings import SECTION, Deployment

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
    folder.mkdir(parents=True, exist_ok=True)
    sections: dict[str, list[str]] = {}
    for key, value in config.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    lines = [_HEAD]
    for section, content in sorted(sections.items()):
        lines += [f"[tool.flwr.app.config{'.' + section if section else ''}]", *content, ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return folder


def toml_value(value: Any) -> str:
    """A value of a run config."""
    if not isinstance(value, bool | int | float | str):
        raise InvalidExperiment(
            f"{value!r} cannot be in a run config; expected a number, a text, true or false"
        )
    return json.dumps(value)
