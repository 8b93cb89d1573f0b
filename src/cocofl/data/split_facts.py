"""What is known about a split, and a split before it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidData

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Facts:
    """What there is to know about a split besides its samples."""

    task: Literal["image", "text"]
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = ()
    """Per channel, of the training split, with pixels from 0 to 1."""
    std: tuple[float, ...] = ()
    channels: int = 0
    """Images only: a grey image is stored once and shown in this many channels."""
    vocab_size: int = 0
    """Text only: token ids are below this."""
    pad_id: int | None = None
    """Text only: the id that fills a sequence shorter than the others."""
    owner_kind: str = ""
    """What the samples' owners are: ``writer``, ``patient``, ``play``; empty when unknown."""
    owner_names: tuple[str, ...] = ()
    labels: Literal["classes", "tokens", "numbers"] = "classes"
    """What each sample has: one class; a class per position; or numbers, which have no classes."""

    @property
    def num_classes(self) -> int:
        """How many classes the labels distinguish, or how many numbers each sample has."""
        return len(self.class_names)


@dataclass(frozen=True, eq=False)
class Draft:
    """A split about to be written: small arrays whole, the inputs as a stream of chunks."""

    facts: Facts
    labels: NDArray[Any]
    sample_shape: tuple[int, ...]
    inputs: Iterable[NDArray[Any]]
    """Chunks of samples in the order of the labels; uint8 pixels (n, height, width, 1 or 3), or
    uint8 or uint16 token ids (n, length)."""
    dtype: str = "uint8"
    owners: NDArray[Any] | None = None
    tokenizer: bytes = b""
    where: str = ""
    """The file the samples come from, for errors about them."""


def normalise(pixels: NDArray[np.uint8], facts: Facts) -> NDArray[np.float32]:
    """Pixels with the data set's mean taken off and its standard deviation divided out.

    >>> facts = Facts("image", ("a", "b"), mean=(0.5,), std=(0.25,), channels=1)
    >>> normalise(np.full((1, 1, 1, 1), 255, np.uint8), facts).ravel().tolist()
    [2.0]
    """
    mean = np.asarray(facts.mean, np.float32) * np.float32(255)
    scale = np.float32(1) / (np.asarray(facts.std, np.float32) * np.float32(255))
    return np.asarray((pixels.astype(np.float32) - mean) * scale)


def check_labels(labels: NDArray[Any], facts: Facts, where: str) -> NDArray[Any]:
    """Labels as int64, numbers as float32; else :class:`InvalidData` that names the first wrong."""
    if facts.labels == "numbers":
        if labels.dtype.kind not in "iuf" or labels.ndim > 2 or not np.isfinite(labels).all():
            raise InvalidData(f"{where}: labels must be finite numbers, one or a row per sample")
        return labels.astype(np.float32, copy=False)
    return check_codes(labels, facts.num_classes, where, 2 if facts.labels == "tokens" else 1)


def check_codes(
    codes: NDArray[Any], n_codes: int, where: str, dimensions: int = 1
) -> NDArray[np.int64]:
    """Classes as int64, or :class:`InvalidData` naming the first one that is none."""
    if codes.ndim != dimensions or codes.dtype.kind not in "iu":
        raise InvalidData(
            f"{where}: labels must be integers in {('one', 'two')[dimensions - 1]} dimension"
            f"{'s' * (dimensions - 1)}, "
            f"got {codes.dtype} of shape {codes.shape}"
        )
    wrong = np.argwhere((codes < 0) | (codes >= n_codes))
    if len(wrong):
        raise InvalidData(
            f"{where}: sample {wrong[0][0]} has label {codes[tuple(wrong[0])]}, and {len(wrong)} "
            f"of {codes.size} labels are out of range: {n_codes} classes are labelled "
            f"0 to {n_codes - 1}. Is this the right label column, and the right file?"
        )
    return codes.astype(np.int64, copy=False)
