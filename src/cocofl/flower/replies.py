"""Asking nodes, and waiting for their replies no longer than was said, whatever nodes do.

A reply can be seen before its parts have arrived, and a hostile node never delivers them. Flower
then waits for hours, with every reply behind this one. Here each look at a message has a thread of
its own: one that takes long keeps nobody waiting, and its pull ends with the round.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from functools import partial
from threading import Thread
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.superlink.grid import http_grid

_WAIT_SHARE, _LONGEST_POLL_S = 0.05, 0.5
# After so long a look goes on beside others; at the end there is little time left for them.
_PATIENCE_S, _LAST_PATIENCE_S = 0.5, 0.1
# Who came while others were looked at is not late: time for a last look at everybody.
_LAST_LOOK_S, _LOOKS_AT_ONCE = 1.0, 16
# What devices of ours send is a message, its records, and one or two of these.
_MOST_PARTS = 64
_PULL_BACKOFF_S, _LONGEST_PULL_BACKOFF_S = 0.05, 0.25

Reply = Message | Exception | None
"""What came back for a message; an exception if it cannot be read, None if nothing came."""

_pull_until: ContextVar[float] = ContextVar("_pull_until", default=math.inf)
"""When the pull of this thread has to end, by the monotonic clock."""


def _pull_in_time(
    object_ids: list[str], pull_object_fn: Callable[[str], bytes], **_settings: Any
) -> dict[str, bytes]:
    """Pull the parts of a reply until the round is over."""
    end = _pull_until.get()
    if len(object_ids) > _MOST_PARTS:
        raise ValueError(f"it has {len(object_ids)} parts; expected at most {_MOST_PARTS}")

    def pull(object_id: str) -> bytes:
        if time.monotonic() >= end:
            raise ObjectPullError(object_id, "it did not arrive in time")
        return pull_object_fn(object_id)

    return pull_objects(
        object_ids,
        pull,
        max_time=None,
        max_tries_per_object=None,
        initial_backoff=_PULL_BACKOFF_S,
        backoff_cap=_LONGEST_PULL_BACKOFF_S,
    )


# There is no setting for this: Flower's grid gives two hours, and waits seconds between tries.
http_grid.pull_objects = _pull_in_time  # type: ignore[attr-defined]


def ask(
    grid: Grid,
    messages: Sequence[Message],
    timeout_s: float = math.inf,
    poll_s: float = 0.1,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Reply]:
    """Send messages and wait for the replies, in the order of the messages.

    It returns at most :data:`_LAST_LOOK_S` and a moment after ``timeout_s``.
    """
    names = list(grid.push_messages(messages))
    begin = time.monotonic()
    looks = _Looks(grid, filter(None, names), begin + timeout_s)
    while looks.are_left:
        # A few at a time: a SuperLink that is asked about all of them all the time is busy with
        # that. All are needed, so it does not matter which one comes next.
        if looks.at_some(1 + len(looks.waiting) // _LOOKS_AT_ONCE):
            continue
        waited_s = time.monotonic() - begin
        if is_over() or waited_s >= timeout_s:
            looks.at_all_once_more()
            break
        longest_s = min(_WAIT_SHARE * waited_s, _LONGEST_POLL_S, timeout_s - waited_s)
        time.sleep(max(min(poll_s, timeout_s - waited_s), longest_s))
    return [looks.replies.get(name) for name in names]


class _Looks:
    """Looks at messages, and the replies that were found."""

    def __init__(self, grid: Grid, names: Iterable[str], end: float) -> None:
        self._grid = grid
        self._pull_until = end + _LAST_LOOK_S
        self.waiting = deque(names)
        """Messages that nobody is looking at."""
        self._under_way: dict[Future[Reply], str] = {}
        self.replies: dict[str, Reply] = {}

    @property
    def are_left(self) -> bool:
        """Whether there are messages without a reply."""
        return bool(self.waiting or self._under_way)

    def at_some(self, count: int) -> bool:
        """Look at the next few; whether there was a reply."""
        begun = self._begin(count)
        wait(begun or self._under_way, timeout=_PATIENCE_S)
        return self._settle()

    def at_all_once_more(self) -> None:
        """Look at each a last time, and let go of what takes too long."""
        end = time.monotonic() + _LAST_LOOK_S
        last, self.waiting = self.waiting, deque[str]()
        while (last or self._under_way) and (left_s := end - time.monotonic()) > 0:
            self.waiting.extend(last.popleft() for _ in range(min(len(last), _LOOKS_AT_ONCE)))
            begun = self._begin(len(self.waiting))
            wait(begun or self._under_way, timeout=min(left_s, _LAST_PATIENCE_S))
            self._settle()
            self.waiting.clear()  # there was nothing yet, and this was the last look

    def _begin(self, count: int) -> list[Future[Reply]]:
        begun = []
        for _ in range(min(count, len(self.waiting))):
            name = self.waiting.popleft()
            look = _in_thread(partial(_fetched, self._grid, name, self._pull_until))
            self._under_way[look] = name
            begun.append(look)
        return begun

    def _settle(self) -> bool:
        """Keep the replies that have come; whether there are any."""
        found = False
        for look in [look for look in self._under_way if look.done()]:
            name, reply = self._under_way.pop(look), look.result()
            if reply is None:
                self.waiting.append(name)
            else:
                self.replies[name], found = reply, True
        return found


def _in_thread(work: Callable[[], Reply]) -> Future[Reply]:
    """Do something in a thread that does not keep the process from ending."""
    future = Future[Reply]()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=do, name="look for a reply", daemon=True).start()
    return future


def _fetched(grid: Grid, name: str, until: float) -> Reply:
    """The reply to one message: one that cannot even be unpacked spoils no other."""
    _pull_until.set(until)
    try:
        return next(iter(grid.pull_messages([name])), None)
    except httpx.HTTPError:
        raise  # the SuperLink cannot be reached: that is no device's fault
    except Exception as error:
        return error
