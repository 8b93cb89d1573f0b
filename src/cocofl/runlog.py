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
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocofl.errors import InvalidState, RunFolderProblem

State = dict[str, Tensor]
Record = dict[str, Any]

EXPERIMENT, ABOUT, PLAN = "experiment.toml", "about.json", "plan.json"
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"

_ORIGIN = ("cocofl", "commit", "torch", "python", "hardware", "engine", "tables")


FATES = ("merged", "late", "lost", "rejected", "infeasible")
"""What can become of a device that is asked."""


class DeviceRecord(NamedTuple):
    """A device's part in a round."""

    device: int
    group: str
    work: str | None
    """What it trained; None where that is not known, or nothing fits it."""
    fate: str


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
    scores: Mapping[str, Any] = field(default_factory=dict)
    """What the model was tested for, where it was."""
    other_scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same with other norm statistics, by their kind; at the end of a run."""
    bytes_broadcast: int | None = None
    """The size of all that devices were sent, where they are on a network."""
    reasons: Sequence[tuple[int, str]] | None = None
    """Why updates were refused or did not come, where devices are on a network."""

    def to_json(self) -> Record:
        """As ``metrics.jsonl`` has it."""
        fates = [one.fate for one in self.devices]
        broadcast = {"bytes_broadcast": self.bytes_broadcast}
        reasons = {"reasons": [list(pair) for pair in self.reasons or ()]}
        return {
            "round": self.round,
            "lr": self.lr,
            "simulated_s": self.simulated_s,
            "bytes_up": self.bytes_up,
            **(broadcast if self.bytes_broadcast is not None else {}),
            "loss": self.loss,
            **{fate: fates.count(fate) for fate in FATES},
            "devices": [list(one) for one in self.devices],
            **(reasons if self.reasons is not None else {}),
            **self.scores,
            **{f"{kind}_statistics": dict(found) for kind, found in self.other_scores.items()},
        }


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
            path.mkdir(parents=True, exist_ok=True)
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
        return _read_json(self.path / ABOUT)

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
        last, rounds = self.about, _rounds_done(self.path / CHECKPOINT)
        before = _parts(last, self.path / ABOUT)
        origin = {key: last[key] for key in _ORIGIN if key in last}
        nothing_since = bool(before) and before[-1]["rounds"] >= rounds
        if nothing_since or all(about.get(key) == value for key, value in origin.items()):
            return before
        return [*before, {"rounds": rounds, **origin}]

    def append(self, metrics: Record, timing: Record) -> None:
        """Add a round's lines."""
        with _writing(self.path):
            for name, record in ((METRICS, metrics), (TIMING, timing)):
                with (self.path / name).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[Record]:
        """The rounds so far."""
        return _read_lines(self.path / METRICS)

    def timing(self) -> list[Record]:
        """Wall-clock seconds of the rounds so far."""
        return _read_lines(self.path / TIMING)

    def save_checkpoint(self, rounds_done: int, state: Mapping[str, Tensor]) -> None:
        """Keep the state after so many rounds, in place of the one before."""
        with _writing(self.path):
            write_state(self.path / CHECKPOINT, state, rounds_done)

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
        with _writing(self.path):
            write_state(self.path / MODEL, state, rounds_done)
            (self.path / CHECKPOINT).unlink(missing_ok=True)

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
        held = _locked(path)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _locked(path: Path) -> int | None:
    """A descriptor that locks a folder until it is closed."""
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415 - it is not everywhere

    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise RunFolderProblem(
            f"another process is writing the run in {path}; let it end, or name another folder"
        ) from error
    except OSError:
        pass
    return held


def write_state(path: Path, state: Mapping[str, Tensor], rounds_done: int) -> None:
    """Write a state whole or not at all, and only then under its name."""
    content = state_bytes(state, {"rounds": str(rounds_done)})
    _replace(path, lambda file: file.write(content))


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


def _rounds_done(path: Path) -> int:
    with _opened(path) as file:
        return _rounds_in(file)


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


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    _replace(path, lambda file: file.write(text.encode()))


def same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(t, other[key]) for key, t in one.items())


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        try:
            write(f)
            f.flush()
            os.fsync(f.fileno())
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


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
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise RunFolderProblem(f"{path} is damaged: {error}") from error


def _read_json(path: Path) -> Record:
    try:
        content: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderProblem(f"cannot read {path}: {error}") from error
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
        with _writing(path.parent):
            _replace(path, lambda file: file.write(b"".join(lines[:count])))
