"""Data as people have it: what is read from where, before it becomes samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cocofl.data.labels import KINDS
from cocofl.data.samples import Array
from cocofl.data.sound import MOST_SECONDS
from cocofl.data.stable_random import Ints
from cocofl.errors import InvalidData
from cocofl.named import nearest

INPUTS = ("inputs", "input", "image", "img", "text", "input_ids")
LABELS = ("labels", "label", "target", "class")
OWNERS = ("owners", "owner")
"""The names of columns and arrays that are taken where none is said."""
X, Y = ("x", "X"), ("y",)
"""The same for arrays only: columns of these names may be axes of a sensor."""
NEXT_TOKEN = "next_token"
_KINDS = ("auto", *KINDS, NEXT_TOKEN)


@dataclass(frozen=True, eq=False)
class UserData:
    """Data of one's own, and how to read it; everything but the source may be left out.

    The source is a path (a CSV table, an NPZ file, a folder of images), arrays, a
    ``datasets.Dataset``, or a PyTorch data set; or a dict of such with ``train`` and ``test``.
    """

    source: Any
    inputs: str | Sequence[str] = ()
    """The column of the inputs, or several that are stacked; default: all that are left."""
    labels: str | Sequence[str] = ()
    """The column of the labels, or several."""
    owners: str = ""
    """The column that says whose a sample is, for the split ``natural``."""
    kind: str = "auto"
    """What labels are: ``classes``, ``tokens``, ``multilabel``, ``numbers``; else they tell.

    ``next_token``: texts have none, and a language model learns what comes next.
    """
    normalise: bool | Mapping[str, Sequence[float]] = True
    """By mean and deviation of the training part; or by ``{"mean": …, "std": …}``; or not."""
    test: float = 0.2
    """The share held out at random to test, where there is no ``test`` part."""
    tokenizer: Any = None
    """Of texts: ``"bytes"``, a ``tokenizer.json``, a tokenizer, a function."""
    length: int = 128
    """Of texts, in tokens: longer ones are cut (to be several, for ``next_token``), shorter ones
    padded."""
    size: int | Sequence[int] = ()
    """Of images: height and width, to which all are scaled; else all must have one size."""
    channels: int = 3
    """Of images in files: 1 for grey."""
    seconds: float = 0.0
    """Of sound in files: longer ones are cut, shorter ones padded; 0: as long as the longest."""

    def __post_init__(self) -> None:
        _check(self.kind in _KINDS, "kind", self.kind, f"one of {', '.join(_KINDS)}")
        _check(_is_number(self.test) and 0 < self.test < 1, "test", self.test, "a share like 0.2")
        _check(_is_size(self.length), "length", self.length, "a number of tokens")
        _check(self.channels in (1, 3), "channels", self.channels, "1 or 3")
        good = _is_number(self.seconds) and 0 <= self.seconds <= MOST_SECONDS
        _check(good, "seconds", self.seconds, f"a number from 0 to {MOST_SECONDS:g}")
        size = self.height_and_width
        _check(
            len(size) in (0, 2) and all(map(_is_size, size)), "size", self.size,
            "a number of pixels, or height and width",
        )  # fmt: skip
        _check(isinstance(self.owners, str), "owners", self.owners, "the name of a column")
        for name in ("inputs", "labels"):
            value = getattr(self, name)
            good = isinstance(value, str) or all(isinstance(one, str) for one in value)
            _check(good, name, value, "a column, or a list of columns")
        if not isinstance(self.normalise, bool):
            given = self.normalise
            good = isinstance(given, Mapping) and set(given) == {"mean", "std"}
            _check(good, "normalise", given, "true, false, or a table with mean and std")

    @classmethod
    def with_options(cls, source: Any, options: Mapping[str, Any]) -> UserData:
        """With the options of ``[data.options]``."""
        known = [field.name for field in fields(cls) if field.name != "source"]
        for name in options:
            if name not in known:
                raise InvalidData(
                    f"unknown key data.options.{name}{nearest(name, known)}; expected one of "
                    f"{', '.join(known)}"
                )
        return cls(source, **options)

    @property
    def height_and_width(self) -> tuple[int, ...]:
        """Of images; empty where nothing is said."""
        return (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)


def _check(good: bool, name: str, value: Any, expected: str) -> None:
    if not good:
        raise InvalidData(f"{name} is {value!r}, but should be {expected} (of UserData, or in "
                          "[data.options])")  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 2**16


@dataclass(frozen=True, eq=False)
class Images:
    """Image files, decoded one after the other when they are needed."""

    rows: Ints
    read: Callable[[Ints], Iterable[bytes]]
    """The files of some rows."""
    fingerprint: str
    """Differs where the files differ."""
    files: Sequence[Path] = ()
    """Where they lie, by row, if in files of their own."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> list[str] | None:
        """What errors call them, if each is a file."""
        return [str(self.files[row]) for row in self.rows] if self.files else None

    def take(self, rows: Ints) -> Images:
        """Some of them."""
        return replace(self, rows=self.rows[rows])


