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

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from cocofl.checks import Amount, Check, Score, check_of, in_short
from cocofl.errors import InvalidSetting, InvalidState, RunFolderProblem
from cocofl.files import (
    append_text,
    check_plain,
    locked,
    parsed_json,
    read_limited,
    read_lines,
    replacing,
    write_text,
)
from cocofl.fl.metrics import STATISTICS
from cocofl.span import MOST_BLOCKS

State = dict[str, Tensor]
Record = dict[str, Any]

EXPERIMENT, ABOUT, PLAN = "experiment.toml", "about.json", "plan.json"
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
AVERAGE = "average.safetensors"

MOST_LINE_BYTES, MOST_LOG_BYTES = 16 * 2**20, 2**30
MOST_STATE_BYTES = 64 * 2**30

_ORIGIN = ("cocofl", "commit", "torch", "python", "hardware", "engine", "tables")

Fate = Literal["merged", "late", "lost", "rejected", "infeasible"]
FATES: tuple[str, ...] = get_args(Fate)
"""What can become of a device that is asked."""


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


@dataclass(frozen=True, slots=True)
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
    averaged_scores: Mapping[str, Scores] = field(default_factory=dict)
    """Of the mean of the model over rounds, where one is kept, by the kind of norm statistics."""
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
    energy_j: float | None = None
    """What training took on all devices that were asked, where their power is known."""

    def count(self, fate: str) -> int:
        """How many devices that became of."""
        return [one.fate for one in self.devices].count(fate)

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
            **{_AVERAGED[kind]: dict(found) for kind, found in self.averaged_scores.items()},
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any], where: str) -> RoundRecord:
        """A line of ``metrics.jsonl``, which anybody may have made; ``where`` it stands."""
        for key, check in _OWN_KEYS.items():
            if key not in line and key not in _NOT_ALWAYS:
                raise RunFolderProblem(f"{where} lacks {key!r}")
            if key in line and not check(line[key]):
                raise RunFolderProblem(f"{where}: {key!r} is {in_short(line[key])}")
        others = {kind: line[key] for kind, key in _OTHER.items() if key in line}
        averaged = {kind: line[key] for kind, key in _AVERAGED.items() if key in line}
        taken = (*_OWN_KEYS, *_OTHER.values(), *_AVERAGED.values())
        scores = {key: value for key, value in line.items() if key not in taken}
        for found in (scores, *others.values(), *averaged.values()):
            if not _are_scores(found):
                raise RunFolderProblem(f"{where}: what the model was tested for is not numbers")
        reasons, of_devices = line.get("reasons"), line.get("figures")
        figures: Record = {key: line.get(key) for key in _FIGURES}
        found = cls(
            **figures,
            devices=[_device_record(*one) for one in line["devices"]],
            scores=scores,
            other_scores=others,
            averaged_scores=averaged,
            reasons=None if reasons is None else [(node, why) for node, why in reasons],
            figures=None if of_devices is None else [DeviceFigures(*one) for one in of_devices],
            quarantined=line.get("quarantined"),
        )
        fates = [one.fate for one in found.devices]
        for fate in FATES:
            if line[fate] != fates.count(fate):
                raise RunFolderProblem(f"{where}: {fate!r} is {line[fate]}, unlike its devices")
        return found


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
        taken = (*_OWN_KEYS, *_OTHER.values(), *_AVERAGED.values())
        if name in taken or names.count(name) > 1:
            raise InvalidSetting(
                f"a metric is called {name!r}, and so is something else in {METRICS}; give it "
                "another name"
            )


_is_device = check_of(tuple[int, str, str | None, Fate])


@lru_cache(maxsize=2**14, typed=True)
def _device_record(*fields: Any) -> DeviceRecord:
    """A device's part in a round, if it can be one; rounds that are alike share it."""
    if not _is_device(list(fields)):
        raise ValueError
    return DeviceRecord(*fields)


def _are_devices(value: Any) -> bool:
    with suppress(TypeError, ValueError):
        return isinstance(value, list) and all(
            isinstance(one, list) and _device_record(*one) is not None for one in value
        )
    return False


