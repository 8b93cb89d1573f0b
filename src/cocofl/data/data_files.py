"""Files and folders of one's own: CSV tables, NPZ files, folders of images.

Nothing in them is trusted: no pickle is read, and sizes are checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cocofl.data.given import Columns, Given, Images, Inputs, UserData
from cocofl.data.origin import IMAGE_SUFFIXES, folder_listing
from cocofl.data.samples import PARTS
from cocofl.data.stable_random import Ints
from cocofl.data.tokenizing import tokenizer_file
from cocofl.errors import DataNotFound, InvalidData
from cocofl.files import check_plain, read_csv, read_limited
from cocofl.hub import is_hugging_face

logger = logging.getLogger(__name__)

FILE_SUFFIXES = (".csv", ".npz")
MOST_CSV_BYTES = 2**28
MOST_NPZ_BYTES = 2**34
"""Of all arrays together, unpacked."""
MOST_TIMES = 200
"""What unpacked arrays may be of the file: a few bytes of it could stand for gigabytes."""
IMAGE_FILES = (*IMAGE_SUFFIXES, ".bmp", ".tif", ".tiff", ".webp")
MOST_IMAGE_BYTES = 64 * 2**20
_VALIDATION = ("validation", "valid", "val")
_PART_FIRST = re.compile(rf"({'|'.join((*PARTS, *_VALIDATION))})_(.+)")
_PART_LAST = re.compile(rf"(.+)_({'|'.join((*PARTS, *_VALIDATION))})")


def is_path(name: str) -> bool:
    """Whether a data set's name is a file or a folder.

    >>> is_path("readings.csv"), is_path("./photos"), is_path("mine:load"), is_path("digits")
    (True, True, False, False)
    """
    is_some = "/" in name or os.sep in name or name.endswith(FILE_SUFFIXES)
    return is_some and not is_hugging_face(name)


def find(name: str, folders: Sequence[Path]) -> Path:
    """The file or folder: in one of the data folders, else from here."""
    for place in (*(folder / name for folder in folders), Path(name)):
        if place.exists():
            return place
    looked = f" (looked in {', '.join(map(str, folders))} and here)" if folders else ""
    raise DataNotFound(
        f"there is no {name}{looked}; expected a CSV table, an NPZ file, or a folder of images"
    )


def fingerprint(path: Path, options: Mapping[str, Any]) -> str:
    """Differs when the files differ, or how they are read."""
    digest = hashlib.sha256(f"{path.resolve()}{sorted(options.items())}".encode())
    for line in folder_listing(path) if path.is_dir() else [_state(path)]:
        digest.update(line.encode())
    place = tokenizer_file(options.get("tokenizer"), path.parent)
    if place is not None and place.exists():
        digest.update(_state(place).encode())
    return digest.hexdigest()[:16]


def read_path(path: Path, data: UserData) -> dict[str, Given]:
    """The parts of a file or a folder."""
    if not path.exists():
        raise DataNotFound(f"there is no {path}")
    if path.is_dir():
        return _folder(path, data)
    if path.suffix == ".csv":
        return {"train": _csv(path).given(data)}
    if path.suffix == ".npz":
        return _npz(path, data)
    raise InvalidData(f"{path} is no data that can be read; expected .csv, .npz, or a folder")


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size}/{found.st_mtime_ns}"


# --- tables --------------------------------------------------------------------------------------


def _csv(path: Path) -> Columns:
    """A table with a header; cells are numbers where a whole column is."""
    columns: dict[str, list[str]] = {}
    try:
        for row in read_csv(path, MOST_CSV_BYTES):
            columns = columns or {name: [] for name in row}
            for name, cell in row.items():
                columns[name].append(cell)
    except (OSError, ValueError) as error:
        raise InvalidData(f"cannot read {path} as CSV: {error}") from error
    if not columns:
        raise InvalidData(f"{path} has no rows; expected a line of names, and a line per sample")

    def read(name: str) -> Inputs:
        cells = columns[name]
        if "" in cells:
            raise InvalidData(
                f"{path}: line {cells.index('') + 2} has nothing in column {name}; fill in or "
                "leave out what is missing"
            )
        found = _numbers(cells, int, np.int64, _numbers(cells, float, np.float64, cells))
        if isinstance(found, np.ndarray) and not np.isfinite(found).all():
            row = int(np.argmin(np.isfinite(found)))
            raise InvalidData(
                f"{path}: line {row + 2} has {cells[row]} in column {name}; fill in or leave out "
                "what is missing"
            )
        return found

    def read_classes(name: str) -> Inputs:
        found = read(name)
        # Whole numbers are the names of classes: they need not count from 0.
        is_number = isinstance(found, np.ndarray) and found.dtype.kind == "f"
        return found if is_number else [cell.strip() for cell in columns[name]]

    return Columns(list(columns), read, str(path), read_classes=read_classes)


def _numbers(cells: list[str], kind: type, dtype: type, otherwise: Inputs) -> Inputs:
    """The cells as numbers of one kind, where all are."""
    try:
        return np.array([kind(cell) for cell in cells], dtype)
    except (ValueError, OverflowError):
        return otherwise


# --- arrays --------------------------------------------------------------------------------------


def _npz(path: Path, data: UserData) -> dict[str, Given]:
    """Arrays by name: ``inputs``, ``labels``; or ``train_inputs``, ``test_inputs`` and so on."""
    arrays = _load_npz(path)
    parts: dict[str, dict[str, NDArray[Any]]] = {}
    rest: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        if match := _PART_FIRST.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = array
        elif match := _PART_LAST.fullmatch(name):
            parts.setdefault(match[2], {})[match[1]] = array
        else:
            rest[name] = array
    for name in _VALIDATION:
        if own := parts.pop(name, {}):
            parts.setdefault("test", own)
    if rest:
        parts.setdefault("train", rest)
    if "train" not in parts:
        raise InvalidData(f"{path} has {', '.join(arrays)}, and nothing to train on")
    return {part: columns_of(own, f"{path}, {part}").given(data) for part, own in parts.items()}


def columns_of(arrays: Mapping[str, Any], where: str) -> Columns:
    """Arrays by name as a table."""
    return Columns(list(arrays), lambda name: arrays[name], where, are_arrays=True)


def _load_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        most = min(MOST_NPZ_BYTES, MOST_TIMES * check_plain(path, MOST_NPZ_BYTES))
        with zipfile.ZipFile(path) as packed:
            members = packed.infolist()
            total = sum(member.file_size for member in members)
            if total > most:
                raise ValueError(f"its arrays have {total} bytes, of which at most {most} are read")
            for member in members:
                _check_member(packed, member)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (
        *(OSError, ValueError, EOFError, KeyError, RuntimeError, NotImplementedError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise InvalidData(f"cannot read {path} as NPZ: {error}") from error


def _check_member(packed: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """An array says how large it is: what does not fit its place in the file is not allocated."""
    with packed.open(member) as file:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{member.filename} has format {version}")
        shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{member.filename} holds Python objects; expected numbers or text")
    count = 1
    for length in shape:  # whole numbers of any size, which do not overflow
        count *= int(length)
    if count * dtype.itemsize > member.file_size:
        raise ValueError(f"{member.filename} announces {dtype} of shape {shape}, and has less")


# --- folders -------------------------------------------------------------------------------------


def _folder(folder: Path, data: UserData) -> dict[str, Given]:
    """A folder per class with images in it, below ``train`` and ``test`` where there are such."""
    for suffix in FILE_SUFFIXES:
        files = _places(folder, suffix)
        if "train" in files:
            return {part: read_path(file, data)["train"] for part, file in files.items()}
    places = _places(folder)
    if "train" not in places:
        places = {"train": folder}
    return {part: _image_folder(place) for part, place in places.items()}


def _places(folder: Path, suffix: str = "") -> dict[str, Path]:
    """The file of each part, or its folder, as far as there are such."""
    found: dict[str, Path] = {}
    for name in (*PARTS, *_VALIDATION):
        place = folder / f"{name}{suffix}"
        if place.is_file() if suffix else place.is_dir():
            found.setdefault("test" if name in _VALIDATION else name, place)
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_FILES and not path.name.startswith(".")


def _image_folder(folder: Path) -> Given:
    # Those with a dot are of programs: .cache, .ipynb_checkpoints.
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    files, labels = list[Path](), list[str]()
    for place in classes:
        own = sorted(path for path in place.rglob("*") if _is_image(path))
        if not own:
            logger.warning("%s has no images: there is no class of that name", place)
        files += own
        labels += [place.name] * len(own)
    if not files:
        raise InvalidData(
            f"{folder} has no images in folders of their classes: expected {folder.name}/CLASS/"
            f"*{', *'.join(IMAGE_FILES)}, also below train and test; or train.csv, train.npz"
        )

    def read(rows: Ints) -> Iterable[bytes]:
        for row in rows:
            try:
                yield read_limited(files[row], MOST_IMAGE_BYTES)
            except OSError as error:
                raise InvalidData(f"cannot read the image {files[row]}: {error}") from error

    states = "".join(f"{path}/{_state(path)}\n" for path in files)
    known = hashlib.sha256(states.encode()).hexdigest()
    return Given(Images(np.arange(len(files)), read, known, files), labels, None, str(folder))
