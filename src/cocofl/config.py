"""An experiment as people write it: strict TOML, and the same as Python values.

Every key has a default; together the defaults are the quick start. An unknown key, a value of the
wrong type or out of range is an error that names the key and what is expected.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from cocofl.checks import check_choice, check_number
from cocofl.data.data_files import is_path
from cocofl.errors import InvalidExperiment
from cocofl.files import parsed_toml, read_limited
from cocofl.fl.codec import Upload
from cocofl.fl.federation import Faults
from cocofl.fl.metrics import Evaluation
from cocofl.fl.privacy import Privacy
from cocofl.fl.rules import Merging
from cocofl.fl.server_optimizers import ServerStep
from cocofl.fl.training import Training
from cocofl.freeze import backend_names
from cocofl.hub import is_hugging_face, split_name, title, with_place
from cocofl.named import names_in, nearest, user_file
from cocofl.vector import PRECISIONS

ENGINES = ("auto", "serial", "cohort", "flower")
MAX_SEED = 2**63 - 1  # the largest that PyTorch takes
MOST_FILE_BYTES = 2**20
MOST_DEVICES = 10_000_000
MOST_BASES = 8  # files below a file
MAX_WORKERS = 1024  # each is a process with a PyTorch of its own
_IN_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_IN_WORDS |= {tuple: "a list", dict: "a table"}


@dataclass(frozen=True)
class Model:
    """The network: a registry name, ``package.module:factory``, or Hugging Face's ``hf:NAME``.

    NAME is a folder with ``config.json`` and safetensors, or a name on the Hub.
    """

    name: str = "resnet10-digits"
    """A registry name, ``package.module:factory``, or ``hf:NAME``."""
    init: str = ""
    """A safetensors file with weights to begin with; empty for fresh ones. Of ``hf:NAME`` also
    ``pretrained`` (the default) or ``random``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the factory."""

    @property
    def title(self) -> str:
        """What people call it: of a folder the last part."""
        return title(self.name) if is_hugging_face(self.name) else self.name


@dataclass(frozen=True)
class Data:
    """The data set, and who holds which part.

    A registry name, a path (a CSV table, an NPZ file, a folder of images), Hugging Face's
    ``hf:NAME`` or ``hf:NAME:CONFIGURATION``, or ``package.module:function``.
    """

    name: str = "digits"
    """A registry name, a path, or ``package.module:function``."""
    dir: str = ""
    """A folder of data sets in the Hub's layout; else ``$COCOFL_DATA``, else the Hub."""
    preset: str = "standard"
    """``standard``, or ``paper``: the samples that the paper uses."""
    split: str = "rc"
    """``iid``, ``dirichlet``, ``rc``, ``rc-mixed``, ``by_play`` or ``natural``."""
    alpha: float = 0.1
    """Of the Dirichlet distribution: the smaller, the more unlike are devices."""
    equal: bool = True
    """Whether every device gets the same number of samples."""
    options: dict[str, Any] = field(default_factory=dict)
    """How a path is read (see :class:`~cocofl.data.UserData`); or arguments of the function."""

    def __post_init__(self) -> None:
        check_number("data.alpha", self.alpha, above=0)

    @property
    def title(self) -> str:
        """What people call it: of a path the last part."""
        if is_hugging_face(self.name):
            return title(self.name)
        return Path(self.name).name if is_path(self.name) else self.name


@dataclass(frozen=True)
class DeviceSettings:
    """How many devices there are, how many train per round, and what they have.

    ``groups`` is ``"paper"`` (strong, medium and weak thirds), ``"phones-2024"``,
    ``"limited:0.25"`` (10 % strong, 90 % limited to that time and memory) or a list of tables with
    name, share, time, memory, upload or trace, and power, energy, available, rounds_per_day.
    """

    count: int = 30
    """How many devices there are."""
    per_round: int = 10
    """How many of them are asked in a round."""
    groups: Any = "paper"
    """``"paper"``, ``"phones-2024"``, ``"limited:0.25"``, or a list of tables."""

    def __post_init__(self) -> None:
        check_number("devices.count", self.count, least=1, most=MOST_DEVICES)
        check_number("devices.per_round", self.per_round, least=1)
        if self.per_round > self.count:
            raise InvalidExperiment(
                f"devices.per_round is {self.per_round}, but devices.count is {self.count}"
            )


