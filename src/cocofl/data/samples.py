"""One part of a data set, ready to train on, and the file it lives in.

A part is written once and memory-mapped ever after: starting an experiment costs no decoding, and
all worker processes on a machine share one copy in the page cache. The file is an ordinary
safetensors file (labels, owners, inputs, tokenizer) whose metadata holds the facts as JSON and a
checksum of everything. It is written here rather than with the safetensors package because that
needs every array in memory at once, and maps none of them when reading into NumPy.

Nothing read from a file is trusted: sizes are checked against the file before anything is
allocated, labels against the class count, and ``verify=True`` checks every byte.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from cocofl.checks import Amount, Check, check_of, in_short
from cocofl.data.statistics import NumberStatistics, PixelStatistics, Statistics
from cocofl.errors import InvalidData
from cocofl.files import check_plain, parsed_json, replacing

PARTS = ("train", "test")
IGNORED = -100
"""The label of a position that neither trains nor counts, as PyTorch's cross-entropy has it."""
# Raise the number when what a data set's function makes changes: caches of the old are rebuilt.
FORMAT = "cocofl.split.1"
MAX_HEADER_BYTES = 16 * 2**20
MAX_FILE_BYTES = 2**40
MOST_CHANNELS = 2**16
"""Of images, and features of a table: each has a mean and a deviation in the header."""
DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = NDArray[Any]
Task = Literal["image", "text", "numeric"]
LabelKind = Literal["classes", "tokens", "multilabel", "numbers"]
STORED_AS: dict[str, tuple[str, ...]] = {
    "image": ("U8",),
    "text": ("U8", "U16", "I32"),
    "numeric": ("F32",),
    "classes": ("I64",),
    "tokens": ("I64",),
    "multilabel": ("U8",),
    "numbers": ("F32",),
}
"""By what inputs and labels are, how they may lie in the file."""


