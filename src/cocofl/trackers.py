"""Experiment trackers as watchers: what the round loop says goes to TensorBoard, W&B or MLflow.

A tracker is three lines around :class:`Tracker`: how to log a dict of numbers, and how to end.
Their libraries are imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocofl.checks import check_choice
from cocofl.config import Experiment
from cocofl.errors import InvalidSetting
from cocofl.runlog import RoundRecord


@dataclass(frozen=True)
class Tracker:
    """A watcher that hands the numbers of every round to a tracking library."""

    log: Callable[[Mapping[str, float], int], Any]
    on_end: Callable[[], Any]
    """Lets the library finish its files."""

    def on_round(self, record: RoundRecord) -> None:
        """Log what is a number, groups one by one."""
        self.log(numbers(record.to_json()), record.round)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a round's record, by flat names.

    >>> numbers({"round": 3, "loss": None, "group_accuracy": {"weak": 0.5}, "devices": [1]})
    {'group_accuracy/weak': 0.5}
    """
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": item for name, item in numbers(value).items()}
        elif key != "round" and isinstance(value, int | float):
            found[key] = float(value)
    return found


def tracker(name: str, experiment: Experiment, path: Path) -> Tracker:
    """The tracker of that name for a run that goes to ``path``."""
    check_choice("--track", name, tuple(TRACKERS))
    try:
        return TRACKERS[name](experiment, path)
    except ImportError as error:
        raise InvalidSetting(
            f"tracking with {name} needs its library: {error}; pip install '{_PACKAGES[name]}'"
        ) from error


def _tensorboard(experiment: Experiment, path: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    writer = SummaryWriter(path.parent / f"{path.name}-tensorboard")
    writer.add_text("experiment", f"```toml\n{experiment.to_toml()}```")

    def log(values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker(log, writer.close)


def _wandb(experiment: Experiment, path: Path) -> Tracker:
    import wandb  # noqa: PLC0415

    run = wandb.init(project="cocofl", name=path.name, config=experiment.to_dict())
    return Tracker(lambda values, step: run.log(dict(values), step=step), run.finish)


def _mlflow(experiment: Experiment, path: Path) -> Tracker:
    import mlflow  # noqa: PLC0415

    mlflow.set_experiment("cocofl")
    mlflow.start_run(run_name=path.name)
    mlflow.log_dict(experiment.to_dict(), "experiment.json")
    return Tracker(lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


TRACKERS: dict[str, Callable[[Experiment, Path], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
_PACKAGES = {"tensorboard": "cocofl[tensorboard]", "wandb": "wandb", "mlflow": "mlflow"}
