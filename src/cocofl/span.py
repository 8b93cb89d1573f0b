"""The central value: which contiguous blocks a device trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from cocofl.errors import InvalidSpan


class Role(Enum):
    """What a block does under a span (the paper's types a, b and c)."""

    FROZEN = "frozen"
    """Before the span: forward only, nothing is kept for a backward pass."""
    TRAINED = "trained"
    """Inside the span: float32, trained, uploaded."""
    PASSING = "passing"
    """After the span: frozen, but gradients pass through it."""


@dataclass(frozen=True, order=True)
class Span:
    """Blocks ``start:stop`` are trained; every other block is frozen.

    >>> Span(2, 4).role(1), Span(2, 4).role(2), Span(2, 4).role(4)
    (<Role.FROZEN: 'frozen'>, <Role.TRAINED: 'trained'>, <Role.PASSING: 'passing'>)
    >>> Span.parse("2:4")
    Span(start=2, stop=4)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidSpan(
                f"span {self.start}:{self.stop} trains no block; "
                "a span needs 0 <= start < stop, like 2:4 for blocks 2 and 3"
            )

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.stop

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read ``start:stop`` as printed by ``str(span)``."""
        start, colon, stop = text.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal()):
            raise InvalidSpan(f"cannot read {text!r} as a span; expected start:stop, like 2:4")
        return cls(int(start), int(stop))

    def check_fits(self, n_blocks: int) -> None:
        """Raise :class:`InvalidSpan` unless a chain of ``n_blocks`` blocks has all of this span."""
        if self.stop > n_blocks:
            raise InvalidSpan(
                f"span {self} reaches past the last block: the chain has {n_blocks} blocks, "
                f"so the largest span is 0:{n_blocks}"
            )

    def role(self, block: int) -> Role:
        """What ``block`` does when this span is trained."""
        if block < self.start:
            return Role.FROZEN
        return Role.TRAINED if block < self.stop else Role.PASSING

    def is_subset_of(self, other: Span) -> bool:
        """Whether every block of this span is also trained by ``other``."""
        return other.start <= self.start and self.stop <= other.stop


def all_spans(n_blocks: int) -> Iterator[Span]:
    """Every contiguous span of a chain, N(N+1)/2 of them.

    >>> [str(span) for span in all_spans(3)]
    ['0:1', '0:2', '0:3', '1:2', '1:3', '2:3']
    """
    return (Span(start, stop) for start, stop in combinations(range(n_blocks + 1), 2))
