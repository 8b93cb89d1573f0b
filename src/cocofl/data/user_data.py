"""The user's own data, as it is: from what a function returns, or a file holds, to new samples."""

from __future__ import annotations

import hashlib
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cocofl.data.data_files import columns_of, read_path
from cocofl.data.given import NEXT_TOKEN, Given, Images, UserData
from cocofl.data.labels import Labels, check_names, next_tokens, read_labels
from cocofl.data.samples import (
    MOST_CHANNELS,
    PARTS,
    Array,
    Facts,
    NewSamples,
    Task,
    number_owners,
)
from cocofl.data.stable_random import hold_out
from cocofl.data.tokenizing import token_ids, token_windows, tokenizer_of, word_ids
from cocofl.errors import CocoflError, DataNotFound, InvalidData
from cocofl.named import import_function, import_ours, named_in_errors

MAX_TOKEN_ID = 2**31 - 1
CHUNK_SAMPLES = 4096
_WAYS = (
    "expected (inputs, labels) or (inputs, labels, owners), arrays by name, a datasets.Dataset, a "
    "PyTorch data set, or a path; or texts alone, of kind next_token"
)

NewParts = dict[str, NewSamples]


def call_own(name: str, folder: Path | None, options: Mapping[str, Any]) -> UserData:
    """What ``package.module:function`` says its data is, given the data folder and options."""
    function = import_function(name, DataNotFound)
    try:
        inspect.signature(function).bind(folder, **options)
    except TypeError as error:
        given = f" and data.options {dict(options)}" if options else ""
        raise InvalidData(f"{name} cannot take the data folder{given}: {error}") from error
    with named_in_errors(name, InvalidData):
        made = function(folder, **options)
    return made if isinstance(made, UserData) else UserData(made)


def new_parts(data: UserData, name: str) -> tuple[NewParts, str]:
    """The samples of data of one's own, and a checksum of them."""
    given = _parts(data, name)
    for one in given.values():
        _check_finite(one)
    if "test" not in given:
        whole = given["train"]
        n = len(whole.labels)
        if n < 2:
            raise InvalidData(f"{name} has 1 sample: too few to train on and to test with")
        rows = hold_out(n, min(max(1, round(data.test * n)), n - 1), "own data")
        given = {part: whole.take(rows[part]) for part in PARTS}
    folder = Path(data.source).parent if isinstance(data.source, str | Path) else None
    given = {part: _of_words(one, data, folder) for part, one in given.items()}
    if data.kind == NEXT_TOKEN:
        given, inputs, labels = _language(given, data, name, folder)
    else:
        inputs = _inputs({part: given[part].inputs for part in PARTS}, data, name, folder)
        labels = read_labels(
            {part: given[part].labels for part in PARTS},
            name,
            kind=data.kind,
            names=given["train"].label_names,
            text_length=inputs.shape[0] if inputs.task == "text" else None,
        )
    mean, std = _statistics(data, inputs, name)
    parts, checksum = NewParts(), hashlib.sha256()
    for part in PARTS:
        owners, owner_names = None, tuple[str, ...]()
        if (known := given[part].owners) is not None:
            names = [str(owner) for owner in known]
            if not {"None", "nan"}.isdisjoint(names):
                raise InvalidData(f"{name}, {part}: a sample has no owner; give each one")
            check_names(names, f"{name}, {part}, owners")
            owners, owner_names = number_owners(names)
        facts = Facts(
            inputs.task,
            labels.names,
            mean=mean,
            std=std,
            channels=inputs.shape[-1] if inputs.task == "image" else 0,
            vocab_size=inputs.vocab_size,
            pad_id=inputs.pad_id,
            owner_kind=(data.owners or "owner") if owner_names else "",
            owner_names=owner_names,
            labels=labels.kind,
        )
        parts[part] = NewSamples(
            facts,
            labels.parts[part],
            inputs.shape,
            inputs.chunks[part](),
            inputs.dtype,
            owners=owners,
            where=f"{name}, {part}",
        )
        for said in (facts, inputs.shape, inputs.fingerprints[part], _crc(labels, owners, part)):
            checksum.update(f"{said}\n".encode())
    return parts, checksum.hexdigest()[:16]


def _crc(labels: Labels, owners: Array | None, part: str) -> int:
    found = zlib.crc32(labels.parts[part].tobytes())
    return found if owners is None else zlib.crc32(owners.tobytes(), found)


# --- what is what --------------------------------------------------------------------------------


