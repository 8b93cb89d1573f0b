"""One collection of an executor, without a round around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cocofl.engine.executor import Executor, RoundPlan
from cocofl.fl.state import Contribution, ServerState
from cocofl.fl.trainer import Task


def collected(
    executor: Executor, tasks: Sequence[Task], state: ServerState
) -> Iterator[Contribution]:
    """What devices send; each is good until the next is asked for."""
    answers = executor.collect(RoundPlan(0, 0.1, tasks), state)
    return (one.sent for one in answers if isinstance(one.sent, Contribution))
