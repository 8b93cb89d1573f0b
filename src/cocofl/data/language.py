"""Text data sets: one function each, from its origin to new samples; ``preset`` as in ``vision``.

IMDB's words are token ids of sentencepiece, by byte-pair encoding rather than its default: it
counts in integers, so the same text gives the same tokenizer with any number of threads and on any
machine, where the default's floating-point training does not; and it trains in 4 s instead of 50.

Shakespeare's are characters: windows of 80, each labelled with the character that follows. A role's
speech is cut once: windows of the first four fifths train, those of the rest test, and no window
reaches across the cut, so that no test character was seen in training (LEAF splits a role's samples
in time in the same way).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from cocofl.data.huggingface import Table, hub_table, local_tables, open_tables
from cocofl.data.origin import Origin, enough
from cocofl.data.samples import PARTS, Facts, NewSamples, number_owners
from cocofl.data.stable_random import Ints, draw_rows, hold_out
from cocofl.errors import DataNotFound, InvalidData

IMDB_NAMES = ("neg", "pos")
IMDB_VOCAB_SIZE = 16_000
IMDB_LENGTH = 512
PAD_ID = 0
ENCODE_ROWS = 2000
WINDOW = 80
TRAIN_FRACTION = 0.8
CHUNK_WINDOWS = 100_000

Codes = NDArray[np.uint8]
NewParts = dict[str, NewSamples]


@contextmanager
def imdb(origin: Origin, preset: str) -> Iterator[NewParts]:
    """``stanfordnlp/imdb`` as 512 token ids, from a tokenizer trained on the training text.

    The paper's preset pools all reviews and splits them 40 000 to 10 000.
    """
    with open_tables(origin, PARTS) as tables:
        texts = {part: table.strings(table.column("text")) for part, table in tables.items()}
        labels = {part: table.ints(table.column("label")) for part, table in tables.items()}
    if preset == "paper":
        pooled_texts = [*texts["train"], *texts["test"]]
        pooled_labels = np.concatenate([labels["train"], labels["test"]])
        n_train = enough(40_000, len(pooled_texts) - 1, "reviews", str(origin))
        rows = hold_out(len(pooled_texts), min(10_000, len(pooled_texts) - n_train), "imdb")
        texts = {part: [pooled_texts[row] for row in rows[part]] for part in PARTS}
        labels = {part: pooled_labels[rows[part]] for part in PARTS}
    tokenizer = train_tokenizer(texts["train"], IMDB_VOCAB_SIZE)
    facts = Facts("text", IMDB_NAMES, vocab_size=IMDB_VOCAB_SIZE, pad_id=PAD_ID)
    yield {
        part: NewSamples(
            facts,
            labels[part],
            (IMDB_LENGTH,),
            [token_ids(tokenizer, texts[part], IMDB_LENGTH)],
            dtype="uint16",
            tokenizer=tokenizer,
            where=f"{origin} ({part})",
        )
        for part in PARTS
    }


@contextmanager
def shakespeare(origin: Origin, preset: str) -> Iterator[NewParts]:
    """Windows of 80 characters with the next one as label, and the play each comes from.

    Local: a table of roles (play, speaker, text). On the Hub: ``flwrlabs/shakespeare``, LEAF's
    windows (character_id, x, y). The paper's preset draws 200 000 training and 50 000 test windows
    from the 25 plays with the most text.
    """
    with _shakespeare_table(origin) as table:
        if {"play", "text"} <= set(table.rows.column_names):
            plays, texts = table.strings("play"), table.strings("text")
        else:
            plays, texts = _roles_of_windows(table)
    alphabet = alphabet_of(texts)
    codes = encode("".join(texts), alphabet)
    lengths = [len(role_text) for role_text in texts]
    play_of_role, play_names = number_owners(plays)
    kept_plays = np.arange(len(play_names))
    if preset == "paper":
        n_kept = enough(25, len(play_names), "plays", str(origin))
        by_size = np.argsort(-np.bincount(play_of_role, weights=lengths), kind="stable")
        kept_plays = np.sort(by_size[:n_kept])
    facts = Facts(
        "text",
        tuple(alphabet),
        vocab_size=len(alphabet),
        owner_kind="play",
        owner_names=tuple(play_names[play] for play in kept_plays),
    )
    parts = {}
    for part, n_paper in (("train", 200_000), ("test", 50_000)):
        starts, roles = window_starts(lengths, part)
        rows = np.flatnonzero(np.isin(play_of_role[roles], kept_plays))
        if preset == "paper":
            enough(n_paper, len(rows), "windows", str(origin))
            rows = rows[draw_rows(len(rows), n_paper, f"shakespeare {part}")]
        starts = starts[rows]
        parts[part] = NewSamples(
            facts,
            codes[starts + WINDOW].astype(np.int64),
            (WINDOW,),
            windows(codes, starts),
            owners=np.searchsorted(kept_plays, play_of_role[roles[rows]]),
        )
    yield parts


# --- IMDB ----------------------------------------------------------------------------------------


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


def token_ids(tokenizer: bytes, texts: Sequence[str], length: int) -> NDArray[np.uint16]:
    """Token ids (texts, length): longer texts are cut, shorter ones padded at the end."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    ids = np.full((len(texts), length), PAD_ID, np.uint16)
    for begin in range(0, len(texts), ENCODE_ROWS):
        encoded = processor.encode(list(texts[begin : begin + ENCODE_ROWS]))
        for row, tokens in enumerate(encoded, begin):
            kept = tokens[:length]
            ids[row, : len(kept)] = kept
    return ids