def _parts(data: UserData, name: str) -> dict[str, Given]:
    """Train and, where it is given, test."""
    source = data.source
    if isinstance(source, str | Path):
        return read_path(Path(source), data)
    if isinstance(source, Mapping) and set(source) & set(PARTS):
        if "train" not in source:
            raise InvalidData(f"{name} has a part test and none to train on; {_WAYS} for each")
        own = {part: source[part] for part in PARTS if part in source}
        if "test" not in own and "validation" in source:
            own["test"] = source["validation"]
        return {part: _given(one, data, f"{name}, {part}") for part, one in own.items()}
    return {"train": _given(source, data, name)}


def _given(source: Any, data: UserData, where: str) -> Given:
    """One part, whatever it is held in."""
    if isinstance(source, Given):
        return source
    if isinstance(source, str | Path):
        return read_path(Path(source), data)["train"]
    if isinstance(source, tuple):
        if len(source) not in (2, 3):
            raise InvalidData(f"{where}: a tuple of {len(source)}; {_WAYS}")
        inputs, labels, owners = (*source, None)[:3]
        labels = _numpy(labels) if isinstance(labels, Tensor) else labels
        return Given(_array(inputs, where), labels, owners, where)
    if hasattr(source, "columns") and hasattr(source, "to_numpy"):  # a table of pandas or polars
        source = {str(column): source[column].to_numpy() for column in source.columns}
    if isinstance(source, Mapping):
        return columns_of({key: _array(own, where) for key, own in source.items()}, where).given(
            data
        )
    if type(source).__module__.partition(".")[0] == "datasets":
        table = import_ours("cocofl.data.huggingface:columns", DataNotFound)
        found: Given = table(source, where, data.seconds).given(data)
        return found
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _items(source, data, where)
    raise InvalidData(
        f"{where} gave {type(source).__name__}; {_WAYS}; or a dict with train and test, each one "
        "of these"
    )


def _array(values: Any, where: str) -> Any:
    """An array, or texts; a tensor of uint8 images has its channels first."""
    if isinstance(values, Images):
        return values
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return list(values)  # in an array every text would have the longest one's room
    if isinstance(values, Tensor):
        values = _numpy(values)
        return (
            np.moveaxis(values, 1, -1) if values.dtype == np.uint8 and values.ndim == 4 else values
        )
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidData(
            f"{where}: samples have different shapes; cut or pad them to one shape"
        ) from error
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array.ravel()):
        array = array.astype(str)
    return [str(text) for text in array] if array.dtype.kind == "U" and array.ndim == 1 else array


def _numpy(values: Tensor) -> Array:
    values = values.detach().cpu()
    try:
        # NumPy has no bfloat16.
        found: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    except TypeError as error:
        raise InvalidData(f"a tensor cannot be read as an array: {error}") from error
    return found


def _check_finite(given: Given) -> None:
    """Before samples are held out: then nobody knows any more which ones they were."""
    values = given.inputs
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return
    for begin in range(0, len(values), CHUNK_SAMPLES):
        finite = np.isfinite(_cast(values[begin : begin + CHUNK_SAMPLES], "float32"))
        if not finite.all():
            sample, *place = np.argwhere(~finite)[0]
            channel = f" in channel (or feature) {place[0]}" if place else ""
            raise InvalidData(
                f"{given.where}: sample {begin + sample} has something that is no finite "
                f"number{channel}; fill in or leave out what is missing"
            )


def _rows(source: Any, where: str) -> list[Any]:
    """All samples of a data set, which must be alike."""
    rows = list[Any]()
    for row in range(len(source)):
        try:
            rows.append(source[row])
        except CocoflError:
            raise
        except Exception as error:  # it is the user's code
            raise InvalidData(
                f"{where}: sample {row} cannot be read: {type(error).__name__}: {error}"
            ) from error
    if not rows:
        raise InvalidData(f"{where} has no samples")
    parts = [_parts_of(sample) for sample in rows]
    for row, own in enumerate(parts):
        if own != parts[0]:
            raise InvalidData(
                f"{where}: sample {row} is {own}, sample 0 is {parts[0]}; let all be alike"
            )
    return rows


def _parts_of(sample: Any) -> str:
    """What a sample consists of, as errors say it."""
    if isinstance(sample, Mapping):
        return f"a dict of {', '.join(sorted(map(str, sample)))}"
    return f"a tuple of {len(sample)}" if isinstance(sample, tuple | list) else "a single value"


