"""Experiment trackers as watchers: what the round loop says goes to TensorBoard, W&B or MLflow.

A library is one function here, which opens a record of a run: how to log numbers, how to keep a
file, how to end. Libraries are imported only when asked for, and their own environment variables
(where to, which project, offline or not) hold.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cocofl.checks import check_choice
from cocofl.config import Experiment
from cocofl.errors import InvalidSetting
from cocofl.runlog import ABOUT, EXPERIMENT, MODEL, RoundRecord, RunFolder

PROJECT = "cocofl"
"""Where runs go that no environment variable sends elsewhere."""
KEPT = (EXPERIMENT, ABOUT, MODEL, "report.html")
"""What a library gets of the folder of a run or of a comparison, once that is complete."""

Outcome = Literal["finished", "stopped", "failed"]


class Opened(NamedTuple):
    """A run, or a comparison of runs, as a library has it open."""

    path: Path
    log: Callable[[Mapping[str, float], int], Any]
    keep: Callable[[Path], Any]
    end: Callable[[Outcome], Any]
    id: str = ""


Library = Callable[[Path, Experiment, Opened | None], Opened]
"""Opens what goes to a folder, as a part of a comparison perhaps."""


@dataclass
class Tracker:
    """A watcher that hands the rounds of one run to libraries, and in the end its files."""

    path: Path
    at: Sequence[Opened]
    ends_by_itself: bool = False
    is_open: bool = True
    round: int = 0

    def on_round(self, record: RoundRecord) -> None:
        """Log what is a number, groups one by one; a round that is played again only once."""
        if record.round <= self.round:
            return
        self.round = record.round
        for one in self.at:
            one.log(numbers(record.to_json()), record.round)

    def on_end(self) -> None:
        """The run is complete; what has a report still to come ends later."""
        if self.ends_by_itself:
            self.end("finished")

    def keep(self, *names: str) -> None:
        """Hand over files of its folder, where they are there."""
        for name in names:
            if (self.path / name).is_file():
                for one in self.at:
                    one.keep(self.path / name)

    def end(self, outcome: Outcome) -> None:
        """Hand over the files of what is complete, and say how it ended; that stays so."""
        if not self.is_open:
            return
        self.is_open = False
        if outcome == "finished":
            self.keep(*KEPT)
        for one in self.at:
            one.end(outcome)


class Tracking:
    """All libraries during a command: of one run, or of a comparison of many."""

    def __init__(self, libraries: Sequence[Library]) -> None:
        self._libraries = libraries
        self._comparison: Tracker | None = None
        self._trackers: list[Tracker] = []

    def begin_comparison(self, path: Path, experiment: Experiment) -> None:
        """Runs that begin from now on belong together; the report about them lies in ``path``."""
        self._comparison = self.watch(path, experiment)[0] if self._libraries else None

    def watch(self, path: Path, experiment: Experiment) -> list[Tracker]:
        """Who is told of a run that begins now, or goes on: then of the rounds before, too."""
        if not self._libraries:
            return []
        comparison = self._comparison
        within = comparison.at if comparison else [None] * len(self._libraries)
        at = [
            begin(path, experiment, of) for begin, of in zip(self._libraries, within, strict=True)
        ]
        tracker = Tracker(path, at, ends_by_itself=comparison is not None)
        self._trackers.append(tracker)
        for record in RunFolder(path).rounds():
            tracker.on_round(record)
        return [tracker]

    def end(self, outcome: Outcome) -> None:
        """Say how the command ended of all that is open, a comparison last."""
        for one in reversed(self._trackers):
            one.end(outcome)


@contextmanager
def tracking(names: Sequence[str]) -> Iterator[Tracking]:
    """Let these libraries know of what runs inside, and how it ended."""
    found = Tracking([_library(name) for name in names])
    outcome: Outcome = "failed"
    try:
        yield found
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "stopped"
        raise
    finally:
        found.end(outcome)


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


def _library(name: str) -> Library:
    check_choice("--track", name, tuple(TRACKERS))
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise InvalidSetting(
            f"tracking with {name} needs its library: {error}; pip install 'cocofl[{name}]'"
        ) from error


def _tensorboard() -> Library:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    def begin(path: Path, experiment: Experiment, within: Opened | None) -> Opened:
        folder = path.with_name(f"{path.name}-tensorboard")
        if within is not None:
            folder = Path(within.id) / path.relative_to(within.path)
        writer = SummaryWriter(folder)
        writer.add_text("experiment", f"```toml\n{experiment.to_toml()}```")

        def log(values: Mapping[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        # It shows no files, and knows no outcome.
        return Opened(path, log, lambda _: None, lambda _: writer.close(), str(folder))

    return begin


def _wandb() -> Library:
    import wandb  # noqa: PLC0415

    codes: dict[Outcome, int] = {"finished": 0, "failed": 1, "stopped": 130}

    def begin(path: Path, experiment: Experiment, within: Opened | None) -> Opened:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME") or _name(path, within),
            group=within.path.name if within else os.environ.get("WANDB_RUN_GROUP"),
            config=experiment.to_dict(),
            reinit="create_new",  # those of a comparison are open beside it
        )

        def keep(file: Path) -> None:
            kind = "model" if file.name == MODEL else "file"
            name = re.sub(r"[^\w.-]", "_", f"{run.id}-{file.name}")
            found = wandb.Artifact(name, type=kind)
            found.add_file(str(file))
            run.log_artifact(found)

        return Opened(
            path,
            lambda values, step: run.log(dict(values), step=step),
            keep,
            lambda outcome: run.finish(exit_code=codes[outcome]),
            str(run.id),
        )

    return begin


def _mlflow() -> Library:
    from mlflow import MlflowClient  # noqa: PLC0415
    from mlflow.entities import Metric, Param  # noqa: PLC0415

    words: dict[Outcome, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
    # Not mlflow.start_run: that has one run open at a time.
    client = MlflowClient()

    def begin(path: Path, experiment: Experiment, within: Opened | None) -> Opened:
        given = os.environ.get("MLFLOW_RUN_ID") if within is None else None
        run = given or _new_run(client, _name(path, within), within)
        settings = experiment.by_key().items()
        params = [Param(key, _text(value)[:6000]) for key, value in settings]
        client.log_batch(run, params=params)

        def log(values: Mapping[str, float], step: int) -> None:
            now = time.time_ns() // 10**6
            named = {re.sub(r"[^\w./ :-]", "_", key): value for key, value in values.items()}
            client.log_batch(run, [Metric(key, value, now, step) for key, value in named.items()])

        return Opened(
            path,
            log,
            lambda file: client.log_artifact(run, str(file)),
            lambda outcome: client.set_terminated(run, words[outcome]),
            run,
        )

    return begin


def _new_run(client: Any, name: str, within: Opened | None) -> str:
    """A run of MLflow's, in the experiment that its variables name."""
    place = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if place is None:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        there = client.get_experiment_by_name(wanted)
        place = there.experiment_id if there else client.create_experiment(wanted)
    tags = {"mlflow.parentRunId": within.id} if within else {}
    created = client.create_run(place, tags=tags, run_name=name)
    return str(created.info.run_id)


def _name(path: Path, within: Opened | None) -> str:
    """A run by its folder; one of a comparison by where it lies in there."""
    return path.name if within is None else path.relative_to(within.path).as_posix()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


TRACKERS: dict[str, Callable[[], Library]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
