"""Text as token ids: the adapter to sentencepiece.

Byte-pair encoding rather than sentencepiece's default: it counts in integers, so the same text
gives the same tokenizer with any number of threads and on any machine, where the default's
floating-point training does not; and it trains on IMDB in 4 s instead of 50.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from cocofl.errors import InvalidData

PAD_ID = 0
ENCODE_ROWS = 2000


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> bytes:
    """A sentencepiece model of exactly ``vocab_size`` pieces; id 0 is padding, 1 unknown."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # Longer texts than this would be left out silently; a review has up to 14 000 bytes.
            max_sentence_length=2**20,
            pad_id=PAD_ID,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise InvalidData(
            f"{len(texts)} texts do not give a tokenizer of {vocab_size} pieces: {error}"
        ) from error
    return model.getvalue()


def encode(tokenizer: bytes, texts: Sequence[str], length: int) -> NDArray[np.uint16]:
    """Token ids (texts, length): longer texts are cut, shorter ones padded at the end."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    ids = np.full((len(texts), length), PAD_ID, np.uint16)
    for begin in range(0, len(texts), ENCODE_ROWS):
        encoded = processor.encode(list(texts[begin : begin + ENCODE_ROWS]))
        for row, tokens in enumerate(encoded, begin):
            kept = tokens[:length]
            ids[row, : len(kept)] = kept
    return ids


def decode(tokenizer: bytes, ids: NDArray[np.integer]) -> str:
    """The text that token ids stand for, without the padding."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    return str(processor.decode([int(token) for token in ids if token != PAD_ID]))
