"""The classifier beside a span: what it costs to train the last block, too.

A table made with ``cocofl profile --head`` says it. From a table of spans alone it is derived:
what the last block adds when it is trained instead of passed through is there to see, in the spans
that reach it and those that end just before it.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from cocofl.errors import TableMismatch
from cocofl.profiling.table import ProfileTable, spans_with_head
from cocofl.span import Blocks, Span, all_spans


def spans_alone(table: ProfileTable) -> ProfileTable:
    """The table of all spans."""
    wanted = list(all_spans(table.n_blocks))
    if any(span not in table for span in wanted):
        raise TableMismatch(
            f"{table.name} has spans with the classifier beside them only; set strategy.head = "
            "true, or give a table made without --head"
        )
    return table if len(table) == len(wanted) else table.only(wanted)


def beside_head(table: ProfileTable) -> ProfileTable:
    """The table of all spans with the last block beside them.

    What is not in the table is derived from the rows of spans. Time grows by what training the
    last block adds in the median, if that can be seen at all: a linear layer is soon lost in the
    noise of a measurement. Memory, a peak, grows by the most that it ever adds, but not
    beyond that of training everything up to the last block: it errs on the high side. Uploads add
    up.
    """
    wanted = spans_with_head(table.n_blocks)
    if all(blocks in table for blocks in wanted):
        return table.only(wanted)
    spans_alone(table)  # refuses a table that has neither
    n = table.n_blocks
    reaching = np.array([table.row(Span(i, n)) for i in range(n - 1)])
    before = np.array([table.row(Span(i, n - 1)) for i in range(n - 1)])
    more_time = max(0.0, statistics.median((reaching - before)[:, 0].tolist()))
    more_memory = max(0.0, float((reaching - before)[:, 1].max()))
    upload_of_head = table.row(Span(n - 1, n))[2]

    def row(blocks: Blocks) -> tuple[float, float, float]:
        span = blocks.spans[0]
        time, memory, upload = table.row(span)
        if span == blocks:
            return time, memory, upload
        most = max(memory, table.row(Span(min(span), n))[1])
        return time + more_time, min(memory + more_memory, most), upload + upload_of_head

    time, memory, upload = np.array([row(blocks) for blocks in wanted]).T
    return replace(
        table,
        configurations=tuple(wanted),
        time=time,
        memory=memory,
        upload=upload,
        costs=(),
        name=f"{table.name}, the classifier's part derived",
    )
