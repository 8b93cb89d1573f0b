"""How states, requests and contributions become Flower's records, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid
from torch import Tensor

from cocofl.errors import RejectedUpdate
from cocofl.fl.merge import Contribution, State
from cocofl.runlog import state_bytes, state_from_bytes

STATE, REQUEST, UPDATE, ABOUT = "state", "request", "update", "about"
_BYTES = "cocofl.bytes"
_WAIT_SHARE, _LONGEST_POLL_S = 0.05, 0.5

# A reply can be seen before all parts of it have arrived. Flower then waits a second before it
# looks again, with every reply behind this one; there is no setting for it.
vars(http_grid)["pull_objects"] = partial(pull_objects, initial_backoff=0.05)

Settings = dict[str, Any]
Reply = Message | Exception | None
"""What came back for a message; an exception if it cannot be read, None if nothing came."""


def state_record(state: Mapping[str, Tensor]) -> ArrayRecord:
    """A state as one array of bytes, a safetensors file.

    Flower fetches every array with a request of its own: one array per tensor kept a SuperLink
    busy for seconds in every round.
    """
    return _bytes_record(STATE, state_bytes(state))


def state_of(record: ArrayRecord) -> State:
    """The state again."""
    return state_from_bytes(record[STATE].data)


def _bytes_record(name: str, payload: bytes) -> ArrayRecord:
    return ArrayRecord({name: Array("uint8", (len(payload),), _BYTES, payload)})


def request(state: ArrayRecord, settings: Mapping[str, Any]) -> RecordDict:
    """What a device is sent: the server's state, and how to train."""
    return RecordDict({STATE: state, REQUEST: ConfigRecord({"json": json.dumps(settings)})})


def read_request(message: Message) -> tuple[State, Settings]:
    """What the server sent."""
    settings: Settings = json.loads(str(message.content.config_records[REQUEST]["json"]))
    return state_of(message.content.array_records[STATE]), settings


# --- replies of devices that nobody trusts -------------------------------------------------------


def update_reply(payload: bytes) -> RecordDict:
    """An update that is bytes already; none of them for a device that sits the round out."""
    return RecordDict({UPDATE: _bytes_record(UPDATE, payload) if payload else ArrayRecord()})


def read_update(message: Message) -> bytes:
    """The bytes of an update, empty if the device sits out; any other form is refused."""
    if message.has_error():
        raise RejectedUpdate("failed", f"the device could not: {message.error.reason:.300}")
    content = message.content
    records = content.array_records.get(UPDATE)
    if records is None or set(content) != {UPDATE} or set(records) - {UPDATE}:
        raise RejectedUpdate("format", f"the reply holds {sorted(content)!r:.200}; expected update")
    if not records:
        return b""
    array = records[UPDATE]
    if array.stype != _BYTES or not isinstance(array.data, bytes) or not array.data:
        raise RejectedUpdate("format", f"the update is {array.stype!r:.40}; expected {_BYTES}")
    return array.data


# --- replies of our own processes ----------------------------------------------------------------


def contribution_reply(contribution: Contribution) -> RecordDict:
    """Whatever a device of any strategy sends, with every tensor under its name."""
    about = {
        "samples": contribution.samples,
        "loss": contribution.loss,
        "width": contribution.width,
        "rows": {key: rows.tolist() for key, rows in contribution.rows.items()},
    }
    return RecordDict(
        {
            STATE: state_record(contribution.tensors),
            ABOUT: ConfigRecord({"json": json.dumps(about)}),
        }
    )


def read_contribution(message: Message) -> Contribution:
    """The contribution again, to the bit."""
    about = json.loads(str(message.content.config_records[ABOUT]["json"]))
    about["rows"] = {key: np.array(rows, np.int64) for key, rows in about["rows"].items()}
    return Contribution(state_of(message.content.array_records[STATE]), **about)


# --- asking --------------------------------------------------------------------------------------


def ask(
    grid: Grid,
    messages: Sequence[Message],
    timeout_s: float | None = None,
    poll_s: float = 0.1,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Reply]:
    """Send messages and wait for the replies, in the order of the messages.

    Each reply is fetched by itself, so that one that cannot even be unpacked spoils no other.
    """
    ids = list(grid.push_messages(messages))
    replies: list[Reply] = [None] * len(messages)
    open_ids = {message_id: index for index, message_id in enumerate(ids) if message_id}
    begin = time.monotonic()
    end = begin + (float("inf") if timeout_s is None else timeout_s)
    while open_ids:
        asked = time.monotonic()
        for message_id, index in list(open_ids.items()):
            for reply in _fetched(grid, message_id):
                replies[index] = reply
                open_ids.pop(message_id, None)
        if not open_ids or time.monotonic() >= end or is_over():
            break
        # Asking about many nodes must not keep the SuperLink from serving them.
        now = time.monotonic()
        time.sleep(max(poll_s, now - asked, min(_WAIT_SHARE * (now - begin), _LONGEST_POLL_S)))
    return replies


def _fetched(grid: Grid, message_id: str) -> Iterator[Reply]:
    try:
        yield from grid.pull_messages([message_id])
    except httpx.HTTPError:
        raise  # the SuperLink cannot be reached: that is no device's fault
    except Exception as error:
        yield error
