"""Text as characters: windows of 80, each labelled with the character that follows.

A role's speech is cut once: windows of the first four fifths train, those of the rest test, and no
window reaches across the cut, so that no test character was seen in training (LEAF splits a role's
samples in time in the same way).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cocofl.data.stable_random import Ints
from cocofl.errors import InvalidData

WINDOW = 80
TRAIN_FRACTION = 0.8
CHUNK_WINDOWS = 100_000

Codes = NDArray[np.uint8]


def alphabet_of(texts: Sequence[str]) -> str:
    """All characters that occur, in order: one token, and one class, each.

    >>> alphabet_of(["to be", "or not"])
    ' benort'
    """
    alphabet = "".join(sorted(set().union(*texts)))
    if not 1 <= len(alphabet) <= 256:
        raise InvalidData(
            f"the text uses {len(alphabet)} different characters; 1 to 256 can be tokens"
        )
    return alphabet


def encode(text: str, alphabet: str) -> Codes:
    """The position of each character in the alphabet.

    >>> encode("boot", " benort").tolist()
    [1, 4, 4, 6]
    """
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    known = np.frombuffer(alphabet.encode("utf-32-le"), "<u4")
    return np.searchsorted(known, points).astype(np.uint8)


def window_starts(lengths: Sequence[int], split: str) -> tuple[Ints, Ints]:
    """Where the windows of one split begin in the concatenated texts, and which text each is from.

    >>> [values.tolist() for values in window_starts([105, 10, 405], "test")]
    [[439], [2]]
    """
    starts, sources = [], []
    begin = 0
    for source, length in enumerate(lengths):
        cut = int(length * TRAIN_FRACTION)
        first, last = (0, cut) if split == "train" else (cut, length)
        # A window needs WINDOW characters and one more for its label.
        own = np.arange(begin + first, begin + last - WINDOW)
        starts.append(own)
        sources.append(np.full(len(own), source))
        begin += length
    return np.concatenate(starts), np.concatenate(sources)


def windows(codes: Codes, starts: Ints) -> Iterator[Codes]:
    """The windows that begin at ``starts``, a chunk at a time."""
    view = np.lib.stride_tricks.sliding_window_view(codes, WINDOW)
    for begin in range(0, len(starts), CHUNK_WINDOWS):
        yield view[starts[begin : begin + CHUNK_WINDOWS]]
