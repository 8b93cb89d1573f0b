"""One split of a data set, ready to train on, and the file it lives in.

A split is written once and memory-mapped ever after: starting an experiment costs no decoding, and
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
import os
import uuid
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cocofl.data.split_facts import Draft, Facts, check_codes, check_labels
from cocofl.errors import InvalidData

# Raise the number when what a data set's function makes changes: caches of the old are rebuilt.
FORMAT = "cocofl.split.1"
MAX_HEADER_BYTES = 64 * 2**20
CHUNK_BYTES = 16 * 2**20
DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and labels in a memory-mapped file, with the facts about them.

    Pixels are uint8 in (sample, height, width, channel) order: permuted to PyTorch's order this
    *is* channels_last, without a copy. Sending a split to a worker process sends its path only.
    """

    path: Path
    facts: Facts
    inputs: NDArray[Any]
    labels: NDArray[Any]
    owners: NDArray[np.int32] | None
    """Per sample, an index into ``facts.owner_names``; ``None`` when nobody owns the samples."""
    tokenizer: bytes
    """The sentencepiece model that made the token ids; empty for images and characters."""

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_split, (self.path,)

    def batch(self, indices: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies of the samples at ``indices`` that may be written to; token ids as int64."""
        inputs = np.ascontiguousarray(self.inputs[indices])
        if self.facts.task == "text":
            inputs = inputs.astype(np.int64)
        return inputs, self.labels[indices]


def write_split(path: Path, draft: Draft) -> Facts:
    """Write a split under its final name in one step, and return its facts with the statistics.

    The file gets its name only once it is complete and on the disk, so a process that dies on the
    way leaves a stray temporary file and never half a split.
    """
    labels = check_labels(draft.labels, draft.facts, draft.where or path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with partial.open("wb") as file:
            facts = _write(file, draft, labels)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return facts


def open_split(path: Path, *, verify: bool = False) -> Split:
    """Map a split that :func:`write_split` wrote; ``verify`` also reads it all and checks it.

    Raises :class:`InvalidData` when the file is not exactly such a file.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header, begin = _read_header(file, size_bytes)
    except OSError as error:
        raise InvalidData(f"cannot read the cached split {path}: {error}") from error
    arrays, facts, checksum = _parse_header(header, size_bytes - begin, path)
    mapped = np.memmap(path, np.uint8, "r", shape=(size_bytes,)).view(np.ndarray)
    if verify and _checksum(header, mapped[begin:], checksum) != checksum:
        raise InvalidData(f"{path} does not match its checksum")
    views = {
        name: mapped[begin + start : begin + stop].view(dtype).reshape(shape)
        for name, (dtype, shape, start, stop) in arrays.items()
    }
    check_labels(views["labels"], facts, path.name)
    if "owners" in views:
        check_codes(views["owners"], len(facts.owner_names), f"owners in {path.name}")
    return _assemble(path, facts, views)


# --- the file ------------------------------------------------------------------------------------


def _write(file: BinaryIO, draft: Draft, labels: NDArray[Any]) -> Facts:
    small = {"labels": labels.astype(labels.dtype.newbyteorder("<"))}
    if draft.owners is not None:
        assert len(draft.owners) == len(labels)
        small["owners"] = draft.owners.astype("<i4")
    dtype = np.dtype(draft.dtype).newbyteorder("<")
    shapes: dict[str, tuple[np.dtype[Any], Shape]] = {
        name: (array.dtype, array.shape) for name, array in small.items()
    }
    shapes["inputs"] = (dtype, (len(labels), *draft.sample_shape))
    if draft.tokenizer:
        shapes["tokenizer"] = (DTYPES["U8"], (len(draft.tokenizer),))
    # Statistics and checksum are known only at the end: leave room for their digits.
    placeholder = replace(draft.facts, mean=(math.pi,) * 4, std=(math.pi,) * 4)
    room = -(-(len(_header(shapes, placeholder, 0)) + 256) // 64) * 64
    file.write(bytes(8 + room))
    checksum = 0
    for array in small.values():
        checksum = zlib.crc32(array.tobytes(), checksum)
        file.write(array.tobytes())
    moments = _Moments(draft.sample_shape[-1])
    written_bytes = 0
    for chunk in draft.inputs:
        assert chunk.shape[1:] == draft.sample_shape, f"{chunk.shape} for {draft.sample_shape}"
        assert chunk.dtype == dtype, f"{chunk.dtype} for {dtype}"
        data = np.ascontiguousarray(chunk, dtype)
        checksum = zlib.crc32(data.data, checksum)
        file.write(data.data)
        written_bytes += data.nbytes
        if draft.facts.task == "image" and not draft.facts.mean:
            moments.add(data)
    inputs_bytes = math.prod(shapes["inputs"][1]) * dtype.itemsize
    if written_bytes != inputs_bytes:
        raise InvalidData(
            f"the inputs hold {written_bytes} bytes, but {len(labels)} labels need {inputs_bytes}: "
            "there must be one input per label"
        )
    checksum = zlib.crc32(draft.tokenizer, checksum)
    file.write(draft.tokenizer)
    facts = moments.complete(draft.facts) if moments.n_pixels else draft.facts
    checksum = zlib.crc32(_header(shapes, facts, 0).ljust(room), checksum)
    header = _header(shapes, facts, checksum)
    assert len(header) <= room
    file.seek(0)
    file.write(room.to_bytes(8, "little") + header.ljust(room))
    return facts


class _Moments:
    """Mean and standard deviation per channel, in integers: exact, whatever the chunks are."""

    def __init__(self, stored_channels: int) -> None:
        self.n_pixels = 0
        self.sums = [0] * stored_channels
        self.squares = [0] * stored_channels

    def add(self, pixels: NDArray[np.uint8]) -> None:
        per_channel = pixels.reshape(-1, pixels.shape[-1])
        self.n_pixels += len(per_channel)
        values = np.arange(256, dtype=np.int64)
        for channel in range(pixels.shape[-1]):
            counts = np.bincount(per_channel[:, channel], minlength=256)
            self.sums[channel] += int(counts @ values)
            self.squares[channel] += int(counts @ values**2)

    def complete(self, facts: Facts) -> Facts:
        n = self.n_pixels
        mean = [total / n / 255 for total in self.sums]
        variance = [
            (n * square - total * total) / (n * n)
            for total, square in zip(self.sums, self.squares, strict=True)
        ]
        # A channel without any contrast divides by one instead of by zero.
        std = [math.sqrt(value) / 255 or 1.0 for value in variance]
        repeats = facts.channels // len(mean)
        return replace(facts, mean=tuple(mean * repeats), std=tuple(std * repeats))


def _header(shapes: dict[str, tuple[np.dtype[Any], Shape]], facts: Facts, checksum: int) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "facts": json.dumps(asdict(facts)),
            "crc32": f"{checksum:08x}",
        }
    }
    begin = 0
    for name, (dtype, shape) in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        header[name] = entry
        begin = end
    return json.dumps(header, separators=(",", ":")).encode()


