"""The run folder: its files, written so that a run killed at any moment can go on.

====================== ===========================================================================
experiment.toml        the experiment with every setting spelt out
metrics.jsonl          one line per round; the same bytes whenever the same experiment is run
timing.jsonl           one line per round: wall-clock seconds of its parts
checkpoint.safetensors the server's state after some round, replaced as a whole
plan.json              which int8 kernel every worker uses
about.json             machine, versions, command, which profile tables served; all that before,
                       too, of a run that went on elsewhere
model.safetensors      the final state; its being there says that the run is complete
average.safetensors    the same of the mean over rounds, where the experiment keeps one
====================== ===========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cocofl.checks import Amount, Check, check_of, in_short
from cocofl.errors import InvalidState, RunFolderProblem
from cocofl.files import (
    append_text,
    locked,
    parsed_json,
    read_limited,
    read_lines,
    replacing,
    write_text,
)
from cocofl.runlog.records import METRICS, Record, RoundRecord, metric_names
from cocofl.runlog.states import State, opened, read_state, rounds_in, write_state
from cocofl.span import MOST_BLOCKS

EXPERIMENT, ABOUT, PLAN = "experiment.toml", "about.json", "plan.json"
TIMING = "timing.jsonl"
CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
AVERAGE = "average.safetensors"

MOST_LINE_BYTES, MOST_LOG_BYTES = 16 * 2**20, 2**30

_ORIGIN = ("cocofl", "commit", "torch", "python", "hardware", "engine", "tables")

_are_seconds = check_of(Amount)
_ORIGIN_CHECKS: dict[str, Check] = {
    **dict.fromkeys(_ORIGIN, check_of(str)),
    "tables": check_of(dict[str, str]),
}
_PART_CHECKS = {"rounds": check_of(int), **_ORIGIN_CHECKS}
_ABOUT_CHECKS: dict[str, Check] = {
    **_ORIGIN_CHECKS,
    **dict.fromkeys(("command", "strategy"), check_of(str)),
    "strategy_facts": check_of(dict[str, str | bool | int]),
    "metrics": check_of(dict[str, dict[str, str | bool]]),
    "model_blocks": lambda value: check_of(int)(value) and value <= MOST_BLOCKS,
    "samples_left_over": check_of(int),
    "together": check_of(list[str]),
    "before": check_of(list[dict[str, int | str | dict[str, str]]]),
}
"""What is known of ``about.json``; later versions may say more."""


@dataclass(frozen=True)
class RunFolder:
    """A run on disk. Nothing in it is overwritten but the checkpoint."""

    path: Path

    @classmethod
    def create(cls, path: Path, experiment: str) -> RunFolder:
        """A new folder for an experiment; one that holds a run already is left as it is."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            holds_run = (path / EXPERIMENT).is_file()
            way_out = "continue it with --resume, or name another" if holds_run else "name another"
            raise RunFolderProblem(f"{path} exists already; {way_out} with --out")
        with _writing(path):
            write_text(path / EXPERIMENT, experiment)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        if not (path / EXPERIMENT).is_file():
            raise RunFolderProblem(f"{path} is not a run folder: it has no {EXPERIMENT}")
        return cls(path)

    @property
    def experiment(self) -> str:
        """The experiment as it was resolved."""
        path = self.path / EXPERIMENT
        try:
            return read_limited(path).decode()
        except (OSError, ValueError) as error:
            raise RunFolderProblem(f"cannot read {path}: {error}") from error

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its end."""
        return (self.path / MODEL).is_file()

    @property
    def about(self) -> Record:
        """Machine, versions, command, tables."""
        path = self.path / ABOUT
        try:
            content = _parsed(read_limited(path), str(path))
        except OSError as error:
            raise RunFolderProblem(f"cannot read {path}: {error}") from error
        _check_about(content, _ABOUT_CHECKS, str(path))
        for part in content.get("before", []):
            _check_about({"rounds": None, **part}, _PART_CHECKS, str(path))
        return content

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Keep what is known of this run besides its numbers.

        Of a run that goes on elsewhere, or with another version, ``before`` says how it was until
        then.
        """
        before = self._before(about)
        content = {**about, "before": before} if before else about
        with _writing(self.path):
            write_text(self.path / ABOUT, json.dumps(content, indent=1) + "\n")

    def origin(self, key: str) -> str:
        """What ``about`` says under a key; part by part where a run went on elsewhere."""
        return self.by_part(lambda about: str(about.get(key, "")))

    def by_part(self, tell: Callable[[Record], str]) -> str:
        """What ``tell`` makes of ``about``, of each part where a run went on elsewhere."""
        parts: list[tuple[str, int | None]] = []
        about = self.about
        for part in [*about.get("before", []), about]:
            told, until = tell(part), part.get("rounds")
            if parts and parts[-1][0] == told:
                parts.pop()
            parts.append((told, until))
        *first, (last, _) = parts
        return ", then ".join([*(f"{told} to round {until}" for told, until in first), last])

    def _before(self, about: Mapping[str, Any]) -> list[Record]:
        """Where the rounds that are kept come from, as far as ``about`` does not say it."""
        if not (self.path / ABOUT).exists() or not (self.path / CHECKPOINT).exists():
            return []
        with _advised(), opened(self.path / CHECKPOINT) as file:
            last, rounds = self.about, rounds_in(file)
        before: list[Record] = last.get("before", [])
        origin = {key: last[key] for key in _ORIGIN if key in last}
        nothing_since = bool(before) and before[-1]["rounds"] >= rounds
        if nothing_since or all(about.get(key) == value for key, value in origin.items()):
            return before
        return [*before, {"rounds": rounds, **origin}]

    def append(self, record: RoundRecord, timing: Record) -> None:
        """Add a round's lines."""
        with _writing(self.path):
            for name, line in ((METRICS, record.to_json()), (TIMING, timing)):
                append_text(self.path / name, json.dumps(line) + "\n")

    def rounds(self) -> list[RoundRecord]:
        """The rounds so far."""
        path, records = self.path / METRICS, []
        metrics: list[str] = []
        for number, (where, line) in enumerate(_read_log(path), start=1):
            record = RoundRecord.from_json(line, where)
            if record.round != number:
                raise RunFolderProblem(f"{where} is of round {record.round}")
            names = metric_names(record.scores)
            if record.scores and names != (metrics := metrics or names):
                raise RunFolderProblem(f"{where} has other metrics than the lines before it")
            if record.scores and not names:
                raise RunFolderProblem(f"{where} has scores, but no metric")
            records.append(record)
        return records

    def timing(self) -> list[Record]:
        """Wall-clock seconds of the rounds so far."""
        lines = []
        for where, line in _read_log(self.path / TIMING):
            if not all(_are_seconds(line.get(key)) for key in ("train_s", "evaluate_s")):
                raise RunFolderProblem(f"{where} lacks seconds")
            lines.append(line)
        return lines

    def save_checkpoint(self, rounds_done: int, state: Mapping[str, Tensor]) -> None:
        """Keep the state after so many rounds, in place of the one before."""
        self._write_state(CHECKPOINT, rounds_done, state)

    def rewind(self) -> tuple[int, State] | None:
        """The last checkpoint; what was logged after it is cut off. None if there is none yet."""
        path = self.path / CHECKPOINT
        with _advised():
            found = read_state(path) if path.exists() else None
        rounds_done = found[0] if found else 0
        for name in (METRICS, TIMING):
            _cut_lines(self.path / name, rounds_done)
        return found

    def save_model(self, state: Mapping[str, Tensor], rounds_done: int) -> None:
        """Keep the final state, which ends the run."""
        self._write_state(MODEL, rounds_done, state)
        with _writing(self.path):
            (self.path / CHECKPOINT).unlink(missing_ok=True)

    def save_average(self, state: Mapping[str, Tensor], rounds_done: int) -> None:
        """Keep the mean over rounds, before the final state ends the run."""
        self._write_state(AVERAGE, rounds_done, state)

    def _write_state(self, name: str, rounds_done: int, state: Mapping[str, Tensor]) -> None:
        with _writing(self.path):
            write_state(self.path / name, rounds_done, state)

    def check_model(self) -> None:
        """Complain about a final state that is cut off, changed or none."""
        with _advised(), opened(self.path / MODEL):
            pass

    def average(self) -> State:
        """The mean over rounds of a run that has ended."""
        path = self.path / AVERAGE
        if not path.exists():
            raise RunFolderProblem(
                f"{self.path} holds no mean over rounds: it is kept where evaluation.average is "
                "above 0, and is there when the run has ended"
            )
        return read_state(path)[1]

    def model(self) -> State:
        """The final state, or the last checkpoint of a run that has not ended."""
        for name in (MODEL, CHECKPOINT):
            if (self.path / name).exists():
                with _advised():
                    return read_state(self.path / name)[1]
        raise RunFolderProblem(f"{self.path} holds no model yet: no round has been kept")


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Make a folder if need be, and keep other processes that ask for it from writing there."""
    with ExitStack() as until_the_end:
        with _writing(path):
            try:
                until_the_end.enter_context(locked(path, wait=False))
            except BlockingIOError as error:
                raise RunFolderProblem(
                    f"another process is writing the run in {path}; let it end, or name another "
                    "folder"
                ) from error
        yield


@contextmanager
def _advised() -> Iterator[None]:
    """Say what to do about a state of a run that cannot be read."""
    try:
        yield
    except InvalidState as error:
        raise InvalidState(
            f"{error}. Put back a copy, or remove the file: --resume then plays its rounds again"
        ) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderProblem(
            f"cannot write into {path}: {error}. What was written before is whole; mend that, "
            "then continue with --resume"
        ) from error


def _read_log(path: Path) -> Iterator[tuple[str, Record]]:
    """Each line of a log that was completed, and where it stands."""
    if not path.exists():
        return
    try:
        for number, line in enumerate(read_lines(path, MOST_LINE_BYTES, MOST_LOG_BYTES), start=1):
            where = f"{path}, line {number}"
            yield where, _parsed(line, where)
    except OSError as error:
        raise RunFolderProblem(f"cannot read {path}: {error}") from error


def _parsed(text: bytes, where: str) -> Record:
    """A table of a file that anybody may have made."""
    try:
        content: Record = parsed_json(text)
    except ValueError as error:
        raise RunFolderProblem(f"{where} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderProblem(f"{where} is damaged: it is {in_short(content)}, not a table")
    return content


def _check_about(content: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> None:
    for key, check in checks.items():
        if key in content and not check(content[key]):
            raise RunFolderProblem(f"{where} is damaged: {key!r} is {in_short(content[key])}")


def _cut_lines(path: Path, count: int) -> None:
    """Keep the first ``count`` lines of a file; it must have as many."""
    try:
        content = read_limited(path, MOST_LOG_BYTES) if path.exists() else b""
    except OSError as error:
        raise RunFolderProblem(f"cannot read {path}: {error}") from error
    lines = content.splitlines(keepends=True)
    if sum(line.endswith(b"\n") for line in lines) < count:
        raise RunFolderProblem(
            f"{path} has {len(lines)} lines, but the checkpoint beside it is of round {count}"
        )
    if len(lines) > count:
        with _writing(path.parent), replacing(path) as file:
            file.writelines(lines[:count])
