"""How states, requests and contributions become Flower's records, and back."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from torch import Tensor

from cocofl.data import DataSet, Split
from cocofl.errors import RejectedUpdate
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.runlog import state_bytes, state_from_bytes

STATE, REQUEST, UPDATE, ABOUT = "state", "request", "update", "about"
_WAIT_SHARE, _LONGEST_POLL_S = 0.05, 0.5

# A reply can be seen before all parts of it have arrived. Flower then waits a second before it
# looks again, with every reply behind this one; there is no setting for it but this.
assert pull_objects.__kwdefaults__ is not None
pull_objects.__kwdefaults__["initial_backoff"] = 0.05

Settings = dict[str, Any]
Reply = Message | Exception | None
"""What came back for a message; an exception if it cannot be read, None if nothing came."""


def state_record(state: Mapping[str, Tensor]) -> ConfigRecord:
    """A state as one value, a safetensors file.

    Flower moves every part of a message with a request of its own, and an array is three of them:
    with one array per tensor a SuperLink was busy for seconds in every round.
    """
    return ConfigRecord({STATE: state_bytes(state)})


def _state_of(content: RecordDict) -> Tensors:
    payload = content.config_records[STATE][STATE]
    assert isinstance(payload, bytes)
    return state_from_bytes(payload)


def request(state: ConfigRecord, settings: Mapping[str, Any]) -> RecordDict:
    """What a device is sent: the server's state, and how to train."""
    return RecordDict({STATE: state, REQUEST: ConfigRecord({"json": json.dumps(settings)})})


def read_request(message: Message) -> tuple[Tensors, Settings]:
    """What the server sent."""
    settings: Settings = json.loads(str(message.content.config_records[REQUEST]["json"]))
    return _state_of(message.content), settings


# --- what devices must know of the server's data, so that theirs means the same -----------------
# One may lack classes, and its pictures may be darker: labels and normalisation are the server's.


def shared_facts(dataset: DataSet) -> dict[str, Any]:
    """What the server tells devices about the data."""
    facts = dataset.facts
    return {
        "class_names": list(facts.class_names),
        "mean": list(facts.mean),
        "std": list(facts.std),
    }


def with_shared_facts(dataset: DataSet, facts: Mapping[str, Any]) -> DataSet:
    """A device's data, read as the server's is."""
    names, mean, std = (tuple(facts[name]) for name in ("class_names", "mean", "std"))

    def read_alike(split: Split) -> Split:
        alike = replace(split.facts, class_names=names, mean=mean, std=std)
        return replace(split, facts=alike)

    return replace(dataset, train=read_alike(dataset.train), test=read_alike(dataset.test))


# --- replies of devices that nobody trusts -------------------------------------------------------


def update_reply(payload: bytes) -> RecordDict:
    """An update that is bytes already; none of them for a device that sits the round out."""
    return RecordDict({UPDATE: ConfigRecord({UPDATE: payload} if payload else {})})


def read_update(message: Message) -> bytes:
    """The bytes of an update, empty if the device sits out; any other form is refused."""
    if message.has_error():
        raise RejectedUpdate("failed", f"the device could not: {message.error.reason:.300}")
    content = message.content
    record = content.config_records.get(UPDATE)
    if record is None or set(content) != {UPDATE} or set(record) - {UPDATE}:
        raise RejectedUpdate("format", f"the reply holds {sorted(content)!r:.200}; expected update")
    if not record:
        return b""
    payload = record[UPDATE]
    if not isinstance(payload, bytes) or not payload:
        raise RejectedUpdate("format", f"the update is {payload!r:.40}; expected bytes")
    return payload


# --- replies of our own processes ----------------------------------------------------------------


def contribution_reply(contribution: Contribution) -> RecordDict:
    """Whatever a device of any strategy sends, with every tensor under its name."""
    about = {
        "samples": contribution.samples,
        "loss": contribution.loss,
        "width": contribution.width,
        "device": contribution.device,
        "sent_bytes": contribution.sent_bytes,
        "rows": {key: rows.tolist() for key, rows in contribution.rows.items()},
    }
    return RecordDict(
        {
            STATE: state_record(
                ServerState(contribution.tensors, memory=contribution.memory).flat()
            ),
            ABOUT: ConfigRecord({"json": json.dumps(about)}),
        }
    )


def read_contribution(message: Message) -> Contribution:
    """The contribution again, to the bit."""
    about = json.loads(str(message.content.config_records[ABOUT]["json"]))
    about["rows"] = {key: np.array(rows, np.int64) for key, rows in about["rows"].items()}
    sent = ServerState.from_flat(_state_of(message.content))
    return Contribution(sent.tensors, memory=sent.memory, **about)


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
    ids = grid.push_messages(messages)
    waiting = deque((name, index) for index, name in enumerate(ids) if name)
    replies: list[Reply] = [None] * len(messages)
    begin = time.monotonic()
    while waiting:
        if _fetch(grid, *waiting[0], replies):
            waiting.popleft()
            continue
        waited_s = time.monotonic() - begin
        if is_over() or (timeout_s is not None and waited_s >= timeout_s):
            break
        # Looking at one at a time: a SuperLink that is asked about all of them all the time is busy
        # with that. All are needed, so it does not matter which one comes next.
        waiting.rotate(-1)
        time.sleep(max(poll_s, min(_WAIT_SHARE * waited_s, _LONGEST_POLL_S)))
    for name, index in waiting:  # who came while others were looked at is not late
        _fetch(grid, name, index, replies)
    return replies


def _fetch(grid: Grid, name: str, index: int, replies: list[Reply]) -> bool:
    """Take the reply to a message, if it is there."""
    try:
        found = list(grid.pull_messages([name]))
    except httpx.HTTPError:
        raise  # the SuperLink cannot be reached: that is no device's fault
    except Exception as error:
        replies[index] = error
        return True
    if found:
        replies[index] = found[0]
    return bool(found)
