"""Text data sets: one function each, from its origin to drafts; ``preset`` as in ``vision``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from cocofl.data import characters, text
from cocofl.data.huggingface import Table, hub_table, local_tables, open_tables
from cocofl.data.origin import Origin
from cocofl.data.rows import draw_rows, enough, hold_out, owners
from cocofl.data.split_facts import SPLITS, Draft, Facts
from cocofl.data.stable_random import Ints
from cocofl.errors import DataNotFound, InvalidData

IMDB_NAMES = ("neg", "pos")
IMDB_VOCAB_SIZE = 16_000
IMDB_LENGTH = 512

Drafts = dict[str, Draft]


@contextmanager
def imdb(origin: Origin, preset: str) -> Iterator[Drafts]:
    """``stanfordnlp/imdb`` as 512 token ids, from a tokenizer trained on the training text.

    The paper's preset pools all reviews and splits them 40 000 to 10 000.
    """
    with open_tables(origin, SPLITS) as tables:
        texts = {split: table.strings(table.column("text")) for split, table in tables.items()}
        labels = {split: table.ints(table.column("label")) for split, table in tables.items()}
    if preset == "paper":
        pooled_texts = [*texts["train"], *texts["test"]]
        pooled_labels = np.concatenate([labels["train"], labels["test"]])
        n_train = enough(40_000, len(pooled_texts) - 1, "reviews", str(origin))
        rows = hold_out(len(pooled_texts), min(10_000, len(pooled_texts) - n_train), "imdb")
        texts = {split: [pooled_texts[row] for row in rows[split]] for split in SPLITS}
        labels = {split: pooled_labels[rows[split]] for split in SPLITS}
    tokenizer = text.train_tokenizer(texts["train"], IMDB_VOCAB_SIZE)
    facts = Facts("text", IMDB_NAMES, vocab_size=IMDB_VOCAB_SIZE, pad_id=text.PAD_ID)
    yield {
        split: Draft(
            facts,
            labels[split],
            (IMDB_LENGTH,),
            [text.encode(tokenizer, texts[split], IMDB_LENGTH)],
            dtype="uint16",
            tokenizer=tokenizer,
            where=f"{origin} ({split})",
        )
        for split in SPLITS
    }


@contextmanager
def shakespeare(origin: Origin, preset: str) -> Iterator[Drafts]:
    """Windows of 80 characters with the next one as label, and the play each comes from.

    Local: a table of roles (play, speaker, text). On the Hub: ``flwrlabs/shakespeare``, LEAF's
    windows (character_id, x, y). The paper's preset draws 200 000 training and 50 000 test windows
    from the 25 plays with the most text.
    """
    with _shakespeare_table(origin) as table:
        plays, texts = _roles(table) if table.has("play", "text") else _roles_of_windows(table)
    alphabet = characters.alphabet_of(texts)
    codes = characters.encode("".join(texts), alphabet)
    lengths = [len(role_text) for role_text in texts]
    play_of_role, play_names = owners(plays)
    kept_plays = np.arange(len(play_names))
    if preset == "paper":
        kept_plays = _largest_plays(play_of_role, lengths, str(origin))
    facts = Facts(
        "text",
        tuple(alphabet),
        vocab_size=len(alphabet),
        owner_kind="play",
        owner_names=tuple(play_names[play] for play in kept_plays),
    )
    drafts = {}
    for split, n_paper in (("train", 200_000), ("test", 50_000)):
        starts, roles = characters.window_starts(lengths, split)
        rows = np.flatnonzero(np.isin(play_of_role[roles], kept_plays))
        if preset == "paper":
            enough(n_paper, len(rows), "windows", str(origin))
            rows = rows[draw_rows(len(rows), n_paper, f"shakespeare {split}")]
        starts = starts[rows]
        drafts[split] = Draft(
            facts,
            codes[starts + characters.WINDOW].astype(np.int64),
            (characters.WINDOW,),
            characters.windows(codes, starts),
            owners=np.searchsorted(kept_plays, play_of_role[roles[rows]]),
        )
    yield drafts


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


def _roles(table: Table) -> tuple[list[str], list[str]]:
    return table.strings("play"), table.strings("text")


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
        rows = np.arange(first, stop, characters.WINDOW)
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


def _largest_plays(play_of_role: Ints, lengths: Sequence[int], where: str) -> Ints:
    n_characters = np.bincount(play_of_role, weights=lengths)
    n_kept = enough(25, len(n_characters), "plays", where)
    return np.sort(np.argsort(-n_characters, kind="stable")[:n_kept])
