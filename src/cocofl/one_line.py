"""Text that somebody else wrote, made fit for a log or a table."""

from __future__ import annotations

MOST_CHARACTERS = 300


def one_line(text: object, at_most: int = MOST_CHARACTERS) -> str:
    """A text on one line of bounded length, without anything that moves a cursor or hides.

    What a device sends is data: it can neither begin a line of the server's log nor fill the disk.

    >>> one_line("it burns\\nround 7: 3 merged\\x1b[2J")
    'it burns\\\\nround 7: 3 merged\\\\x1b[2J'
    >>> one_line("abcdef", at_most=4)
    'abc…'
    """
    whole = str(text)
    shown = "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii")
        for sign in whole[: at_most + 1]
    )
    return shown if len(shown) <= at_most else f"{shown[: at_most - 1]}…"
