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
====================== ===========================================================================
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from torch import Tensor

from cocofl.errors import InvalidSetting, InvalidState, RunFolderProblem
from cocofl.files import replacing, write_text
from cocofl.fl.metrics import STATISTICS

State = dict[str, Tensor]
Record = dict[str, Any]

EXPERIMENT, ABOUT, PLAN = "experiment.toml", "about.json", "plan.json"
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"

_ORIGIN = ("cocofl", "commit", "torch", "python", "hardware", "engine", "tables")


Fate = Literal["merged", "late", "lost", "rejected", "infeasible"]
FATES: tuple[str, ...] = get_args(Fate)
"""What can become of a device that is asked."""


class Score(float):
    """What a metric comes to, which may well be infinite."""


Scores = Mapping[str, Any]
"""What a model was tested for: a number under each metric's name, and further numbers beside it."""


class DeviceRecord(NamedTuple):
    """A device's part in a round."""

    device: int
    group: str
    work: str | None
    """What it trained; None where that is not known, or nothing fits it."""
    fate: str


class DeviceFigures(NamedTuple):
    """How an update that was merged looks beside the others of its round."""

    device: int
    samples: int
    loss: float
    norm: float
    """Of the change that it sent."""
    against_median: float
    """Its norm over the median norm, in that block where this is largest."""
    scale_change: float
    """The largest factor by which it moves a known scale, up or down; 1 where it moves none."""
    outlier: bool


@dataclass(frozen=True)
class RoundRecord:
    """What is to be known of a round; every figure has its one definition here."""

    round: int
    """Counted from 1."""
    lr: float
    simulated_s: float
    """How long the server of a simulation waits."""
    bytes_up: int
    """The size of all updates that arrived, whatever became of them."""
    loss: float | None
    """The mean over the devices that were merged."""
    devices: Sequence[DeviceRecord]
    scores: Scores = field(default_factory=dict)
    """What the model was tested for, where it was."""
    other_scores: Mapping[str, Scores] = field(default_factory=dict)
    """The same with other norm statistics, by their kind; at the end of a run."""
    bytes_broadcast: int | None = None
    """The size of all that devices were sent, where they are on a network."""
    reasons: Sequence[tuple[int, str]] | None = None
    """Why updates were refused or did not come, where devices are on a network."""
    figures: Sequence[DeviceFigures] | None = None
    """Of every update that was merged, where devices are on a network."""
    quarantined: Sequence[int] | None = None
    """Nodes that were there and were not asked for what they sent before."""
    epsilon: float | None = None
    """What all rounds so far come to, where there is privacy."""

    def count(self, fate: str) -> int:
        """How many devices that became of."""
        return sum(one.fate == fate for one in self.devices)

    def to_json(self) -> Record:
        """As ``metrics.jsonl`` has it."""
        own = {key: getattr(self, key) for key in _OWN_KEYS if key not in FATES}
        own |= {fate: self.count(fate) for fate in FATES}
        own["devices"] = [list(one) for one in self.devices]
        for key in ("reasons", "figures"):
            own[key] = None if own[key] is None else [list(one) for one in own[key]]
        return {
            **{k: own[k] for k in _OWN_KEYS if k not in _NOT_ALWAYS or own[k] is not None},
            **self.scores,
            **{_OTHER[kind]: dict(found) for kind, found in self.other_scores.items()},
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any], where: str) -> RoundRecord:
        """A line of ``metrics.jsonl``, which anybody may have made; ``where`` it stands."""
        for key, check in _OWN_KEYS.items():
            if key not in line and key not in _NOT_ALWAYS:
                raise RunFolderProblem(f"{where} lacks {key!r}")
            if key in line and not check(line[key]):
                raise RunFolderProblem(f"{where}: {key!r} is {_in_short(line[key])}")
        others = {kind: line[key] for kind, key in _OTHER.items() if key in line}
        taken = (*_OWN_KEYS, *_OTHER.values())
        scores = {key: value for key, value in line.items() if key not in taken}
        for found in (scores, *others.values()):
            if not _are_scores(found):
                raise RunFolderProblem(f"{where}: what the model was tested for is not numbers")
        reasons, of_devices = line.get("reasons"), line.get("figures")
        figures: Record = {key: line.get(key) for key in _FIGURES}
        return cls(
            **figures,
            devices=[DeviceRecord(*one) for one in line["devices"]],
            scores=scores,
            other_scores=others,
            reasons=None if reasons is None else [(node, why) for node, why in reasons],
            figures=None if of_devices is None else [DeviceFigures(*one) for one in of_devices],
            quarantined=line.get("quarantined"),
        )


