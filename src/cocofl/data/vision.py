"""Image data sets: one function each, from its origin to new samples by part.

A function is a context in which these can be streamed; leaving it closes the files. ``preset``
is ``"standard"``, the data as published, or ``"paper"``, the part of it the paper uses.
"""

from __future__ import annotations

import csv
import itertools
import json
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cocofl.data.huggingface import Table, open_tables
from cocofl.data.images import Pixels, Shape, decode_all, resized
from cocofl.data.origin import IMAGE_SUFFIXES, Origin, enough
from cocofl.data.samples import PARTS, Facts, NewSamples, number_owners
from cocofl.data.stable_random import Ints, draw_rows, hold_out
from cocofl.errors import DataNotFound, InvalidData

CIFAR10_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
FEMNIST_NAMES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
XCHEST_NAMES = ("no finding", "finding")

# NIH's own download: findings, a row per image, and the names of the images of each part.
NIH_TABLE = "Data_Entry_2017*.csv"
NIH_LISTS = {"train": "train_val_list.txt", "test": "test_list.txt"}
NIH_COLUMNS = ("Image Index", "Finding Labels", "Patient ID")
LEAF_SIDE = 28

NewParts = dict[str, NewSamples]


def _of_tables(
    class_names: tuple[str, ...], shape: Shape, label: str = "label"
) -> Callable[[Origin, str], AbstractContextManager[NewParts]]:
    """A data set in tables with an image and its label in every row."""

    @contextmanager
    def parts(origin: Origin, _preset: str) -> Iterator[NewParts]:
        with open_tables(origin, PARTS) as tables:
            yield {
                part: _table_samples(table, class_names, shape, (label,))
                for part, table in tables.items()
            }

    return parts


cifar10 = _of_tables(CIFAR10_NAMES, (32, 32, 3))
cifar100 = _of_tables(tuple(str(label) for label in range(100)), (32, 32, 3), "fine_label")
fashion_mnist = _of_tables(FASHION_NAMES, (28, 28, 1))


@contextmanager
def cinic10(origin: Origin, preset: str) -> Iterator[NewParts]:
    """CINIC-10 as published (``train/airplane/*.png`` …), or ``flwrlabs/cinic10`` in parquet.

    The validation part is left alone: the paper trains on the 90 000 of ``train``.
    """
    if origin.folder is None or origin.files("train"):
        with cifar10(origin, preset) as parts:
            yield parts
    else:
        yield {part: _folder_samples(origin.folder / part) for part in PARTS}


@contextmanager
def femnist(origin: Origin, preset: str) -> Iterator[NewParts]:
    """FEMNIST as 32×32×3: ``flwrlabs/femnist`` in parquet, or LEAF's own JSON.

    The parquet has no test part: one fifth is held out at random, or, for the paper's preset,
    what remains beside its 640 500 training images.
    """
    if origin.folder is not None and not origin.files("train"):
        yield {part: _leaf_samples(origin.folder, part) for part in PARTS}
        return
    with open_tables(origin, ("train",)) as tables:
        table = tables["train"]
        n_test = len(table) // 5
        if preset == "paper":
            n_test = len(table) - enough(640_500, len(table) - 1, "images", table.where)
        rows = hold_out(len(table), n_test, "femnist")
        labels = ("character", "label")
        yield {
            part: _table_samples(
                table.take(rows[part]), FEMNIST_NAMES, (32, 32, 1), labels, ("writer", "writer_id")
            )
            for part in PARTS
        }


@contextmanager
def xchest(origin: Origin, preset: str) -> Iterator[NewParts]:
    """NIH chest X-rays, finding or no finding, as 256×256×3 with their patients.

    Either parquet (image, label, patient) or NIH's own download: ``Data_Entry_2017*.csv``,
    ``train_val_list.txt``, ``test_list.txt`` and the images in any folders below. The paper's
    preset draws 12.7 K training images from all there are.
    """

    def kept(part: str, n_images: int, where: str) -> Ints:
        if part == "test" or preset == "standard":
            return np.arange(n_images)
        return draw_rows(n_images, enough(12_700, n_images, "images", where), "xchest")

    folder = origin.folder
    if folder is not None and not origin.files("train") and any(folder.rglob(NIH_TABLE)):
        yield {part: _nih_samples(folder, part, kept) for part in PARTS}
        return
    with open_tables(origin, PARTS) as tables:
        some = {part: t.take(kept(part, len(t), t.where)) for part, t in tables.items()}
        yield {
            part: _table_samples(
                table, XCHEST_NAMES, (256, 256, 1), ("label",), ("patient", "patient")
            )
            for part, table in some.items()
        }


# --- new samples ---------------------------------------------------------------------------------


def _new_samples(
    class_names: tuple[str, ...],
    labels: NDArray[Any],
    shape: Shape,
    images: Iterable[bytes] | list[Pixels],
    where: str,
    owner_kind: str = "",
    owner_of: Sequence[str] = (),
) -> NewSamples:
    """Of image files, or of pixels; images with owners are scaled, and shown in three channels."""
    owned = bool(owner_kind)
    codes, names = number_owners(owner_of) if owned else (None, ())
    facts = Facts(
        "image",
        class_names,
        channels=3 if owned else shape[-1],
        owner_kind=owner_kind,
        owner_names=names,
    )
    inputs = images if isinstance(images, list) else decode_all(images, shape, where, resize=owned)
    return NewSamples(facts, labels, shape, inputs, owners=codes, where=where)


