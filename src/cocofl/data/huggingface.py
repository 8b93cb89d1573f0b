"""The adapter to Hugging Face ``datasets``: tables from local parquet and CSV, or from the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cocofl.data.given import Columns, Images, Inputs
from cocofl.data.origin import NAMING_A_FOLDER, Origin
from cocofl.data.sound import waves
from cocofl.data.stable_random import Ints
from cocofl.errors import DataNotFound, InvalidData

BATCH_ROWS = 1000


@dataclass(frozen=True)
class Table:
    """Rows with named columns, every access checked; ``where`` names them in errors."""

    rows: datasets.Dataset
    where: str

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, *names: str) -> str:
        """The first of ``names`` that exists."""
        for name in names:
            if name in self.rows.column_names:
                return name
        raise InvalidData(
            f"{self.where} has the columns {', '.join(self.rows.column_names)}; "
            f"expected {' or '.join(names)}. Is this the right file for this data set?"
        )

    def ints(self, name: str) -> NDArray[np.int64]:
        """A column of integers, none missing."""
        column = self._whole(name, "an integer", pa.types.is_integer)
        return np.asarray(column.to_numpy(), np.int64)

    def strings(self, name: str) -> list[str]:
        """A column of text or identifiers, none missing."""
        kinds = pa.types.is_string, pa.types.is_large_string, pa.types.is_integer
        column = self._whole(name, "text", *kinds)
        return [str(value) for value in column.to_pylist()]

    def class_names(self, name: str) -> tuple[str, ...]:
        """The names that come with a label column; empty when it has none."""
        return tuple(getattr(self.rows.features[name], "names", ()))

    def encoded_images(self, name: str) -> Iterator[bytes]:
        """The image files of a column, a batch in memory at a time."""
        return self.encoded(name, datasets.Image(decode=False))

    def encoded(self, name: str, feature: Any) -> Iterator[bytes]:
        """The files of a column, as they are."""
        kind = type(feature).__name__.lower()
        try:
            column = self.rows.select_columns([name]).cast_column(name, feature)
        except (TypeError, ValueError, NotImplementedError, pa.ArrowInvalid) as error:
            raise InvalidData(
                f"{self.where}: column {name} holds {self.rows.features[name]}; expected {kind}s"
            ) from error
        for begin in range(0, len(column), BATCH_ROWS):
            for offset, cell in enumerate(column[begin : begin + BATCH_ROWS][name]):
                # A path inside a file could name anything on this machine; only bytes are taken.
                if cell is None or cell["bytes"] is None:
                    raise InvalidData(
                        f"{self.where}: row {begin + offset} has no {kind} bytes in column {name}; "
                        "where it names files, let the folder of these be the data set"
                    )
                yield cell["bytes"]

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Some of the rows."""
        return Table(self.rows.select(rows), self.where)

    def _whole(
        self, name: str, expected: str, *kinds: Callable[[pa.DataType], bool]
    ) -> pa.ChunkedArray:
        """A column of one of these kinds."""
        column = self.rows.select_columns([self.column(name)]).with_format("arrow")[:][name]
        if not any(kind(column.type) for kind in kinds) or column.null_count:
            raise InvalidData(
                f"{self.where}: column {name} holds {column.type} with {column.null_count} values "
                f"missing; expected {expected} in every row"
            )
        return column


def columns(rows: Any, where: str, seconds: float = 0.0) -> Columns:
    """A ``datasets.Dataset`` of the user's as a table; sounds in it have so many ``seconds``."""
    if not isinstance(rows, datasets.Dataset):
        raise InvalidData(
            f"{where} gave {type(rows).__name__}; expected a datasets.Dataset, which can be "
            "counted and read in any order"
        )
    table = Table(rows, where)

    def read(name: str) -> Inputs:
        if isinstance(rows.features[name], datasets.Image):
            return _images(table, name)
        if isinstance(rows.features[name], datasets.Audio):
            return waves(table.encoded(name, datasets.Audio(decode=False)), where, seconds)
        arrow = rows.select_columns([name]).with_format("arrow")[:][name]
        if arrow.null_count:
            raise InvalidData(f"{where}: column {name} has {arrow.null_count} values missing")
        if pa.types.is_string(arrow.type) or pa.types.is_large_string(arrow.type):
            return [str(value) for value in arrow.to_pylist()]
        if _is_words(arrow.type):
            return arrow.to_pylist()  # type: ignore[no-any-return]
        try:
            return np.asarray(rows.select_columns([name]).with_format("numpy")[:][name])
        except ValueError:  # rows of different lengths
            return arrow.to_pylist()  # type: ignore[no-any-return]

    return Columns(rows.column_names, read, where, lambda name: _names_of(rows.features[name]))


def _is_words(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    return bool(pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type))


def _names_of(feature: Any) -> tuple[str, ...]:
    """The names of classes, one per row or several."""
    inner = getattr(feature, "feature", feature)
    return tuple(getattr(inner, "names", None) or ())


def _images(table: Table, name: str) -> Images:
    def read(rows: Ints) -> Iterator[bytes]:
        return table.take(rows).encoded_images(name)

    return Images(np.arange(len(table)), read, f"{table.rows._fingerprint}/{name}")


@contextmanager
def open_tables(origin: Origin, splits: Sequence[str]) -> Iterator[dict[str, Table]]:
    """The tables of some splits, from a local folder or from the Hub, while the context lasts."""
    if origin.folder is None:
        yield {split: hub_table(origin.hub, split) for split in splits}
        return
    files = {split: origin.files(split) for split in splits}
    for split, found in files.items():
        if not found:
            raise DataNotFound(
                f"{origin.folder} has no file named {split}.parquet or {split}-*.parquet, "
                "at any depth; a folder must look like the data set's repository on the Hub"
            )
    with local_tables(**files) as tables:
        yield tables


@contextmanager
def local_tables(**splits: Sequence[Path]) -> Iterator[dict[str, Table]]:
    """Open local parquet or CSV files, one table per keyword, while the context lasts.

    ``datasets`` maps its own converted copy; that goes to a temporary folder and away with the
    context, so that it neither fills the user's disk nor outlives a change of the files.
    """
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="cocofl-") as scratch:
            yield {split: _open_files(files, scratch) for split, files in splits.items()}
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def hub_table(repository: str, split: str) -> Table:
    """Download one split from the Hub, or take it from the Hub's own cache."""
    try:
        rows = datasets.load_dataset(repository, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataNotFound(
            f"could not load {repository} ({split}) from the Hub: {error}. Check the network, or "
            f"put its files into FOLDER/{repository} and name the folder: {NAMING_A_FOLDER}"
        ) from error
    return Table(rows, f"{repository} ({split}) on the Hub")


def _open_files(files: Sequence[Path], scratch: str) -> Table:
    assert files
    kind = "csv" if files[0].suffix == ".csv" else "parquet"
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    try:
        rows = datasets.load_dataset(
            kind, data_files=[str(path) for path in files], split="train", cache_dir=scratch
        )
    except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        cause: Any = error.__cause__ or error
        raise InvalidData(
            f"cannot read {where} as {kind}: {cause}. Is the file complete? Fetch it again."
        ) from error
    return Table(rows, where)