def _items(source: Any, data: UserData, where: str) -> Given:
    """A data set that gives one sample at a time, as PyTorch's do."""
    rows = _rows(source, where)
    if data.kind == NEXT_TOKEN and not isinstance(rows[0], Mapping):
        texts = _array(rows, where)
        return Given(texts, texts, None, where)
    if isinstance(rows[0], Mapping):
        columns = {name: _stacked([row[name] for row in rows], where) for name in rows[0]}
        return columns_of(columns, where).given(data)
    if not isinstance(rows[0], tuple | list) or len(rows[0]) not in (2, 3):
        raise InvalidData(
            f"{where}: a sample is a {type(rows[0]).__name__}; expected (input, label), "
            "(input, label, owner), or a dict"
        )
    inputs, labels, *owners = zip(*rows, strict=True)
    names = tuple(map(str, getattr(source, "classes", ())))  # torchvision's
    found = [
        label.tolist() if isinstance(label, Tensor | np.generic) else label for label in labels
    ]
    return Given(_stacked(inputs, where), found, list(owners[0]) if owners else None, where, names)


def _stacked(values: Sequence[Any], where: str) -> Any:
    """The inputs of samples below each other."""
    if isinstance(values[0], str):
        return [str(value) for value in values]
    is_image_tensor = isinstance(values[0], Tensor) and values[0].ndim == 3
    try:
        array = np.stack([_numpy(x) if isinstance(x, Tensor) else np.asarray(x) for x in values])
    except ValueError as error:
        raise InvalidData(
            f"{where}: samples have different shapes; cut or pad them to one shape"
        ) from error
    return np.moveaxis(array, 1, -1) if is_image_tensor and array.dtype == np.uint8 else array


# --- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Inputs:
    """The inputs of all parts, as they are stored."""

    task: Task
    shape: tuple[int, ...]
    dtype: str
    chunks: Mapping[str, Callable[[], Iterable[Array]]]
    fingerprints: Mapping[str, str]
    vocab_size: int = 0
    pad_id: int | None = None


def _inputs(given: Mapping[str, Any], data: UserData, name: str, folder: Path | None) -> _Inputs:
    first = given["train"]
    if any(isinstance(own, Images) != isinstance(first, Images) for own in given.values()):
        raise InvalidData(f"{name}: train and test must be alike, and only one of them is images")
    if isinstance(first, Images):
        return _images(given, data, name)
    if isinstance(first, list):
        tokenizer = tokenizer_of(data.tokenizer, folder)
        ids = {part: token_ids(tokenizer, texts, data.length) for part, texts in given.items()}
        return _arrays(ids, name, tokenizer.size, tokenizer.pad_id)
    if data.kind == "tokens" and data.tokenizer is not None:  # of words, which are ids by now
        tokenizer = tokenizer_of(data.tokenizer, folder)
        return _arrays(given, name, tokenizer.size, tokenizer.pad_id)
    return _arrays(given, name)


def _language(
    given: Mapping[str, Given], data: UserData, name: str, folder: Path | None
) -> tuple[dict[str, Given], _Inputs, Labels]:
    """Texts in windows, of which each token is to be told from those before it."""
    if not all(isinstance(own.inputs, list) for own in given.values()):
        raise InvalidData(f'{name}: kind is "{NEXT_TOKEN}", and the inputs are no texts')
    tokenizer, found, ids = tokenizer_of(data.tokenizer, folder), dict[str, Given](), {}
    for part, own in given.items():
        ids[part], rows = token_windows(tokenizer, own.inputs, data.length)  # type: ignore[arg-type]
        if not len(rows):
            raise InvalidData(f"{name}, {part}: no text has two tokens")
        found[part] = own.take(rows)
    inputs = _arrays(ids, name, tokenizer.size, tokenizer.pad_id)
    return found, inputs, next_tokens(ids, inputs.vocab_size, tokenizer.pad_id)


def _of_words(given: Given, data: UserData, folder: Path | None) -> Given:
    """Texts that are lists of words: as token ids with labels of theirs, or as whole texts."""
    texts: Any = given.inputs
    if not isinstance(texts, list) or not isinstance(texts[0], list):
        return given
    if data.kind != "tokens":
        return replace(given, inputs=[" ".join(map(str, words)) for words in texts])
    tokenizer = tokenizer_of(data.tokenizer, folder)
    ids, labels = word_ids(tokenizer, texts, given.labels, data.length)
    return replace(given, inputs=ids, labels=labels)


def _images(given: Mapping[str, Images], data: UserData, name: str) -> _Inputs:
    """Files of images, decoded while they are written."""
    try:
        from cocofl.data import images  # noqa: PLC0415 - Pillow is an optional library
    except ModuleNotFoundError as error:
        raise DataNotFound(
            f"{name}: reading images needs the library Pillow: pip install 'cocofl[data]'"
        ) from error
    size = data.height_and_width
    if not size:
        train = given["train"]
        first = next(iter(train.names or [f"{name}, its first image"]))
        size = images.size_of(next(iter(train.read(train.rows[:1]))), first)
    shape = (size[0], size[1], data.channels)
    if size[0] * size[1] > images.MAX_PIXELS:
        raise InvalidData(f"{name}: images of {size[0]}x{size[1]} are more than can be read")

    def chunks(part: str) -> Callable[[], Iterator[Array]]:
        own = given[part]
        decoded = partial(
            images.decode_all,
            where=f"{name}, {part}",
            resize=bool(data.size),
            otherwise="Say size = … to scale all to one size.",
            files=own.names,
        )
        return lambda: decoded(own.read(own.rows), shape)

    prints = {
        part: f"{own.fingerprint}{zlib.crc32(own.rows.tobytes())}" for part, own in given.items()
    }
    return _Inputs("image", shape, "uint8", {part: chunks(part) for part in given}, prints)