@dataclass(frozen=True)
class StrategySettings:
    """The strategy by name (or ``package.module:function``), and its own options."""

    name: str = "cocofl"
    """A registry name, or ``package.module:function``; its options stand beside it."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableSettings:
    """What configurations cost: a file, ``measured:<cpu>-<model>``, ``analytic`` or ``auto``.

    ``analytic:pi5`` counts as if on that device.

    ``auto`` takes the table measured for the model that ships with the package, else ``analytic``.
    """

    spans: str = "auto"
    """What spans cost."""
    checkpointed: str = "auto"
    """The same with trained blocks checkpointed; ``auto`` takes ``own-checkpoint.json`` beside the
    ``own.json`` of ``spans``, or counts what that changes."""
    widths: str = "auto"
    """What widths cost, for HeteroFL and FjORD."""


@dataclass(frozen=True)
class EngineSettings:
    """What executes the rounds; none of this changes results, but for ``kernels``."""

    kind: str = "auto"
    """``serial``, ``cohort`` or ``flower``; ``auto``: a cohort on a GPU, else serial."""
    workers: int = 0
    """Processes that train devices side by side; 0 for one per core."""
    kernels: str = "auto"
    """Of int8: ``auto`` measures; or one that `cocofl doctor` names."""
    checkpoint_every: int = 10
    """Rounds."""
    device: str = "auto"
    """Where a cohort is computed: ``cuda``, ``cpu``, or ``auto`` for a GPU if there is one."""
    precision: str = "tf32"
    """How exactly a cohort multiplies on a GPU: ``fp32``, ``tf32`` or ``bf16``."""

    def __post_init__(self) -> None:
        check_choice("engine.kind", self.kind, ENGINES)
        check_number("engine.workers", self.workers, least=0, most=MAX_WORKERS)
        check_choice("engine.kernels", self.kernels, backend_names())
        check_number("engine.checkpoint_every", self.checkpoint_every, least=1)
        check_choice("engine.precision", self.precision, PRECISIONS)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InvalidExperiment(
                f"engine.device is {self.device!r}; expected auto, cpu, cuda or cuda:1"
            )


@dataclass(frozen=True)
class Experiment:
    """One run. Defaults are the quick start on real digits.

    >>> Experiment.parse({"rounds": 3, "training": {"lr": 0.05}}).training.lr
    0.05
    """

    name: str = "quickstart"
    """The run goes to ``runs/NAME`` unless ``--out`` says otherwise."""
    seed: int = 0
    """Of everything random: split, groups, budgets, order, weights."""
    rounds: int = 60
    """How many there are."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    devices: DeviceSettings = field(default_factory=DeviceSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    training: Training = field(default_factory=Training)
    upload: Upload = field(default_factory=Upload)
    merge: Merging = field(default_factory=Merging)
    server: ServerStep = field(default_factory=ServerStep)
    evaluation: Evaluation = field(default_factory=Evaluation)
    faults: Faults = field(default_factory=Faults)
    privacy: Privacy = field(default_factory=Privacy)
    tables: TableSettings = field(default_factory=TableSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check_number("rounds", self.rounds, least=1)
        check_number("seed", self.seed, least=0, most=MAX_SEED)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Experiment:
        """From nested dicts, as a TOML file gives them."""
        return from_table(cls, content)  # type: ignore[no-any-return]

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Experiment:
        """From a TOML file; ``changes`` maps dotted keys to values that replace the file's.

        Paths in the file are relative to it. A file that begins with ``base = "other.toml"``
        says only what it changes of the other.
        """
        return cls.parse(_changed(_read(Path(path)), changes or {}))

    def changed(self, changes: Mapping[str, Any]) -> Experiment:
        """The same with other values at dotted keys.

        >>> Experiment().changed({"strategy.name": "fedavg", "training.lr": 0.3}).training.lr
        0.3
        """
        return Experiment.parse(_changed(self.to_dict(), changes))

    def with_strategy(self, name: str, **options: Any) -> Experiment:
        """The same with another strategy."""
        return replace(self, strategy=StrategySettings(name, options))

    def without_places(self) -> Experiment:
        """What is to be computed, whichever machine does it: paths by their last name, no engine.

        Two experiments that agree in this are the same, and one can continue the other's run.
        """
        content = self.to_dict()
        for section, key in _PATHS:
            if not content[section][key].startswith("measured:"):
                content[section][key] = Path(content[section][key]).name
        content["model"]["name"], content["data"]["name"] = self.model.title, self.data.title
        content["data"].pop("dir")
        content["engine"] = {"kernels": self.engine.kernels, "precision": self.engine.precision}
        return Experiment.parse(content)

    @property
    def folder(self) -> Path:
        """Where its run goes if nothing else is said.

        >>> Experiment(name="mine").folder.as_posix()
        'runs/mine'
        """
        name = Path(self.name)
        if not name.parts or name.is_absolute() or ".." in name.parts:
            raise InvalidExperiment(
                f"name is {self.name!r}; expected the name of a folder below runs, or another "
                "folder with --out"
            )
        return Path("runs") / name

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of everything, defaults included."""
        return dict(_to_dict(self))

    def by_key(self) -> dict[str, Any]:
        """Every value under its dotted key.

        >>> Experiment().by_key()["training.lr"]
        0.1
        """
        return _by_key(self.to_dict())

    def names(self) -> list[str]:
        """The functions that it names, and which are not ours; tables are files at most."""
        return names_in({k: v for k, v in self.by_key().items() if not k.startswith("tables.")})

    def to_toml(self) -> str:
        """The experiment as a file that gives the same experiment again."""
        lines, section = list[str](), ""
        for path, value in self.by_key().items():
            table, _, key = path.rpartition(".")
            if table != section:
                lines += ["", f"[{table}]"]
                section = table
            lines.append(f"{key} = {_toml_value(value)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Trust:
    """Modules of which a folder, a file or a message may name functions."""

    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class UserSettings:
    """What holds for all commands of a user; see :func:`~cocofl.named.user_file`."""

    trust: Trust = field(default_factory=Trust)

    @classmethod
    def load(cls) -> UserSettings:
        """From the user's file; the defaults where there is none."""
        path = user_file()
        return from_table(cls, _read_toml(path)) if path.exists() else cls()


def parse_value(text: str) -> Any:
    """A value as in TOML, or the text itself where it is none.

    >>> parse_value("0.1"), parse_value("[600, 800]"), parse_value("fedavg"), parse_value("true")
    (0.1, [600, 800], 'fedavg', True)
    """
    try:
        return parsed_toml(f"value = {text}")["value"]
    except ValueError:
        return text


# --- dicts to dataclasses ------------------------------------------------------------------------


def from_table(cls: type[Any], content: Any, prefix: str = "") -> Any:
    """A dataclass of settings from a table; an error names the key behind ``prefix``."""
    if not isinstance(content, Mapping):
        raise InvalidExperiment(f"{prefix.rstrip('.')} is {content!r}; expected a table")
    if cls is StrategySettings:
        # Options of a strategy stand beside its name.
        if not isinstance(content.get("options", {}), Mapping):
            raise InvalidExperiment(
                f"strategy.options is {content['options']!r}; expected a table, or each option "
                "beside the name"
            )
        beside = {key: value for key, value in content.items() if key not in ("name", "options")}
        name = {"name": content["name"]} if "name" in content else {}
        content = {**name, "options": {**content.get("options", {}), **beside}}
    types_of = get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    for key in content:
        if key not in known:
            raise InvalidExperiment(
                f"unknown key {prefix}{key}{nearest(key, known)}; expected one of "
                f"{', '.join(sorted(known))}"
            )
    values = {key: typed(types_of[key], value, f"{prefix}{key}") for key, value in content.items()}
    return cls(**values)


def typed(wanted: Any, value: Any, key: str) -> Any:
    """A value as the type that a setting has; an error names the key."""
    if is_dataclass(wanted):
        return from_table(wanted, value, f"{key}.")  # type: ignore[arg-type]
    if wanted is Any:
        return value
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if get_origin(wanted) is tuple and isinstance(value, list | tuple):
        return tuple(typed(get_args(wanted)[0], item, key) for item in value)
    plain = get_origin(wanted) or wanted
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        raise InvalidExperiment(f"{key} is {value!r}; expected {_IN_WORDS.get(plain, plain)}")
    return value


def _by_key(content: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested tables under dotted keys."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            values[name] = value
    return values


def _changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()
    }
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = result
        for section in sections:
            below = place.get(section, {})
            if not isinstance(below, dict):
                raise InvalidExperiment(f"{path}: {section} is a value, not a table")
            place[section] = place = dict(below)  # the tables of who is changed stay as they are
        place[key] = value
    return result


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parsed_toml(read_limited(path, MOST_FILE_BYTES))
    except OSError as error:
        raise InvalidExperiment(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise InvalidExperiment(f"{path} is not TOML: {error}") from error


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's content on top of that of its base."""
    content = _read_toml(path)
    folder = path.absolute().parent
    _make_absolute(content, folder)
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise InvalidExperiment(f"{path}: base is {base!r}; expected the name of another file")
    try:
        below = (folder / base).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a name that is none, links in a circle
        raise InvalidExperiment(f"{path}: its base {base[:60]!r} cannot be: {error}") from error
    if len(above) == MOST_BASES:
        raise InvalidExperiment(f"{path}: more than {MOST_BASES} files rest on each other")
    if below in above or below == path.resolve():
        raise InvalidExperiment(f"{path}: its base {base} rests on this very file")
    return _changed(_read(below, (*above, path.resolve())), _by_key(content))


_PATHS = (
    ("model", "init"),
    ("data", "dir"),
    ("tables", "spans"),
    ("tables", "checkpointed"),
    ("tables", "widths"),
)


def _make_absolute(content: dict[str, Any], folder: Path) -> None:
    """Let files that are named here be those relative to this file."""
    devices = content.get("devices")
    groups = devices.get("groups") if isinstance(devices, dict) else None
    named = [(content.get(section), key) for section, key in _PATHS]
    data = content.get("data")
    if isinstance(data, dict) and is_path(str(data.get("name"))):
        named.append((data, "name"))
    if isinstance(groups, list):
        named += [(group, "trace") for group in groups]
    for table, key in named:
        value = table.get(key) if isinstance(table, dict) else None
        # Not the path's own method, which raises where a name is too long.
        if isinstance(value, str) and value and os.path.exists(folder / value):
            table[key] = str(folder / value)  # type: ignore[index]
    for table in (content.get("model"), data):
        if isinstance(table, dict) and is_hugging_face(name := str(table.get("name"))):
            place = folder / split_name(name)[0]
            if os.path.isdir(place):
                table["name"] = with_place(name, place)


# --- dataclasses to TOML -------------------------------------------------------------------------


def _to_dict(value: Any) -> Any:
    if isinstance(value, StrategySettings):
        return {"name": value.name, **value.options}
    if is_dataclass(value):
        return {f.name: _to_dict(getattr(value, f.name)) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "inf" if value == math.inf else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise InvalidExperiment(f"{value!r} cannot be written as TOML")
