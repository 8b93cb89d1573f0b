"""Image data sets: one function each, from its origin to drafts.

A function is a context in which the drafts can be streamed; leaving it closes the files. ``preset``
is ``"standard"``, the data as published, or ``"paper"``, the part of it the paper uses.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cocofl.data import images, leaf, nih
from cocofl.data.huggingface import Table, open_tables
from cocofl.data.origin import IMAGE_SUFFIXES, Origin
from cocofl.data.rows import draw_rows, enough, hold_out, owners
from cocofl.data.split_facts import SPLITS, Draft, Facts
from cocofl.data.stable_random import Ints
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

Drafts = dict[str, Draft]


@contextmanager
def cifar10(origin: Origin, _preset: str) -> Iterator[Drafts]:
    """``uoft-cs/cifar10``: 32×32 in colour."""
    with open_tables(origin, SPLITS) as tables:
        yield {
            split: _image_draft(table, ("img", "image"), ("label",), CIFAR10_NAMES, (32, 32, 3))
            for split, table in tables.items()
        }


@contextmanager
def cifar100(origin: Origin, _preset: str) -> Iterator[Drafts]:
    """``uoft-cs/cifar100`` with its 100 fine labels."""
    names = tuple(str(label) for label in range(100))
    with open_tables(origin, SPLITS) as tables:
        yield {
            split: _image_draft(table, ("img", "image"), ("fine_label",), names, (32, 32, 3))
            for split, table in tables.items()
        }


@contextmanager
def fashion_mnist(origin: Origin, _preset: str) -> Iterator[Drafts]:
    """``zalando-datasets/fashion_mnist``: 28×28 grey."""
    with open_tables(origin, SPLITS) as tables:
        yield {
            split: _image_draft(table, ("image",), ("label",), FASHION_NAMES, (28, 28, 1))
            for split, table in tables.items()
        }


@contextmanager
def cinic10(origin: Origin, preset: str) -> Iterator[Drafts]:
    """CINIC-10 as published (``train/airplane/*.png`` …), or ``flwrlabs/cinic10`` in parquet.

    The validation split is left alone: the paper trains on the 90 000 of ``train``.
    """
    if origin.folder is None or origin.files("train"):
        with cifar10(origin, preset) as drafts:
            yield drafts
    else:
        yield {split: _folder_draft(origin.folder / split) for split in SPLITS}


@contextmanager
def femnist(origin: Origin, preset: str) -> Iterator[Drafts]:
    """FEMNIST as 32×32×3: ``flwrlabs/femnist`` in parquet, or LEAF's own JSON.

    The parquet has no test split: one fifth is held out at random, or, for the paper's preset,
    what remains beside its 640 500 training images.
    """
    if origin.folder is not None and not origin.files("train"):
        yield {split: _leaf_draft(origin.folder, split) for split in SPLITS}
        return
    with open_tables(origin, ("train",)) as tables:
        table = tables["train"]
        n_test = len(table) // 5
        if preset == "paper":
            n_test = len(table) - enough(640_500, len(table) - 1, "images", table.where)
        rows = hold_out(len(table), n_test, "femnist")
        yield {
            split: _image_draft(
                table.take(rows[split]), ("image",), ("character", "label"), FEMNIST_NAMES,
                (32, 32, 1), channels=3, resize=True, owner=("writer", "writer_id"),
            )
            for split in SPLITS
        }  # fmt: skip


@contextmanager
def xchest(origin: Origin, preset: str) -> Iterator[Drafts]:
    """NIH chest X-rays, finding or no finding, as 256×256×3 with their patients.

    Either parquet (image, label, patient) or NIH's own download: ``Data_Entry_2017*.csv``,
    ``train_val_list.txt``, ``test_list.txt`` and the images in any folders below.
    """
    folder = origin.folder
    if folder is not None and not origin.files("train") and nih.is_download(folder):
        yield {split: _nih_draft(folder, split, preset) for split in SPLITS}
        return
    with open_tables(origin, SPLITS) as tables:
        if preset == "paper":
            train = tables["train"]
            tables["train"] = train.take(_paper_rows(len(train), train.where))
        yield {
            split: _image_draft(
                table, ("image",), ("label",), XCHEST_NAMES,
                (256, 256, 1), channels=3, resize=True, owner=("patient", "patient"),
            )
            for split, table in tables.items()
        }  # fmt: skip


# --- pieces --------------------------------------------------------------------------------------


def _image_draft(
    table: Table,
    image_columns: Sequence[str],
    label_columns: Sequence[str],
    class_names: tuple[str, ...],
    shape: tuple[int, int, int],
    *,
    channels: int = 0,
    resize: bool = False,
    owner: tuple[str, str] | None = None,
) -> Draft:
    image_column, label_column = table.column(*image_columns), table.column(*label_columns)
    names = table.class_names(label_column) or class_names
    if len(names) != len(class_names):
        raise InvalidData(
            f"{table.where} names {len(names)} classes in column {label_column}, "
            f"expected {len(class_names)}. Is this the right data set?"
        )
    owner_codes, owner_names = None, tuple[str, ...]()
    if owner is not None:
        owner_codes, owner_names = owners(table.strings(table.column(owner[1])))
    return Draft(
        Facts(
            "image",
            names,
            channels=channels or shape[-1],
            owner_kind=owner[0] if owner else "",
            owner_names=owner_names,
        ),
        table.ints(label_column),
        shape,
        images.decode_all(table.encoded_images(image_column), shape, table.where, resize=resize),
        owners=owner_codes,
        where=table.where,
    )


def _folder_draft(folder: Path) -> Draft:
    """A folder per class with images in it, as CINIC-10 and many others are published."""
    found = (
        {path.name: path for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else {}
    )
    if set(found) != set(CIFAR10_NAMES):
        raise InvalidData(
            f"{folder} has the folders {', '.join(sorted(found)) or 'none'}; "
            f"expected one per class: {', '.join(CIFAR10_NAMES)}"
        )
    per_class = [_image_files(found[name]) for name in CIFAR10_NAMES]
    labels = np.repeat(np.arange(len(per_class)), [len(files) for files in per_class])
    encoded = (path.read_bytes() for path in itertools.chain.from_iterable(per_class))
    shape = (32, 32, 3)
    return Draft(
        Facts("image", CIFAR10_NAMES, channels=3),
        labels,
        shape,
        images.decode_all(encoded, shape, str(folder)),
    )


def _leaf_draft(folder: Path, split: str) -> Draft:
    files = sorted(path for path in folder.rglob("*.json") if path.parent.name == split)
    if not files:
        raise DataNotFound(
            f"{folder} has neither train-*.parquet nor LEAF's {split}/*.json; download "
            "flwrlabs/femnist from the Hub, or run LEAF's preprocess.sh and copy its data folder"
        )
    pixels, labels, writers = leaf.read_femnist(files)
    writer_codes, names = owners(writers)
    return Draft(
        Facts("image", FEMNIST_NAMES, channels=3, owner_kind="writer", owner_names=names),
        labels,
        (32, 32, 1),
        (images.resize_grey(pixels[i : i + 10_000], 32, 32) for i in range(0, len(pixels), 10_000)),
        owners=writer_codes,
        where=f"{files[0].parent}",
    )


def _nih_draft(folder: Path, split: str, preset: str) -> Draft:
    entries = nih.read_entries(folder, split)
    if split == "train" and preset == "paper":
        entries = [entries[row] for row in _paper_rows(len(entries), str(folder))]
    patients, names = owners([entry.patient for entry in entries])
    shape = (256, 256, 1)
    encoded = (entry.path.read_bytes() for entry in entries)
    return Draft(
        Facts("image", XCHEST_NAMES, channels=3, owner_kind="patient", owner_names=names),
        np.array([int(entry.finding) for entry in entries]),
        shape,
        images.decode_all(encoded, shape, str(folder), resize=True),
        owners=patients,
    )


def _paper_rows(n_images: int, where: str) -> Ints:
    """The paper samples 12.7 K training images from all there are."""
    return draw_rows(n_images, enough(12_700, n_images, "images", where), "xchest")


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