@dataclass(frozen=True)
class Facts:
    """What there is to know about a part besides its samples."""

    task: Task
    """What a sample is: uint8 pixels, token ids, or numbers of any shape."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = ()
    """Per channel or feature, of the training part unless given; pixels count from 0 to 1."""
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
    labels: LabelKind = "classes"
    """What each sample has: one class; a class per position; any of several; or numbers."""

    @property
    def num_classes(self) -> int:
        """How many classes the labels distinguish, or how many numbers each sample has."""
        return len(self.class_names)

    def normalisation(self, dimensions: int) -> tuple[Array, Array]:
        """What is taken off inputs of so many dimensions, and by what the rest is multiplied."""
        unit = np.float32(255 if self.task == "image" else 1)
        mean = np.asarray(self.mean, np.float32) * unit
        scale = np.float32(1) / (np.asarray(self.std, np.float32) * unit)
        if self.task == "numeric":  # channels come first
            shape = (-1, *[1] * (dimensions - 2))
            return mean.reshape(shape), scale.reshape(shape)
        return mean, scale


@dataclass(frozen=True, eq=False)
class NewSamples:
    """A part about to be written: small arrays whole, the inputs as a stream of chunks."""

    facts: Facts
    labels: NDArray[Any]
    sample_shape: tuple[int, ...]
    inputs: Iterable[NDArray[Any]]
    """Chunks of samples in the order of the labels; uint8 pixels (n, height, width, channels),
    integer token ids (n, length), or float32 numbers (n, channels or features, …)."""
    dtype: str = "uint8"
    owners: NDArray[Any] | None = None
    tokenizer: bytes = b""
    where: str = ""
    """The file the samples come from, for errors about them."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples and labels in a memory-mapped file, with the facts about them.

    Pixels are uint8 in (sample, height, width, channel) order: permuted to PyTorch's order this
    *is* channels_last, without a copy. Numbers are float32 in PyTorch's own order. Sending a part
    to a worker process sends its path only.
    """

    path: Path
    facts: Facts
    inputs: NDArray[Any]
    labels: Array
    owners: NDArray[np.int32] | None
    """Per sample, an index into ``facts.owner_names``; ``None`` when nobody owns the samples."""
    tokenizer: bytes
    """The sentencepiece model that made the token ids; empty for images and characters."""

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_samples, (self.path,)

    def batch(self, indices: NDArray[Any]) -> tuple[Array, Array]:
        """Copies of the samples at ``indices`` that may be written to; token ids as int64."""
        inputs = np.ascontiguousarray(self.inputs[indices])
        if self.facts.task == "text":
            inputs = inputs.astype(np.int64)
        return inputs, self.labels[indices]


def write_samples(path: Path, new: NewSamples) -> Facts:
    """Write a part whole or not at all, and return its facts with the statistics."""
    labels = check_labels(new.labels, new.facts, new.where or path.name)
    with replacing(path) as file:
        return _write(file, new, labels)


def open_samples(path: Path, *, verify: bool = False) -> Samples:
    """Map a part that :func:`write_samples` wrote; ``verify`` also reads it all and checks it.

    Raises :class:`InvalidData` when the file is not exactly such a file.
    """
    try:
        check_plain(path, MAX_FILE_BYTES)
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError) as error:  # a ValueError where it is empty
        raise InvalidData(f"cannot read the cached part {path}: {error}") from error
    header_bytes = int.from_bytes(mapped[:8].tobytes(), "little")
    if not 2 <= header_bytes <= min(len(mapped) - 8, MAX_HEADER_BYTES):
        raise InvalidData(
            f"{path} announces a header of {header_bytes} bytes in a file of {len(mapped)}"
        )
    header, data = mapped[8 : 8 + header_bytes].tobytes(), mapped[8 + header_bytes :]
    try:
        views, facts, crc32 = _parse(parsed_json(header), data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(f"{path} is no complete part: {error!r}") from error
    # The data, then the header with a checksum of 0.
    blank = header.replace(b'"crc32":"%08x"' % crc32, b'"crc32":"00000000"', 1)
    if verify and zlib.crc32(blank, zlib.crc32(data.data)) != crc32:
        raise InvalidData(f"{path} does not match its checksum")
    check_labels(views["labels"], facts, path.name)
    if "owners" in views:
        check_codes(views["owners"], len(facts.owner_names), f"owners in {path.name}")
    inputs = views["inputs"]
    if facts.task == "image":
        inputs = np.broadcast_to(inputs, (*inputs.shape[:-1], facts.channels))
    tokenizer = views["tokenizer"].tobytes() if "tokenizer" in views else b""
    return Samples(path, facts, inputs, views["labels"], views.get("owners"), tokenizer)


def normalise(inputs: Array, facts: Facts) -> NDArray[np.float32]:
    """Pixels or numbers less the data set's mean, divided by its standard deviation.

    >>> facts = Facts("image", ("a", "b"), mean=(0.5,), std=(0.25,), channels=1)
    >>> normalise(np.full((1, 1, 1, 1), 255, np.uint8), facts).ravel().tolist()
    [2.0]
    """
    mean, scale = facts.normalisation(inputs.ndim)
    return np.asarray((inputs.astype(np.float32) - mean) * scale)


def check_labels(labels: NDArray[Any], facts: Facts, where: str) -> NDArray[Any]:
    """Labels as they are stored, or :class:`InvalidData` that names the first wrong one."""
    if facts.labels == "numbers":
        if labels.dtype.kind not in "iuf" or labels.ndim > 2 or not np.isfinite(labels).all():
            raise InvalidData(f"{where}: labels must be finite numbers, one or a row per sample")
        return labels.astype(np.float32, copy=False)
    if facts.labels == "multilabel":
        if labels.shape[1:] != (facts.num_classes,) or not np.isin(labels, (0, 1)).all():
            raise InvalidData(
                f"{where}: labels must be {facts.num_classes} times 0 or 1 per sample, "
                f"got {labels.dtype} of shape {labels.shape}"
            )
        return labels.astype(np.uint8, copy=False)
    if facts.labels != "tokens":
        return check_codes(labels, facts.num_classes, where)
    counts = labels != IGNORED
    if labels.ndim == 2 and not counts.any(1).all():
        raise InvalidData(
            f"{where}: sample {int(np.argmin(counts.any(1)))} has no label but {IGNORED}, which "
            "counts for nothing; leave it out"
        )
    check_codes(np.where(counts, labels, 0), facts.num_classes, where, dimensions=2)
    return labels.astype(np.int64, copy=False)


def check_codes(
    codes: NDArray[Any], n_codes: int, where: str, dimensions: int = 1
) -> NDArray[np.int64]:
    """Classes as int64, or :class:`InvalidData` naming the first one that is none."""
    if codes.ndim != dimensions or codes.dtype.kind not in "iu":
        raise InvalidData(
            f"{where}: labels must be integers in {dimensions} dimension{'s' * (dimensions - 1)}, "
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


def number_owners(names: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Owners as numbers, and the name behind each number."""
    unique, codes = np.unique(np.array(names), return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in unique)


