"""A line for whoever waits: what takes so long, while it does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

logger = logging.getLogger(__name__)
LONG_S = 2.0
"""After so long a person wants to know."""


@contextmanager
def told_if_long(doing: str, spent_s: float = 0.0) -> Iterator[None]:
    """Say what is being done once it takes long, with what was spent on it before."""
    timer = Timer(max(0.0, LONG_S - spent_s), logger.warning, [doing])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
