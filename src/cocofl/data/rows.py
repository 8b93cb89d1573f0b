"""Which rows of a table belong to a split, and who owns them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cocofl.data.stable_random import Ints, shuffled
from cocofl.errors import InvalidData
from cocofl.rng import stream


def hold_out(n_samples: int, n_test: int, purpose: str) -> dict[str, Ints]:
    """Rows of a train and a test split drawn from one table, each in the table's order."""
    test = draw_rows(n_samples, n_test, f"hold out {purpose}")
    return {"train": np.setdiff1d(np.arange(n_samples), test), "test": test}


def draw_rows(n_rows: int, n_drawn: int, purpose: str) -> Ints:
    """Some rows at random, in the table's order.

    The seed is fixed: a preset belongs to the data set, not to an experiment.
    """
    return np.sort(shuffled(np.arange(n_rows), stream(0, f"draw {purpose}"))[:n_drawn])


def enough(n_wanted: int, n_found: int, what: str, where: str) -> int:
    """``n_wanted``, or an error when a preset asks for more than there is."""
    if n_found < n_wanted:
        raise InvalidData(
            f"the paper's preset takes {n_wanted} {what}, but {where} has {n_found}; "
            'use preset = "standard" for all there is'
        )
    return n_wanted


def owners(names: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Owners as numbers, and the name behind each number."""
    unique, codes = np.unique(np.array(names), return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in unique)