# --- the file ------------------------------------------------------------------------------------


def _write(file: IO[bytes], new: NewSamples, labels: Array) -> Facts:
    small = {"labels": labels.astype(labels.dtype.newbyteorder("<"))}
    if new.owners is not None:
        assert len(new.owners) == len(labels)
        small["owners"] = new.owners.astype("<i4")
    dtype = np.dtype(new.dtype).newbyteorder("<")
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        name: (array.dtype, array.shape) for name, array in small.items()
    }
    shapes["inputs"] = (dtype, (len(labels), *new.sample_shape))
    if new.tokenizer:
        shapes["tokenizer"] = (DTYPES["U8"], (len(new.tokenizer),))
    statistics = _statistics(new)
    # Statistics and checksum are known only at the end: leave room for their digits.
    longest = (-math.pi * 1e-200,) * max(4, new.facts.channels, new.sample_shape[0])
    placeholder = new.facts if statistics is None else replace(new.facts, mean=longest, std=longest)
    room = -(-(len(_header(shapes, placeholder, 0)) + 256) // 64) * 64
    file.write(bytes(8 + room))
    checksum = n_written = 0
    for array in small.values():
        checksum = zlib.crc32(array.data, checksum)
        file.write(array.data)
    for chunk in new.inputs:
        assert chunk.shape[1:] == new.sample_shape, f"{chunk.shape} for {new.sample_shape}"
        assert chunk.dtype == dtype, f"{chunk.dtype} for {dtype}"
        data = np.ascontiguousarray(chunk, dtype)
        checksum = zlib.crc32(data.data, checksum)
        file.write(data.data)
        n_written += len(data)
        if statistics is not None:
            statistics.add(data)
    if n_written != len(labels):
        raise InvalidData(
            f"there are {n_written} inputs and {len(labels)} labels: there must be one input per "
            "label"
        )
    checksum = zlib.crc32(new.tokenizer, checksum)
    file.write(new.tokenizer)
    facts = new.facts
    if statistics is not None and n_written and not facts.mean:
        mean, std = statistics.moments()
        repeats = facts.channels // len(mean) if facts.task == "image" else 1
        facts = replace(facts, mean=mean * repeats, std=std * repeats)
    checksum = zlib.crc32(_header(shapes, facts, 0).ljust(room), checksum)
    header = _header(shapes, facts, checksum)
    assert len(header) <= room
    file.seek(0)
    file.write(room.to_bytes(8, "little") + header.ljust(room))
    return facts


def _statistics(new: NewSamples) -> Statistics | None:
    """What mean and deviation are made of, where they are not known already.

    Numbers are looked at in any case: all must be finite.
    """
    if new.facts.task == "numeric":
        return NumberStatistics(new.sample_shape[0])
    if new.facts.task == "image" and not new.facts.mean:
        return PixelStatistics(new.sample_shape[-1])
    return None


def _header(
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]], facts: Facts, checksum: int
) -> bytes:
    metadata = {"format": FORMAT, "facts": json.dumps(asdict(facts)), "crc32": f"{checksum:08x}"}
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape) in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        header[name] = entry
        begin = end
    return json.dumps(header, separators=(",", ":")).encode()


