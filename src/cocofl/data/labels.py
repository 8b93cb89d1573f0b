"""From labels as people have them to codes and the names behind them.

========================  ======================================================================
``classes``               integers from 0, text, or true and false: one per sample
``tokens``                a row of integers per sample: one class for each position, or ``IGNORED``
``multilabel``            a row of 0 and 1 per sample, or lists of names: any of several classes
``numbers``               floats: one, or a row of them, per sample
========================  ======================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cocofl.data.samples import IGNORED, Array, LabelKind
from cocofl.errors import InvalidData

MOST_CLASSES = 2**20
MOST_CHARACTERS = 1000
"""Of the name of a class or an owner."""
_MISSING = {"None", "nan", "<NA>", "NaT"}
KINDS: tuple[LabelKind, ...] = get_args(LabelKind)


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of all parts, as they are stored, and what they mean."""

    kind: LabelKind
    names: tuple[str, ...]
    parts: Mapping[str, Array]


def read_labels(
    given: Mapping[str, Any], where: str, *, kind: str = "auto", names: Sequence[str] = (),
    text_length: int | None = None,
) -> Labels:  # fmt: skip
    """The labels of all parts together: they share classes.

    ``names`` are those of classes or numbers, where they are known; ``text_length`` is how many
    positions the inputs have, where they are token ids.
    """
    arrays = {part: _as_array(labels, f"{where}, {part}") for part, labels in given.items()}
    shapes = {array.shape[1:] for array in arrays.values()}
    found = {_kind_of(array, names, text_length) for array in arrays.values()}
    if found == {"tokens", "multilabel"}:  # one part happens to have nothing but 0 and 1
        found = {"tokens"}
    if len(shapes) > 1 or len(found) > 1:
        raise InvalidData(f"{where}: the labels of train and test are not alike")
    chosen = found.pop() if kind == "auto" else kind
    if chosen == "numbers":
        count = math.prod(next(iter(shapes)))
        numbers = {part: _numbers(array, where) for part, array in arrays.items()}
        return Labels("numbers", tuple(names) or _counted(count), numbers)
    if chosen == "multilabel":
        return _multilabel(arrays, names, where)
    texts = any(array.dtype.kind == "U" for array in arrays.values())
    if texts and not names:
        names = sorted_names(name for array in arrays.values() for name in array.ravel().tolist())
    arrays = {part: _codes(array, names, f"{where}, {part}") for part, array in arrays.items()}
    if not names:
        largest = max(int(array.max()) for array in arrays.values())
        if largest >= MOST_CLASSES:
            raise InvalidData(
                f"{where}: classes are counted from 0, and a label is {largest}; give labels as "
                'text, and each that is there is a class, or say kind = "numbers"'
            )
        names = _counted(1 + largest)
    return Labels("tokens" if chosen == "tokens" else "classes", tuple(names), arrays)


def next_tokens(ids: Mapping[str, Array], vocab_size: int, pad_id: int) -> Labels:
    """Of each token the one that follows; nothing follows the last, and padding does not count.

    >>> next_tokens({"train": np.array([[7, 8, 9, 0]])}, 10, pad_id=0).parts["train"].tolist()
    [[8, 9, -100, -100]]
    """
    found = {}
    for part, own in ids.items():
        found[part] = np.full(own.shape, IGNORED, np.int64)
        found[part][:, :-1] = np.where(own[:, 1:] == pad_id, IGNORED, own[:, 1:])
    return Labels("tokens", _counted(vocab_size), found)


def sorted_names(found: Iterable[str]) -> tuple[str, ...]:
    """Each name once; whole numbers by their size.

    >>> sorted_names(["b", "a", "b"]), sorted_names(["10", "9"])
    (('a', 'b'), ('9', '10'))
    """
    names = set(found)
    try:
        return tuple(sorted(names, key=int))
    except ValueError:
        return tuple(sorted(names))


def check_names(names: Iterable[str], where: str) -> None:
    """Complain about a text that is no name; in an array every name has the longest one's room."""
    longest = max(map(len, names), default=0)
    if longest > MOST_CHARACTERS:
        raise InvalidData(
            f"{where}: a name has {longest} characters, at most {MOST_CHARACTERS} are read; is "
            "this the right column?"
        )


def recoded(labels: Array, kind: LabelKind, own: Sequence[str], others: Sequence[str]) -> Array:
    """Labels whose names are ``own`` as those of ``others``, who may know more of them.

    >>> recoded(np.array([0, 1, 1]), "classes", ["run", "walk"], ["run", "sit", "walk"]).tolist()
    [0, 2, 2]
    """
    if kind == "numbers" or tuple(own) == tuple(others):
        return labels
    place = {name: code for code, name in enumerate(others)}
    unknown = [name for name in own if name not in place]
    if unknown:
        raise InvalidData(
            f"the data here has labels that the others do not know, like {unknown[0]!r}; "
            f"they know {', '.join(map(repr, others[:8]))}{', …' * (len(others) > 8)}"
        )
    places = np.array([place[name] for name in own])
    if kind == "multilabel":
        spread = np.zeros((len(labels), len(others)), labels.dtype)
        spread[:, places] = labels
        return spread
    return np.where(labels == IGNORED, IGNORED, places[np.maximum(labels, 0)])


