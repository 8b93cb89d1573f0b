"""Texts as rows of token ids, by the tokenizer that the data's owner names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocofl.data.samples import IGNORED
from cocofl.errors import DataNotFound, InvalidData
from cocofl.files import read_limited

BYTES = "bytes"
MOST_TOKENIZER_BYTES = 64 * 2**20
AT_ONCE = 1000
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>")


IdsAndWords = tuple[Sequence[int], Sequence[int | None]]


class Tokenizer(NamedTuple):
    """From texts to lists of ids, all below ``size``."""

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    pad_id: int
    size: int
    """0 where it does not say."""
    encode_words: Callable[[Sequence[str]], IdsAndWords] | None = None
    """From the words of one text to ids, and the word of each; else words are encoded alone."""


def tokenizer_of(given: Any, folder: Path | None = None) -> Tokenizer:
    """What a data set names as its tokenizer.

    ``"bytes"`` (UTF-8, each byte an id from 1); a ``tokenizer.json`` of Hugging Face's
    ``tokenizers``, in ``folder`` or here; a tokenizer of ``tokenizers`` or ``transformers``; or any
    function from texts to lists of ids.

    >>> tokenizer_of("bytes").encode(["hi"])
    [[105, 106]]
    """
    if isinstance(given, str | Path) and str(given) == BYTES:
        return Tokenizer(
            lambda texts: [[byte + 1 for byte in text.encode()] for text in texts], 0, 257
        )
    if (file := tokenizer_file(given, folder)) is not None:
        return tokenizer_of(_from_file(file))
    if hasattr(given, "encode_batch"):  # of `tokenizers`
        pads = [given.token_to_id(token) for token in _PADDING]
        pad_id = next((found for found in pads if found is not None), 0)
        return Tokenizer(
            lambda texts: [one.ids for one in given.encode_batch(list(texts))],
            pad_id,
            given.get_vocab_size(),
            partial(_words_of_tokenizers, given),
        )
    if callable(given):
        pads = [getattr(given, name, None) for name in ("pad_token_id", "eos_token_id")]
        pad_id = next((found for found in pads if found is not None), 0)
        size = len(given) if hasattr(given, "__len__") else 0
        knows_words = hasattr(given, "is_fast")  # of `transformers`
        words = partial(_words_of_transformers, given) if knows_words else None
        return Tokenizer(lambda texts: _ids(given(list(texts))), pad_id, size, words)
    raise InvalidData(
        'the inputs are texts, and no tokenizer is named: say tokenizer = "bytes", the path of a '
        "tokenizer.json, or in Python a tokenizer, or any function from texts to lists of ids"
        if given is None
        else f"the tokenizer is a {type(given).__name__}; expected a function, a name or a path"
    )


def token_ids(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> NDArray[np.int32]:
    """Token ids (texts, length): longer texts are cut, shorter ones padded at the end."""
    found = np.full((len(texts), length), tokenizer.pad_id, np.int32)
    for begin in range(0, len(texts), AT_ONCE):
        some = texts[begin : begin + AT_ONCE]
        encoded = tokenizer.encode(some)
        if len(encoded) != len(some):
            raise InvalidData(
                f"the tokenizer gave {len(encoded)} rows of ids for {len(some)} texts"
            )
        for row, ids in enumerate(encoded, begin):
            kept = ids[:length]
            found[row, : len(kept)] = kept
    return found


def word_ids(
    tokenizer: Tokenizer,
    texts: Sequence[Sequence[str]],
    labels: Sequence[Sequence[int]],
    length: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids of texts in words, and labels: that of a word on its first token, else none.

    >>> ids, labels = word_ids(tokenizer_of("bytes"), [["hi", "x"]], [[3, 4]], 4)
    >>> ids.tolist(), labels.tolist()
    ([[105, 106, 121, 0]], [[3, -100, 4, -100]])
    """
    ids = np.full((len(texts), length), tokenizer.pad_id, np.int32)
    found = np.full((len(texts), length), IGNORED, np.int64)
    for row, (words, own) in enumerate(zip(texts, labels, strict=True)):
        if len(words) != len(own):
            raise InvalidData(f"text {row} has {len(words)} words and {len(own)} labels")
        encode = tokenizer.encode_words or partial(_words_alone, tokenizer)
        tokens, word_of = encode(list(words))
        ids[row, : len(tokens[:length])] = tokens[:length]
        before = None
        for place, word in enumerate(word_of[:length]):
            if word is not None and word != before:
                found[row, place] = own[word]
            before = word
    return ids, found


def _words_alone(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
    pairs = [(one, i) for i, ids in enumerate(tokenizer.encode(words)) for one in ids]
    return [one for one, _ in pairs], [i for _, i in pairs]


def _words_of_tokenizers(given: Any, words: Sequence[str]) -> Any:
    found = given.encode(list(words), is_pretokenized=True)
    return found.ids, found.word_ids


def _words_of_transformers(given: Any, words: Sequence[str]) -> Any:
    found = given(list(words), is_split_into_words=True)
    return found["input_ids"], found.word_ids()


def token_windows(
    tokenizer: Tokenizer, texts: Sequence[str], length: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """All of the texts as windows of token ids, and the text of each; one token alone is none."""
    windows, owners = list[Sequence[int]](), list[int]()
    for begin in range(0, len(texts), AT_ONCE):
        for row, ids in enumerate(tokenizer.encode(texts[begin : begin + AT_ONCE]), begin):
            own = [ids[at : at + length] for at in range(0, len(ids), length)]
            own = [window for window in own if len(window) > 1]
            windows += own
            owners += [row] * len(own)
    found = np.full((len(windows), length), tokenizer.pad_id, np.int32)
    for row, window in enumerate(windows):
        found[row, : len(window)] = window
    return found, np.array(owners, np.int64)


def _ids(encoded: Any) -> Sequence[Sequence[int]]:
    """The ids in what a tokenizer returns; those of `transformers` return more."""
    found: Sequence[Sequence[int]] = (
        encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    )
    return found


def tokenizer_file(given: Any, folder: Path | None) -> Path | None:
    """The file that a data set names as its tokenizer: in its folder, else here."""
    if not isinstance(given, str | Path) or str(given) == BYTES:
        return None
    beside = (folder or Path()) / given
    return beside if beside.exists() else Path(given)


def _from_file(path: Path) -> Any:
    try:
        import tokenizers  # noqa: PLC0415 - an optional library
    except ModuleNotFoundError as error:
        raise DataNotFound(
            f"reading {path} needs the library tokenizers: pip install 'cocofl[data]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(read_limited(path, MOST_TOKENIZER_BYTES).decode())
    except OSError as error:
        raise DataNotFound(f"cannot read the tokenizer {path}: {error}") from error
    except Exception as error:  # the library's own, which has no type
        raise InvalidData(
            f"{path} is no tokenizer.json of Hugging Face's tokenizers: {str(error)[:200]}"
        ) from error