# --- Shakespeare ---------------------------------------------------------------------------------


@contextmanager
def _shakespeare_table(origin: Origin) -> Iterator[Table]:
    if origin.folder is None:
        yield hub_table(origin.hub, "train")
        return
    for pattern in ("roles*.parquet", "train*.parquet", "shakespeare*.csv"):
        if files := sorted(origin.folder.rglob(pattern)):
            with local_tables(all=files) as tables:
                yield tables["all"]
            return
    raise DataNotFound(
        f"{origin.folder} has neither roles.parquet (play, speaker, text) nor shakespeare.csv "
        "(character_id, x, y) as in flwrlabs/shakespeare on the Hub"
    )


def _roles_of_windows(table: Table) -> tuple[list[str], list[str]]:
    """Put the roles' texts together again from LEAF's windows, which advance by one character."""
    roles = np.array(table.strings(table.column("character_id")))
    next_characters = table.strings(table.column("y"))
    firsts = np.flatnonzero(np.concatenate([[True], roles[1:] != roles[:-1]]))
    stops = np.concatenate([firsts[1:], [len(roles)]])
    opening = table.take(firsts).strings(table.column("x"))
    texts = [
        window + "".join(next_characters[first:stop])
        for window, first, stop in zip(opening, firsts, stops, strict=True)
    ]
    for first, stop, role_text in zip(firsts, stops, texts, strict=True):
        # Every 80th window covers all of the text, and is a fraction of all windows to read.
        rows = np.arange(first, stop, WINDOW)
        for row, window in zip(rows - first, table.take(rows).strings("x"), strict=True):
            if role_text[row : row + len(window)] != window:
                raise InvalidData(
                    f"{table.where}: the windows of {roles[first]} do not follow each other "
                    f"character by character before row {first + row}, as they do in LEAF's"
                )
    return [play_of(str(roles[first])) for first in firsts], texts


def play_of(character_id: str) -> str:
    """The play in LEAF's name of a role, which is the play's title and then the role's name.

    >>> play_of("THE_TRAGEDY_OF_KING_LEAR_GLOUCESTER")
    'king_lear'
    """
    plain = character_id.lower()
    found = [(plain.index(title), title) for title in PLAYS if title in plain]
    if not found:
        raise InvalidData(f"{character_id!r} names none of the {len(PLAYS)} plays")
    return min(found)[1]


# Enough of each title to know it by.
PLAYS = (
    "all_s_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus",
    "cymbeline", "hamlet", "first_part_of_king_henry_the_fourth", "second_part_of_king_henry_iv",
    "king_henry_the_fifth", "first_part_of_henry_the_sixth", "second_part_of_king_henry_the_sixth",
    "third_part_of_king_henry_the_sixth", "king_henry_the_eighth", "king_john", "julius_caesar",
    "king_lear", "love_s_labour_s_lost", "macbeth", "measure_for_measure", "merchant_of_venice",
    "merry_wives", "midsummer_night_s_dream", "much_ado", "othello", "pericles",
    "king_richard_the_second", "king_richard_iii", "romeo_and_juliet", "taming_of_the_shrew",
    "tempest", "timon_of_athens", "titus_andronicus", "troilus_and_cressida", "twelfth_night",
    "two_gentlemen_of_verona", "winter_s_tale",
)  # fmt: skip


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


def window_starts(lengths: Sequence[int], part: str) -> tuple[Ints, Ints]:
    """Where the windows of one part begin in the concatenated texts, and which text each is from.

    >>> [values.tolist() for values in window_starts([105, 10, 405], "test")]
    [[439], [2]]
    """
    starts, sources = [], []
    begin = 0
    for source, length in enumerate(lengths):
        cut = int(length * TRAIN_FRACTION)
        first, last = (0, cut) if part == "train" else (cut, length)
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