def _read_header(file: BinaryIO, size_bytes: int) -> tuple[bytes, int]:
    header_bytes = int.from_bytes(file.read(8), "little")
    if size_bytes < 8 or not 2 <= header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
        raise InvalidData(
            f"{file.name} announces a header of {header_bytes} bytes in a file of {size_bytes}"
        )
    return file.read(header_bytes), 8 + header_bytes


def _parse_header(
    raw: bytes, data_bytes: int, path: Path
) -> tuple[dict[str, tuple[np.dtype[Any], Shape, int, int]], Facts, int]:
    """The arrays' places, the facts and the checksum; everything checked, nothing allocated."""
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}, expected {FORMAT!r}")
        facts = _parse_facts(json.loads(metadata["facts"]))
        arrays: dict[str, tuple[np.dtype[Any], Shape, int, int]] = {}
        last_end = 0
        for name, entry in header.items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            n_bytes = math.prod(shape) * dtype.itemsize
            if min(shape) < 0 or begin != last_end or end != begin + n_bytes:
                raise ValueError(f"{name} of shape {shape} does not fill {begin}:{end}")
            arrays[name] = (dtype, shape, begin, end)
            last_end = end
        if last_end != data_bytes:
            raise ValueError(f"{last_end} bytes of data announced, {data_bytes} found")
        _check_shapes({name: array[1] for name, array in arrays.items()}, facts)
        if arrays["labels"][0] != DTYPES["F32" if facts.labels == "numbers" else "I64"]:
            raise ValueError(f"{facts.labels} are stored as {arrays['labels'][0]}")
        return arrays, facts, int(metadata["crc32"], 16)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidData(f"{path} is no complete split: {error!r}") from error


def _parse_facts(fields: dict[str, Any]) -> Facts:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    facts = Facts(**{**fields, **lists})
    if facts.task not in ("image", "text") or not facts.class_names:
        raise ValueError(f"no task {facts.task!r} with {len(facts.class_names)} classes")
    return facts


def _check_shapes(shapes: dict[str, Shape], facts: Facts) -> None:
    n_samples, *sample_shape = shapes["inputs"]
    if shapes["labels"][:1] != (n_samples,) or shapes.get("owners", (n_samples,)) != (n_samples,):
        raise ValueError(f"{n_samples} inputs for labels and owners of other lengths: {shapes}")
    if facts.task == "text" and len(sample_shape) != 1:
        raise ValueError(f"a text is a row of token ids, not {sample_shape}")
    if facts.task == "image" and not (
        len(sample_shape) == 3
        and sample_shape[-1] in (1, facts.channels)
        and 1 <= facts.channels == len(facts.mean) == len(facts.std) <= 4
    ):
        raise ValueError(f"images of {sample_shape} in {facts.channels} channels")


def _assemble(path: Path, facts: Facts, views: dict[str, NDArray[Any]]) -> Split:
    inputs = views["inputs"]
    if facts.task == "image":
        inputs = np.broadcast_to(inputs, (*inputs.shape[:-1], facts.channels))
    tokenizer = views["tokenizer"].tobytes() if "tokenizer" in views else b""
    return Split(path, facts, inputs, views["labels"], views.get("owners"), tokenizer)


def _checksum(header: bytes, data: NDArray[np.uint8], claimed: int) -> int:
    """The checksum of everything in the file: the data, then the header with a checksum of 0."""
    checksum = 0
    for begin in range(0, len(data), CHUNK_BYTES):
        checksum = zlib.crc32(data[begin : begin + CHUNK_BYTES].data, checksum)
    blank = header.replace(b'"crc32":"%08x"' % claimed, b'"crc32":"00000000"', 1)
    return zlib.crc32(blank, checksum)