def _arrays(
    given: Mapping[str, Array], name: str, vocab_size: int = 0, pad_id: int | None = None
) -> _Inputs:
    tasks = {part: _task_of(array, f"{name}, {part}") for part, array in given.items()}
    task = tasks["train"]
    # Pixels of grey images may lie without an axis of channels, single features without any.
    arrays = {
        part: array[..., None] if array.ndim == (3 if task == "image" else 1) else array
        for part, array in given.items()
    }
    shapes = {part: array.shape[1:] for part, array in arrays.items()}
    if tasks["test"] != task or shapes["test"] != shapes["train"]:
        raise InvalidData(
            f"{name}: train has samples of {shapes['train']} ({task}), test of {shapes['test']} "
            f"({tasks['test']}); they must be alike"
        )
    dtype = {"image": "uint8", "numeric": "float32"}.get(task, "uint16")
    if task == "text":
        top = max(int(array.max()) for array in arrays.values())
        vocab_size = max(vocab_size, 1 + top)
        dtype = "uint16" if vocab_size <= 2**16 else "int32"

    def chunks(array: Array) -> Callable[[], Iterator[Array]]:
        with_limit = range(0, len(array), CHUNK_SAMPLES)
        return lambda: (_cast(array[begin : begin + CHUNK_SAMPLES], dtype) for begin in with_limit)

    prints = {
        part: f"{array.dtype}{zlib.crc32(np.ascontiguousarray(array).data)}"
        for part, array in arrays.items()
    }
    own = {part: chunks(array) for part, array in arrays.items()}
    return _Inputs(task, shapes["train"], dtype, own, prints, vocab_size, pad_id)


def _cast(array: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):  # what becomes infinite is refused where it is counted
        return array.astype(dtype)


def _task_of(inputs: Any, where: str) -> Task:
    """Pixels are uint8, rows of integers are token ids, everything else is numbers."""
    if not isinstance(inputs, np.ndarray) or inputs.dtype.kind not in "iufb" or not inputs.size:
        found = (
            f"{inputs.dtype} of shape {inputs.shape}" if isinstance(inputs, np.ndarray) else "texts"
        )
        raise InvalidData(
            f"{where}: inputs are {found}; expected floats of one shape for all, uint8 images "
            "(n, height, width, channels), integer token ids (n, length), or texts"
        )
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        channels = inputs.shape[3] if inputs.ndim == 4 else 1
        _check_channels(channels, where)
        return "image"
    if inputs.dtype.kind in "iu" and inputs.ndim == 2:
        if not 0 <= inputs.min() <= inputs.max() <= MAX_TOKEN_ID:
            raise InvalidData(
                f"{where}: token ids must lie between 0 and {MAX_TOKEN_ID}; a table of whole "
                "numbers that are none has to be of floats"
            )
        return "text"
    _check_channels(inputs.shape[1] if inputs.ndim > 1 else 1, where)
    return "numeric"


def _check_channels(count: int, where: str) -> None:
    if count > MOST_CHANNELS:
        raise InvalidData(
            f"{where}: a sample has {count} channels or features, at most {MOST_CHANNELS} can be "
            "normalised one by one; give it an axis of one channel before them"
        )


def _statistics(
    data: UserData, inputs: _Inputs, name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that are said; empty where they are to be measured."""
    if data.normalise is True or inputs.task == "text":
        return (), ()
    channels = inputs.shape[-1] if inputs.task == "image" else inputs.shape[0]
    if isinstance(data.normalise, Mapping):
        try:
            mean, std = (
                tuple(float(value) for value in np.ravel(data.normalise[key]))
                for key in ("mean", "std")
            )
        except (TypeError, ValueError) as error:
            raise InvalidData(f"{name}: normalise has no numbers: {error}") from error
        good = len(mean) == len(std) == channels and np.isfinite([*mean, *std]).all()
        if not good or min(std) <= 0:
            raise InvalidData(
                f"{name}: normalise has {len(mean)} means and {len(std)} deviations; expected "
                f"{channels} of each (one per channel or feature), finite, deviations above 0"
            )
        return mean, std
    return (0.0,) * channels, (1.0,) * channels