def metric_names(scores: Scores) -> list[str]:
    """The metrics among what a model was tested for, in the order of the experiment.

    >>> metric_names({"accuracy": 0.5, "f1": 0.4, "group_accuracy": {"weak": 0.3}})
    ['accuracy', 'f1']
    """
    return [name for name, value in scores.items() if isinstance(value, int | float)]


def scores_by_name(scores: Scores, key: str) -> Mapping[str, float]:
    """Numbers by name among what a model was tested for, as those of groups; none elsewhere."""
    found = scores.get(key)
    return found if isinstance(found, dict) else {}


def check_metric_names(names: Sequence[str]) -> None:
    """Refuse metrics that could not be told apart in a line of ``metrics.jsonl``."""
    for name in names:
        if name in _OWN_KEYS or name in _OTHER.values() or names.count(name) > 1:
            raise InvalidSetting(
                f"a metric is called {name!r}, and so is something else in {METRICS}; give it "
                "another name"
            )


# Numbers of a file are bounded: one of a thousand digits is no number that can be computed with.
_CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and 0 <= value < 2**64,
    float: lambda value: type(value) in (int, float) and abs(value) < 1e300,  # so it is finite
    Score: lambda value: type(value) is float or (type(value) is int and abs(value) < 1e300),
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    type(None): lambda value: value is None,
}


def _check_of(shape: Any) -> Callable[[Any], bool]:
    """Whether what a JSON file holds is of a shape; a tuple is a list there."""
    origin, inner = get_origin(shape), get_args(shape)
    if origin is Literal:
        return lambda value: value in inner
    checks = [_check_of(one) for one in inner]
    if origin is list:
        return lambda value: isinstance(value, list) and all(map(checks[0], value))
    if origin is dict:
        return lambda value: isinstance(value, dict) and all(map(checks[1], value.values()))
    if origin is tuple:
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )
    if origin is UnionType:
        return lambda value: any(check(value) for check in checks)
    return _CHECKS[shape]


_FIGURES = ("round", "lr", "simulated_s", "bytes_up", "bytes_broadcast", "loss", "epsilon")
_SHAPES = (int, float, float, int, int, float | None, float)
_OWN_KEYS = {
    **dict(zip(_FIGURES, map(_check_of, _SHAPES), strict=True)),
    **dict.fromkeys(FATES, _check_of(int)),
    "devices": _check_of(list[tuple[int, str, str | None, Fate]]),
    "reasons": _check_of(list[tuple[int, str]]),
    "figures": _check_of(list[tuple[int, int, float, float, float, float, bool]]),
    "quarantined": _check_of(list[int]),
}
"""What a line of ``metrics.jsonl`` begins with, in this order, before what was tested."""
_NOT_ALWAYS = ("bytes_broadcast", "reasons", "figures", "quarantined", "epsilon")
"""The last where there is privacy, the others on a network."""
_OTHER = {kind: f"{kind}_statistics" for kind in STATISTICS}
_are_scores = _check_of(dict[str, Score | list[Score] | dict[str, Score]])