_FIGURES = (
    "round",
    "lr",
    "simulated_s",
    "bytes_up",
    "bytes_broadcast",
    "loss",
    "epsilon",
    "energy_j",
)
_SHAPES = (int, float, Amount, int, int, float | None, Amount, Amount)
_OWN_KEYS: dict[str, Check] = {
    **dict(zip(_FIGURES, map(check_of, _SHAPES), strict=True)),
    **dict.fromkeys(FATES, check_of(int)),
    "devices": _are_devices,
    "reasons": check_of(list[tuple[int, str]]),
    "figures": check_of(list[tuple[int, int, float, float, float, float, bool]]),
    "quarantined": check_of(list[int]),
}
"""What a line of ``metrics.jsonl`` begins with, in this order, before what was tested."""
_NOT_ALWAYS = ("bytes_broadcast", "reasons", "figures", "quarantined", "epsilon", "energy_j")
"""The last two where there is privacy, and power; the others on a network."""
_OTHER = {kind: f"{kind}_statistics" for kind in STATISTICS}
_AVERAGED = {kind: f"averaged_{kind}_statistics" for kind in STATISTICS}
_are_seconds = check_of(Amount)
_are_scores = check_of(dict[str, Score | list[Score] | dict[str, Score]])

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
        with _advised(), _opened(self.path / CHECKPOINT) as file:
            last, rounds = self.about, _rounds_in(file)
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
        content = _with_checksum(state_bytes(state), {_ROUNDS: str(rounds_done)})
        with _writing(self.path), replacing(self.path / name) as file:
            file.write(content)

    def check_model(self) -> None:
        """Complain about a final state that is cut off, changed or none."""
        with _advised(), _opened(self.path / MODEL):
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


def state_bytes(state: Mapping[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """A state as safetensors; equal states give equal bytes."""
    # Here and below, because `import cocofl` costs torch and numpy only.
    from safetensors.torch import save  # noqa: PLC0415

    return save({key: t.contiguous() for key, t in state.items()}, about)


def state_from_bytes(content: bytes) -> State:
    """The state again."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load  # noqa: PLC0415

    try:
        return load(content)
    except (SafetensorError, ValueError) as error:
        raise InvalidState(f"a state of {len(content)} bytes cannot be read: {error}") from error


def read_state(path: Path) -> tuple[int, State]:
    """Rounds done, and the state; nothing in the file is executed, sizes and checksum are right."""
    with _opened(path) as file:
        return _rounds_in(file), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


_ROUNDS, _CHECKSUM = "rounds", "sha256"
_BLANK = "0" * 64
"""Stands for the checksum while that is computed, of all bytes of the file."""


def _with_checksum(content: bytes, about: Mapping[str, str]) -> bytes:
    """A safetensors file with facts, and a checksum of everything in it beside them."""
    # Put together here, as the library writes several facts in another order every time.
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = {**about, _CHECKSUM: _BLANK}
    header = json.dumps({"__metadata__": metadata, **json.loads(content[8:end])})
    text = header.encode().ljust(-(-len(header) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    digest.update(memoryview(content)[end:])
    return head.replace(_BLANK.encode(), digest.hexdigest().encode(), 1) + content[end:]


def _check_contents(path: Path, metadata: Mapping[str, str]) -> None:
    """Complain about a file that is not as it was written; one of before checksums is let pass."""
    if _ROUNDS in metadata and (more := metadata.keys() - {_ROUNDS, _CHECKSUM}):
        raise ValueError(f"it is no state of a run, as it says {min(more)[:40]!r} of itself")
    if _CHECKSUM not in metadata:
        return
    with path.open("rb") as file:
        length = file.read(8)
        head = length + file.read(int.from_bytes(length, "little"))
        blank = hashlib.sha256(head.replace(metadata[_CHECKSUM].encode(), _BLANK.encode(), 1))
        if hashlib.file_digest(file, lambda: blank).hexdigest() != metadata[_CHECKSUM]:
            raise ValueError("it was changed after it was written: its checksum is another")


def _rounds_in(file: Any) -> int:
    said: str = (file.metadata() or {}).get(_ROUNDS, "0")
    if not (said.isdecimal() and len(said) < 20):
        raise ValueError(f"it is of round {said[:40]!r}")
    return int(said)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file whose header is sound, whose size is what that says, and its checksum."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        check_plain(path, MOST_STATE_BYTES)
        with safe_open(path, "pt") as file:
            _check_contents(path, file.metadata() or {})
            yield file
    except (OSError, SafetensorError, ValueError) as error:
        raise InvalidState(f"cannot read {path} as safetensors: {error}") from error


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
