"""The central value: which blocks a device trains, and what that makes of the others."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from enum import Enum
from functools import total_ordering
from itertools import combinations, groupby
from typing import NamedTuple

from cocofl.errors import InvalidSpan

MOST_BLOCKS = 1024
"""Of a chain that a file tells of: what it says of each span must fit in memory."""


class Role(Enum):
    """What a block does while others are trained (the paper's types a, b and c)."""

    FROZEN = "frozen"
    """Before all that is trained: forward only, nothing is kept for a backward pass."""
    TRAINED = "trained"
    """Trained: float32, uploaded."""
    PASSING = "passing"
    """Frozen after something that is trained: gradients pass through it."""


class Region(NamedTuple):
    """Consecutive blocks of one role."""

    blocks: range
    role: Role


@total_ordering
class Blocks:
    """The blocks that a device trains: one :class:`Span`, or several with frozen ones between.

    >>> blocks = Span(2, 4) | Span(19, 20)
    >>> blocks, list(blocks), 3 in blocks, 4 in blocks
    (Blocks('2:4+19:20'), [2, 3, 19], True, False)
    >>> Blocks("2:3+3:4") == Span(2, 4)
    True
    >>> [(region.blocks, region.role.value) for region in Span(1, 2).regions(4)]
    [(range(0, 1), 'frozen'), (range(1, 2), 'trained'), (range(2, 4), 'passing')]
    """

    __slots__ = ("_runs",)
    _runs: tuple[tuple[int, int], ...]

    def __init__(self, text: str) -> None:
        """Read what ``str`` prints: ``start:stop``, and more of these behind a plus."""
        self._runs = _joined(_run(part, text) for part in text.split("+"))

    @classmethod
    def parse(cls, text: str) -> Blocks:
        """Read what ``str`` prints; a :class:`Span` where it is one."""
        found = Blocks(text)
        return found.spans[0] if len(found._runs) == 1 else found

    @property
    def spans(self) -> tuple[Span, ...]:
        """The runs of consecutive blocks, in order."""
        return tuple(Span(start, stop) for start, stop in self._runs)

    def __str__(self) -> str:
        return "+".join(f"{start}:{stop}" for start, stop in self._runs)

    def __repr__(self) -> str:
        return f"Blocks({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        return (block for start, stop in self._runs for block in range(start, stop))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._runs)

    def __contains__(self, block: int) -> bool:
        return any(start <= block < stop for start, stop in self._runs)

    def __or__(self, other: Blocks) -> Blocks:
        return Blocks.parse(f"{self}+{other}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(self._runs)

    def __lt__(self, other: Blocks) -> bool:
        return self._runs < other._runs

    def only(self, wanted: Container[int]) -> Blocks | None:
        """Those of the blocks that are wanted; None where none is.

        >>> Span(0, 4).only([1, 3]), Span(0, 2).only([3])
        (Blocks('1:2+3:4'), None)
        """
        found = [f"{block}:{block + 1}" for block in self if block in wanted]
        return Blocks.parse("+".join(found)) if found else None

    def check_fits(self, n_blocks: int) -> None:
        """Raise :class:`InvalidSpan` unless a chain of ``n_blocks`` blocks has all of these."""
        if self._runs[-1][1] > n_blocks:
            raise InvalidSpan(
                f"span {self} reaches past the last block: the chain has {n_blocks} blocks, "
                f"so the largest span is 0:{n_blocks}"
            )

    def role(self, block: int) -> Role:
        """What ``block`` does when these are trained."""
        if block in self:
            return Role.TRAINED
        return Role.FROZEN if block < self._runs[0][0] else Role.PASSING

    def roles(self, n_blocks: int) -> list[Role]:
        """What each block of a chain does."""
        return [self.role(block) for block in range(n_blocks)]

    def regions(self, n_blocks: int) -> list[Region]:
        """The chain as runs of blocks that do the same, in order."""
        runs = [(role, list(blocks)) for role, blocks in groupby(range(n_blocks), self.role)]
        return [Region(range(blocks[0], blocks[-1] + 1), role) for role, blocks in runs]


class Span(Blocks):
    """Blocks ``start:stop`` are trained; every other block is frozen.

    >>> Span(2, 4).role(1), Span(2, 4).role(2), Span(2, 4).role(4)
    (<Role.FROZEN: 'frozen'>, <Role.TRAINED: 'trained'>, <Role.PASSING: 'passing'>)
    >>> Span.parse("2:4")
    Span(2, 4)
    """

    __slots__ = ()

    def __init__(self, start: int, stop: int) -> None:
        self._runs = _joined([(start, stop)])

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read ``start:stop``; :class:`Blocks` reads several."""
        found = Blocks.parse(text)
        if not isinstance(found, Span):
            raise InvalidSpan(f"{text!r} has blocks apart; expected one span, like 2:4")
        return found

    @property
    def start(self) -> int:
        """The first block."""
        return self._runs[0][0]

    @property
    def stop(self) -> int:
        """The block after the last."""
        return self._runs[0][1]

    def __repr__(self) -> str:
        return f"Span({self.start}, {self.stop})"


def _run(part: str, text: str) -> tuple[int, int]:
    start, colon, stop = part.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and len(part) < 40):
        raise InvalidSpan(
            f"cannot read {text[:60]!r} as a span; expected start:stop, like 2:4, or several like "
            "2:4+19:20"
        )
    return int(start), int(stop)


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """In order, with those that meet made one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if not 0 <= start < stop:
            raise InvalidSpan(
                f"span {start}:{stop} trains no block; "
                "a span needs 0 <= start < stop, like 2:4 for blocks 2 and 3"
            )
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def all_spans(n_blocks: int) -> Iterator[Span]:
    """Every contiguous span of a chain, N(N+1)/2 of them.

    >>> [str(span) for span in all_spans(3)]
    ['0:1', '0:2', '0:3', '1:2', '1:3', '2:3']
    """
    return (Span(start, stop) for start, stop in combinations(range(n_blocks + 1), 2))
