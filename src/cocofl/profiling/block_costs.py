"""What any set of blocks costs, by a table of spans.

A table has spans. What a block adds when it is trained instead of passed through is there to see,
as the difference of two spans that begin alike and end before and after it. A set with gaps costs
what its first block alone does, and what each other one adds. It errs on the high side: a
difference that noise made negative counts as none, and no set costs more than the span around it.
Uploads add up.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cocofl.profiling.table import Floats, ProfileTable, spans_alone
from cocofl.span import Blocks, Span


class BlockCosts:
    """Time, memory and upload of sets of blocks, as fractions of training everything.

    Of spans they are the table's own.
    """

    def __init__(self, table: ProfileTable) -> None:
        self.table, n = spans_alone(table), table.n_blocks
        self._spans = np.zeros((n, n + 1, 3))
        for span, row in zip(self.table.spans, self._rows(), strict=True):
            self._spans[min(span), max(span) + 1] = row
        self._more = np.zeros((n, n, 3))
        """By first block and block, what that adds; of the first, what it costs alone."""
        for first in range(n):
            steps = np.diff(self._spans[first, first:], axis=0)
            self._more[first, first:] = np.maximum(steps, 0)

    def _rows(self) -> Floats:
        return np.stack([self.table.time, self.table.memory, self.table.upload], 1)

    def of(self, blocks: Iterable[int]) -> Floats:
        """Time, memory and upload of training these blocks."""
        chosen = sorted(blocks)
        first, last = chosen[0], chosen[-1]
        found = self._more[first, chosen].sum(0)
        upload = sum(self._spans[block, block + 1, 2] for block in chosen)
        around = self._spans[first, last + 1]
        time, memory = np.minimum(found, around)[:2]
        return np.array([time, memory, upload if len(chosen) <= last - first else around[2]])

    def expected_time(self, share: float) -> float:
        """Of sets that each block is in with this probability, none of them empty."""
        n = self.table.n_blocks
        at_first = share * (1 - share) ** np.arange(n)
        others = [share * self._more[i, i + 1 :, 0].sum() for i in range(n)]
        alone = self._more[np.arange(n), np.arange(n), 0]
        return float((at_first * (alone + others)).sum() / at_first.sum())


def blocks_of(numbers: Iterable[int]) -> Blocks:
    """A set of blocks from their numbers.

    >>> blocks_of([4, 0, 1])
    Blocks('0:2+4:5')
    """
    found = [Span(number, number + 1) for number in sorted(numbers)]
    return Blocks.parse("+".join(map(str, found)))