Inputs = Array | list[str] | list[list[str]] | Images
"""Numbers, pixels or token ids; texts, or texts in words; or image files."""


@dataclass(frozen=True, eq=False)
class Given:
    """One part of a data set."""

    inputs: Inputs
    labels: Any
    owners: Any | None
    where: str
    """What errors call it."""
    label_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, values in (("inputs", self.inputs), ("labels", self.labels)):
            if not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
                raise InvalidData(f"{self.where}: {what} are {values!r}; expected one per sample")
        counts = {len(self.inputs), len(self.labels)}
        if len(counts) > 1 or 0 in counts:
            raise InvalidData(
                f"{self.where}: {len(self.inputs)} inputs and {len(self.labels)} labels; expected "
                "at least one sample, and one label (or row of labels) for each"
            )
        if self.owners is not None and np.shape(self.owners) != (len(self.inputs),):
            raise InvalidData(
                f"{self.where}: {len(self.labels)} labels, but owners of shape "
                f"{np.shape(self.owners)}; expected one owner per sample"
            )

    def take(self, rows: Ints) -> Given:
        """Some of its samples."""
        owners = None if self.owners is None else _rows(self.owners, rows)
        inputs: Any = self.inputs
        inputs = inputs.take(rows) if isinstance(inputs, Images) else _rows(inputs, rows)
        return replace(self, inputs=inputs, labels=_rows(self.labels, rows), owners=owners)


def _rows(values: Any, rows: Ints) -> Any:
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]