def _table_samples(
    table: Table,
    class_names: tuple[str, ...],
    shape: Shape,
    label_columns: Sequence[str],
    owner: tuple[str, str] | None = None,
) -> NewSamples:
    """``owner`` is the kind of owners and their column."""
    image_column, label_column = table.column("img", "image"), table.column(*label_columns)
    names = table.class_names(label_column) or class_names
    if len(names) != len(class_names):
        raise InvalidData(
            f"{table.where} names {len(names)} classes in column {label_column}, "
            f"expected {len(class_names)}. Is this the right data set?"
        )
    owners = (owner[0], table.strings(table.column(owner[1]))) if owner else ()
    images, labels = table.encoded_images(image_column), table.ints(label_column)
    return _new_samples(names, labels, shape, images, table.where, *owners)


def _folder_samples(folder: Path) -> NewSamples:
    """A folder per class with images in it, as CINIC-10 and many others are published."""
    found = {path.name: path for path in folder.glob("*") if path.is_dir()}
    if set(found) != set(CIFAR10_NAMES):
        raise InvalidData(
            f"{folder} has the folders {', '.join(sorted(found)) or 'none'}; "
            f"expected one per class: {', '.join(CIFAR10_NAMES)}"
        )
    per_class = [
        sorted(path for path in found[name].iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        for name in CIFAR10_NAMES
    ]
    labels = np.repeat(np.arange(len(per_class)), [len(files) for files in per_class])
    encoded = (path.read_bytes() for path in itertools.chain.from_iterable(per_class))
    return _new_samples(CIFAR10_NAMES, labels, (32, 32, 3), encoded, str(folder))


def _nih_samples(folder: Path, part: str, kept: Callable[[str, int, str], Ints]) -> NewSamples:
    """Wang et al., *ChestX-ray8* (2017). The lists divide the images by patient."""
    wanted = set(_find(folder, NIH_LISTS[part]).read_text().split())
    place = {path.name: path for path in folder.rglob("*.png")}
    path = _find(folder, NIH_TABLE)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        found = reader.fieldnames or ()
        if not set(NIH_COLUMNS) <= set(found):
            raise InvalidData(
                f"{path} has the columns {', '.join(found)}; expected {', '.join(NIH_COLUMNS)}"
            )
        rows = [[row[column] for column in NIH_COLUMNS] for row in reader]
    rows = [row for row in rows if row[0] in wanted]
    missing = [name for name, _, _ in rows if name not in place]
    if missing or not rows:
        raise DataNotFound(
            f"{folder} lacks {len(missing)} of {len(rows)} images of {NIH_LISTS[part]}"
            f"{', like ' + missing[0] if missing else ''}; unpack all of images_*.tar.gz there"
        )
    rows = [rows[row] for row in kept(part, len(rows), str(folder))]
    labels = np.array([int(finding != "No Finding") for _, finding, _ in rows])
    encoded = (place[name].read_bytes() for name, _, _ in rows)
    patients = [patient for _, _, patient in rows]
    return _new_samples(
        XCHEST_NAMES, labels, (256, 256, 1), encoded, str(folder), "patient", patients
    )


def _find(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if not found:
        raise DataNotFound(f"{folder} has no {pattern}; copy NIH's whole download there")
    return found[0]


def _leaf_samples(folder: Path, part: str) -> NewSamples:
    """Caldas et al., *LEAF: A Benchmark for Federated Settings* (2018).

    One file holds about a hundred writers; a writer's ``x`` is a list of 784 floats from 0 to 1
    per image, ``y`` a list of labels.
    """
    files = sorted(path for path in folder.rglob("*.json") if path.parent.name == part)
    if not files:
        raise DataNotFound(
            f"{folder} has neither train-*.parquet nor LEAF's {part}/*.json; download "
            "flwrlabs/femnist from the Hub, or run LEAF's preprocess.sh and copy its data folder"
        )
    inputs, labels, writers = [], [], []
    for path in files:
        for user, samples in _users(path).items():
            user_images, user_labels = _samples(samples, f"{path}, user {user}")
            inputs.append(user_images)
            labels.append(user_labels)
            writers += [user] * len(user_labels)
    where = str(files[0].parent)
    codes = np.concatenate(labels)
    return _new_samples(FEMNIST_NAMES, codes, (32, 32, 1), inputs, where, "writer", writers)


def _users(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(f"cannot read {path} as JSON: {error}. Fetch it again.") from error
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict) or not users:
        raise InvalidData(
            f"{path} is no LEAF file: expected users, num_samples and user_data with one entry "
            "per user"
        )
    return users


def _samples(samples: Any, where: str) -> tuple[Pixels, NDArray[np.int64]]:
    try:
        pixels = np.asarray(samples["x"], np.float64)
        labels = np.asarray(samples["y"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidData(f"{where}: expected lists x and y, got {error!r}") from error
    if pixels.shape != (len(labels), LEAF_SIDE**2) or labels.dtype.kind not in "iu":
        raise InvalidData(
            f"{where}: x of shape {pixels.shape} and y of {labels.dtype}; "
            f"expected {len(labels)} images of {LEAF_SIDE**2} pixels, and integer labels"
        )
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise InvalidData(f"{where}: pixels must lie between 0 and 1")
    grey = np.round(pixels * 255).astype(np.uint8).reshape(-1, LEAF_SIDE, LEAF_SIDE)
    scaled = [np.asarray(resized(Image.fromarray(image), 32, 32)) for image in grey]
    return np.reshape(scaled, (-1, 32, 32, 1)), labels.astype(np.int64)
