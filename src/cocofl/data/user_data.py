"""The user's own data: a function that returns arrays, and nothing else to write or register."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocofl.data.samples import PARTS, Facts, NewSamples, number_owners
from cocofl.errors import DataNotFound, InvalidData
from cocofl.named import import_function

MAX_TOKEN_ID = 2**16 - 1


class _Arrays(NamedTuple):
    inputs: NDArray[Any]
    labels: NDArray[Any]
    owners: NDArray[Any] | None


def read_own(name: str, folder: Path | None) -> tuple[dict[str, NewSamples], str]:
    """Call ``package.module:function`` with the data folder; its samples, and their checksum.

    The function returns ``{"train": (inputs, labels), "test": (inputs, labels)}``, each tuple with
    the owners of the samples as a third item if there are any. Inputs are uint8 images
    (n, height, width, 1 or 3) or integer token ids (n, length). Labels are integers, one class per
    sample (n) or position (n, length); or floats, (n) or (n, k), which the network predicts.
    """
    made = import_function(name, DataNotFound)(folder)
    if not isinstance(made, Mapping) or not set(PARTS) <= set(made):
        raise InvalidData(
            f"{name} returned {type(made).__name__}; expected a dict with train and test, "
            "each a tuple (inputs, labels) or (inputs, labels, owners)"
        )
    given = {part: _checked(made[part], f"{name}, {part}") for part in PARTS}
    if given["train"].inputs.shape[1:] != given["test"].inputs.shape[1:]:
        raise InvalidData(
            f"{name}: train has samples of {given['train'].inputs.shape[1:]}, "
            f"test of {given['test'].inputs.shape[1:]}; they must be alike"
        )
    shapes = {arrays.labels.shape[1:] for arrays in given.values()}
    kinds = {_kind(arrays.labels) for arrays in given.values()}
    if len(shapes) > 1 or len(kinds) > 1:
        raise InvalidData(f"{name}: the labels of train and test are not alike")
    if kinds == {"numbers"}:
        num_classes = math.prod(*shapes)
    else:
        num_classes = 1 + max(int(arrays.labels.max()) for arrays in given.values())
    vocab_size = 1 + max(int(arrays.inputs.max()) for arrays in given.values())
    parts, checksum = {}, 0
    for part, arrays in given.items():
        parts[part] = _new_samples(arrays, num_classes, vocab_size, f"{name}, {part}")
        for array in arrays:
            if array is not None:
                checksum = zlib.crc32(f"{array.dtype}{array.shape}".encode(), checksum)
                checksum = zlib.crc32(array.tobytes(), checksum)
    return parts, f"{checksum:08x}"


def _checked(made: Any, where: str) -> _Arrays:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise InvalidData(
            f"{where}: expected (inputs, labels) or (inputs, labels, owners), "
            f"got {type(made).__name__}"
        )
    inputs, labels = np.asarray(made[0]), np.asarray(made[1])
    owners = np.asarray(made[2]) if len(made) == 3 else None
    image = inputs.dtype == np.uint8 and inputs.ndim == 4 and inputs.shape[-1] in (1, 3)
    text = inputs.dtype.kind in "iu" and inputs.ndim == 2
    if not (image or text):
        raise InvalidData(
            f"{where}: inputs are {inputs.dtype} of shape {inputs.shape}; expected uint8 images "
            "(n, height, width, 1 or 3) or integer token ids (n, length)"
        )
    good = labels.dtype.kind in "iuf" and labels.ndim in (1, 2) and labels.size > 0
    if not len(inputs) or not good or len(labels) != len(inputs):
        raise InvalidData(
            f"{where}: {len(inputs)} inputs and labels of {labels.dtype} and shape "
            f"{labels.shape}; expected at least one sample, and for each an integer (a class), a "
            "row of integers (of tokens), or numbers"
        )
    if text and not 0 <= inputs.min() <= inputs.max() <= MAX_TOKEN_ID:
        raise InvalidData(f"{where}: token ids must lie between 0 and {MAX_TOKEN_ID}")
    if owners is not None and owners.shape != labels.shape[:1]:
        raise InvalidData(f"{where}: {len(labels)} labels, but owners of shape {owners.shape}")
    return _Arrays(inputs, labels, owners)


def _new_samples(arrays: _Arrays, num_classes: int, vocab_size: int, where: str) -> NewSamples:
    codes, names = None, tuple[str, ...]()
    if arrays.owners is not None:
        codes, names = number_owners([str(owner) for owner in arrays.owners])
    image = arrays.inputs.ndim == 4
    facts = Facts(
        "image" if image else "text",
        tuple(str(label) for label in range(num_classes)),
        channels=arrays.inputs.shape[-1] if image else 0,
        vocab_size=0 if image else vocab_size,
        owner_kind="owner" if names else "",
        owner_names=names,
        labels=_kind(arrays.labels),
    )
    dtype = "uint8" if image else "uint16"
    shape, inputs = arrays.inputs.shape[1:], [arrays.inputs.astype(dtype)]
    return NewSamples(facts, arrays.labels, shape, inputs, dtype, owners=codes, where=where)


def _kind(labels: NDArray[Any]) -> Literal["classes", "tokens", "numbers"]:
    if labels.dtype.kind == "f":
        return "numbers"
    return "classes" if labels.ndim == 1 else "tokens"