@dataclass(frozen=True, eq=False)
class Columns:
    """A table: columns by name, read when they are asked for."""

    names: Sequence[str]
    read: Callable[[str], Inputs]
    """A column as an array, or as texts, or as images."""
    where: str
    label_names: Callable[[str], tuple[str, ...]] = lambda _column: ()
    """The classes that a column of labels names."""
    read_classes: Callable[[str], Inputs] | None = None
    """A column of labels that may be classes, where that is another matter."""
    are_arrays: bool = False
    """Whether ``x`` and ``y`` are inputs and labels."""

    def given(self, data: UserData) -> Given:
        """Which columns are what."""
        x, y = (X, Y) if self.are_arrays else ((), ())
        if data.kind == NEXT_TOKEN:
            return self._texts(data)
        label = self._chosen("labels", data.labels, (*LABELS, *y))
        owner = self._chosen("owners", data.owners, OWNERS, or_none=True)
        known = [*label, *owner]
        inputs = self._chosen("inputs", data.inputs, (*INPUTS, *x), or_none=True)
        inputs = inputs or [name for name in self.names if name not in known]
        if not inputs:
            raise InvalidData(f"{self.where} has no column beside {', '.join(known)}: no inputs")
        is_named = len(inputs) == 1 and (isinstance(data.inputs, str) or inputs[0] in (*INPUTS, *x))
        return Given(
            self.read(inputs[0]) if is_named else self._stacked(inputs),
            self._label_values(label, data.kind),
            self.read(owner[0]) if owner else None,
            self.where,
            self.label_names(label[0]) if len(label) == 1 else tuple(label),
        )

    def _texts(self, data: UserData) -> Given:
        """Inputs that are their own labels."""
        (column,) = self._chosen("inputs", data.inputs, INPUTS)
        owner = self._chosen("owners", data.owners, OWNERS, or_none=True)
        texts = self.read(column)
        return Given(texts, texts, self.read(owner[0]) if owner else None, self.where)

    def _chosen(
        self, what: str, said: str | Sequence[str], usual: Sequence[str], *, or_none: bool = False
    ) -> list[str]:
        """The columns that are said, else the first that has a usual name."""
        if said:
            wanted = [said] if isinstance(said, str) else list(said)
            if missing := [name for name in wanted if name not in self.names]:
                raise InvalidData(
                    f"{self.where} has no {missing[0]!r}{nearest(missing[0], self.names)} for "
                    f"{what}; it has {self._all()}"
                )
            return wanted
        found = [name for name in usual if name in self.names][:1]
        if not found and not or_none:
            raise InvalidData(
                f"{self.where} has {self._all()}, none of which is called {' or '.join(usual)}; "
                f'say which: {what} = "…" of UserData, or in [data.options]'
            )
        return found

    def _all(self) -> str:
        return f"{', '.join(self.names[:12])}{', …' * (len(self.names) > 12)}"

    def _label_values(self, names: Sequence[str], kind: str) -> Any:
        if len(names) == 1:
            named = self.read_classes if kind in ("auto", "classes") else None
            return (named or self.read)(names[0])
        columns = [np.asarray(self.read(name)) for name in names]
        if any(column.dtype.kind not in "iufb" or column.ndim != 1 for column in columns):
            raise InvalidData(
                f"{self.where}: of several labels ({', '.join(names)}) each must be a number"
            )
        rows = np.stack(columns, axis=1)
        is_binary = kind in ("auto", "multilabel") and np.isin(rows, (0, 1)).all()
        return rows.astype(bool) if is_binary else rows.astype(np.float64)

    def _stacked(self, names: Sequence[str]) -> Inputs:
        """Columns of numbers as features; columns of series as channels."""
        columns = [self.read(name) for name in names]
        if len(columns) == 1 and (not isinstance(columns[0], np.ndarray) or columns[0].ndim > 2):
            return columns[0]
        found = []
        for name, values in zip(names, columns, strict=True):
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "iufb":
                raise InvalidData(
                    f"{self.where}: column {name} is an input, but {_why_no_numbers(values)}say "
                    'which columns are: inputs = ["…", "…"] of UserData, or in [data.options]'
                )
            found.append(values.astype(np.float32))
        if len({values.shape for values in found}) > 1:
            shapes = {name: values.shape[1:] for name, values in zip(names, found, strict=True)}
            raise InvalidData(
                f"{self.where}: inputs of different shapes cannot be stacked: {shapes}"
            )
        return np.stack(found, axis=1)


def _why_no_numbers(values: Inputs) -> str:
    """What is wrong with a column that should hold numbers, and what else can be done."""
    if isinstance(values, list | np.ndarray) and isinstance(values[0], list | np.ndarray):
        return "has rows of different lengths; cut or pad them to one length, or "
    if isinstance(values, list):
        others = [row for row, text in enumerate(values) if not _is_number_text(str(text))]
        if 0 < len(others) < len(values):
            return (
                f"sample {others[0]} has {str(values[others[0]])[:40]!r}, which is no number; fill "
                "in or leave out what is missing, or "
            )
    return "holds no numbers; "


def _is_number_text(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
