"""What a device may train, sets of blocks or a width, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from cocofl.span import Blocks

Configuration = Blocks | float


class Cost(NamedTuple):
    """What one configuration costs; ``rss_bytes`` is None where it was not measured."""

    step_s: float
    rss_bytes: int | None
    tensor_bytes: int
    upload_bytes: int


def joined(blocks: Sequence[int]) -> Blocks:
    """Single blocks as one set."""
    return Blocks.parse("+".join(f"{block}:{block + 1}" for block in blocks))


def spans_over(learning: Sequence[int]) -> list[Blocks]:
    """What spans come to where only these blocks have something to learn, each once.

    >>> [str(blocks) for blocks in spans_over([1, 3])]
    ['1:2', '1:2+3:4', '3:4']
    """
    ends = combinations(range(len(learning) + 1), 2)
    return sorted(joined(learning[start:stop]) for start, stop in ends)


def spans_with_head(learning: Sequence[int]) -> list[Blocks]:
    """Every span with the last block, the classifier, beside it or in it.

    >>> [str(blocks) for blocks in spans_with_head(range(3))]
    ['0:1+2:3', '0:3', '1:3', '2:3']
    """
    head = joined(learning[-1:])
    return sorted({span | head for span in spans_over(learning)})