_FACTS: dict[str, Check] = {
    "task": check_of(Task),
    "class_names": check_of(list[str]),
    "mean": check_of(list[float]),
    "std": check_of(list[Amount]),
    **dict.fromkeys(("channels", "vocab_size"), check_of(int)),
    "pad_id": check_of(int | None),
    "owner_kind": check_of(str),
    "owner_names": check_of(list[str]),
    "labels": check_of(LabelKind),
}
_is_entry = check_of(dict[str, str | list[int]])


def _read_facts(text: str) -> Facts:
    fields = parsed_json(text)
    for name, value in fields.items():
        if name not in _FACTS or not _FACTS[name](value):
            raise ValueError(f"{name[:40]} is {in_short(value)}")
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    facts = Facts(**{**fields, **lists})
    if not facts.class_names or 0.0 in facts.std:
        raise ValueError("there are no classes, or pixels that are all the same")
    return facts


def _parse(header: Any, data: NDArray[np.uint8]) -> tuple[dict[str, Array], Facts, int]:
    """Views of the arrays, the facts and the checksum; everything checked, nothing allocated."""
    metadata = header.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(f"format {metadata['format']!r}, expected {FORMAT!r}")
    facts = _read_facts(metadata["facts"])
    views: dict[str, Array] = {}
    begin = 0
    for name, entry in header.items():
        if not _is_entry(entry):
            raise ValueError(f"{name[:40]} is {in_short(entry)}")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        end = begin + math.prod(shape) * dtype.itemsize
        if not shape or entry["data_offsets"] != [begin, end] or end > len(data):
            raise ValueError(f"{name[:40]} of shape {str(shape)[:80]} does not fill its place")
        views[name] = data[begin:end].view(dtype).reshape(shape)
        begin = end
    if begin != len(data):
        raise ValueError(f"{begin} bytes of data announced, {len(data)} found")
    for name, kind in (("inputs", facts.task), ("labels", facts.labels)):
        if views[name].dtype not in [DTYPES[stored] for stored in STORED_AS[kind]]:
            raise ValueError(f"{name} are {kind}, but stored as {views[name].dtype}")
    _check_shapes({name: view.shape for name, view in views.items()}, facts)
    return views, facts, int(metadata["crc32"], 16)


def _check_shapes(shapes: dict[str, tuple[int, ...]], facts: Facts) -> None:
    n_samples, *sample_shape = shapes["inputs"]
    if shapes["labels"][:1] != (n_samples,) or shapes.get("owners", (n_samples,)) != (n_samples,):
        raise ValueError(f"{n_samples} inputs for labels and owners of other lengths: {shapes}")
    if facts.task == "text" and len(sample_shape) != 1:
        raise ValueError(f"a text is a row of token ids, not {sample_shape}")
    if facts.task == "image" and not (
        len(sample_shape) == 3
        and sample_shape[-1] in (1, facts.channels)
        and 1 <= facts.channels == len(facts.mean) == len(facts.std) <= MOST_CHANNELS
    ):
        raise ValueError(f"images of {sample_shape} in {facts.channels} channels")
    if facts.task == "numeric" and not (
        sample_shape and 1 <= sample_shape[0] == len(facts.mean) == len(facts.std) <= MOST_CHANNELS
    ):
        raise ValueError(f"{sample_shape} numbers with {len(facts.mean)} means")