def _as_array(labels: Any, where: str) -> Array:
    """An array of numbers or text; lists of different lengths stay lists, as objects."""
    if isinstance(labels, list | tuple):
        check_names([label for label in labels if isinstance(label, str)], where)
    try:
        array = np.asarray(labels)
    except ValueError:  # rows of different lengths
        array = _objects(labels)
    if array.dtype.kind == "O":
        values = array.tolist()
        if all(isinstance(value, str) for value in values):
            array = np.asarray(values, str)
        elif odd := [x for x in values if not isinstance(x, list | tuple | set | np.ndarray)]:
            one = next((x for x in odd if not isinstance(x, str)), odd[0])
            what = "missing" if str(one) in _MISSING else f"a {type(one).__name__}"
            raise InvalidData(
                f"{where}: a label is {what}; expected a class (a whole number or text), a list of "
                "classes, or numbers"
            )
    if array.dtype.kind not in "iufbUO" or array.ndim not in (1, 2) or array.size == 0:
        raise InvalidData(
            f"{where}: labels are {array.dtype} of shape {array.shape}; expected for each sample "
            "an integer or text (a class), a row of integers (of tokens), a row of 0 and 1 or a "
            "list of names (several labels), or numbers"
        )
    return array


def _objects(labels: Any) -> Array:
    found = np.empty(len(labels), object)
    for row, label in enumerate(labels):
        found[row] = label
    return found


def _kind_of(labels: Array, names: Sequence[str], text_length: int | None) -> LabelKind:
    if labels.dtype.kind == "f":
        return "numbers"
    if labels.dtype.kind != "O" and labels.ndim == 1:
        return "classes"
    if labels.dtype.kind in "bUO":
        return "multilabel"
    if text_length == labels.shape[1]:
        return "tokens"
    # With names they are classes, in lists that happen to be of one length.
    is_several = bool(names) or (text_length is None and _is_matrix(labels, names))
    return "multilabel" if is_several else "tokens"


def _is_matrix(labels: Array, names: Sequence[str]) -> bool:
    """Whether each row has a 0 or a 1 for every class, and not the classes themselves."""
    is_matrix = labels.dtype.kind in "iufb" and labels.ndim == 2
    return is_matrix and len(names) in (0, labels.shape[1]) and bool(np.isin(labels, (0, 1)).all())


def _numbers(labels: Array, where: str) -> NDArray[np.float32]:
    if labels.dtype.kind not in "iufb":
        raise InvalidData(f"{where}: labels are {labels.dtype}; expected numbers")
    return labels.astype(np.float32)


def _multilabel(arrays: Mapping[str, Array], names: Sequence[str], where: str) -> Labels:
    """Rows of 0 and 1, as they are or made of lists of names or codes."""
    if all(_is_matrix(array, names) for array in arrays.values()):
        width = next(iter(arrays.values())).shape[1]
        whole = {part: array.astype(np.int64) for part, array in arrays.items()}
        return Labels("multilabel", tuple(names) or _counted(width), whole)
    if any(array.dtype.kind == "f" for array in arrays.values()):
        raise InvalidData(f"{where}: labels are fractions; expected rows of 0 and 1 or of names")
    lists = {part: [_names_in(row, names, where) for row in a] for part, a in arrays.items()}
    known = tuple(names) or sorted_names(
        name for rows in lists.values() for r in rows for name in r
    )
    place = {name: column for column, name in enumerate(known)}
    found = {}
    for part, rows in lists.items():
        found[part] = np.zeros((len(rows), len(known)), np.uint8)
        for number, row in enumerate(rows):
            found[part][number, [place[name] for name in row]] = 1
    return Labels("multilabel", known, found)


def _names_in(row: Any, names: Sequence[str], where: str) -> list[str]:
    """The names of one sample's classes; whole numbers count into the names."""
    row = row if isinstance(row, list | tuple | set | np.ndarray) else [row]
    found = []
    for label in row:
        if names and not isinstance(label, str):
            if not 0 <= int(label) < len(names):
                raise InvalidData(f"{where}: label {label} of {len(names)} named classes")
            found.append(names[int(label)])
        elif names and label not in names:
            raise InvalidData(f"{where}: label {label!r} is none of the named classes")
        else:
            found.append(str(label))
    return found


def _codes(labels: Array, names: Sequence[str], where: str) -> Array:
    """Text as places among the names; integers as they are."""
    if labels.dtype.kind != "U":
        if labels.dtype.kind not in "iub":
            raise InvalidData(f"{where}: labels are {labels.dtype}; expected whole numbers or text")
        return labels.astype(np.int64)
    place = {name: code for code, name in enumerate(names)}
    unknown = set(labels.ravel().tolist()) - place.keys()
    if unknown:
        raise InvalidData(f"{where}: label {min(unknown)!r} is none of the named classes")
    return np.array([place[name] for name in labels.ravel().tolist()]).reshape(labels.shape)


def _counted(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))