def _in_short(value: Any) -> str:
    """A value for a message; one that holds others is not written out, however deep it is."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.40}"


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
        return (self.path / EXPERIMENT).read_text(encoding="utf-8")

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its end."""
        return (self.path / MODEL).is_file()

    @property
    def about(self) -> Record:
        """Machine, versions, command, tables."""
        path = self.path / ABOUT
        try:
            return _parsed(path.read_bytes(), str(path))
        except OSError as error:
            raise RunFolderProblem(f"cannot read {path}: {error}") from error

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
        for part in [*_parts(about, self.path / ABOUT), about]:
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
        with _opened(self.path / CHECKPOINT) as file:
            last, rounds = self.about, _rounds_in(file)
        before = _parts(last, self.path / ABOUT)
        origin = {key: last[key] for key in _ORIGIN if key in last}
        nothing_since = bool(before) and before[-1]["rounds"] >= rounds
        if nothing_since or all(about.get(key) == value for key, value in origin.items()):
            return before
        return [*before, {"rounds": rounds, **origin}]

    def append(self, record: RoundRecord, timing: Record) -> None:
        """Add a round's lines."""
        with _writing(self.path):
            for name, line in ((METRICS, record.to_json()), (TIMING, timing)):
                with (self.path / name).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    def rounds(self) -> list[RoundRecord]:
        """The rounds so far."""
        path, records = self.path / METRICS, []
        metrics: list[str] = []
        for number, line in enumerate(_read_lines(path), start=1):
            where = f"{path}, line {number}"
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
        lines = _read_lines(self.path / TIMING)
        for number, line in enumerate(lines, start=1):
            if not all(_CHECKS[float](line.get(key)) for key in ("train_s", "evaluate_s")):
                raise RunFolderProblem(f"{self.path / TIMING}, line {number}, lacks seconds")
        return lines

    def save_checkpoint(self, rounds_done: int, state: Mapping[str, Tensor]) -> None:
        """Keep the state after so many rounds, in place of the one before."""
        self._write_state(CHECKPOINT, rounds_done, state)

    def rewind(self) -> tuple[int, State] | None:
        """The last checkpoint; what was logged after it is cut off. None if there is none yet."""
        path = self.path / CHECKPOINT
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

    def _write_state(self, name: str, rounds_done: int, state: Mapping[str, Tensor]) -> None:
        content = state_bytes(state, {"rounds": str(rounds_done)})
        with _writing(self.path), replacing(self.path / name) as file:
            file.write(content)

    def check_model(self) -> None:
        """Complain about a final state that is cut off or none; its tensors are not read."""
        path = self.path / MODEL
        try:
            with _opened(path):
                pass
        except InvalidState as error:
            raise InvalidState(
                f"{error}. The run was finished: remove that file, and --resume plays it again"
            ) from error

    def model(self) -> State:
        """The final state, or the last checkpoint of a run that has not ended."""
        for name in (MODEL, CHECKPOINT):
            if (self.path / name).exists():
                return read_state(self.path / name)[1]
        raise RunFolderProblem(f"{self.path} holds no model yet: no round has been kept")


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Make a folder if need be, and keep other processes that ask for it from writing there.

    The folder itself is locked, so nothing is left behind, and whoever is killed has let go of it.
    Where folders cannot be locked (Windows, some network drives) nobody is kept from anything.
    """
    with _writing(path):
        if not path.exists():
            path.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl  # noqa: PLC0415 - it is not everywhere

    with _writing(path):
        held = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderProblem(
                f"another process is writing the run in {path}; let it end, or name another folder"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(held)


def state_bytes(state: Mapping[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """A state as safetensors; equal states give equal bytes."""
    # Here and below, because `import cocofl` costs torch and numpy only.
    from safetensors.torch import save  # noqa: PLC0415

    return save({key: t.contiguous() for key, t in state.items()}, about)


def state_from_bytes(content: bytes) -> State:
    """The state again."""
    from safetensors.torch import load  # noqa: PLC0415

    return load(content)


def read_state(path: Path) -> tuple[int, State]:
    """Rounds done, and the state; nothing in the file is executed, and sizes are checked."""
    with _opened(path) as file:
        return _rounds_in(file), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _rounds_in(file: Any) -> int:
    return int((file.metadata() or {}).get("rounds", "0"))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file whose header is sound and whose size is what that says."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as error:
        raise InvalidState(f"cannot read {path} as safetensors: {error}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderProblem(
            f"cannot write into {path}: {error}. What was written before is whole; mend that, "
            "then continue with --resume"
        ) from error


def _read_lines(path: Path) -> list[Record]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what has no end of line is not complete
    return [_parsed(line, f"{path}, line {number},") for number, line in enumerate(lines, start=1)]


def _parsed(text: str | bytes, where: str) -> Record:
    """A table of a file that anybody may have made."""
    try:
        content: Record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFolderProblem(f"{where} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderProblem(f"{where} is damaged: it is {_in_short(content)}, not a table")
    return content


def _parts(about: Record, path: Path) -> list[Record]:
    """The parts of a run that were played elsewhere, as a file says that anybody may have made."""
    found = about.get("before", [])
    if not isinstance(found, list) or not all(
        isinstance(part, dict) and isinstance(part.get("rounds"), int) for part in found
    ):
        raise RunFolderProblem(f"{path} is damaged: 'before' is no list of parts with their rounds")
    return found


def _cut_lines(path: Path, count: int) -> None:
    """Keep the first ``count`` lines of a file; it must have as many."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if sum(line.endswith(b"\n") for line in lines) < count:
        raise RunFolderProblem(
            f"{path} has {len(lines)} lines, but the checkpoint beside it is of round {count}"
        )
    if len(lines) > count:
        with _writing(path.parent), replacing(path) as file:
            file.writelines(lines[:count])
