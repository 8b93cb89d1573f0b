"""How states, requests and contributions become Flower's records, and back."""

from __future__ import annotations

import json
import math
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

from cocofl.data import DataSet
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.runlog import state_bytes, state_from_bytes

STATE, ABOUT, UPDATE = "state", "about", "update"
_WAIT_SHARE, _LONGEST_POLL_S = 0.05, 0.5
# What devices must know of the server's data, so that theirs means the same: one may lack classes,
# and its pictures may be darker.
_SHARED_FACTS = ("class_names", "mean", "std")

# A reply can be seen before all parts of it have arrived. Flower then waits a second before it
# looks again, with every reply behind this one; there is no setting for it but this.
assert pull_objects.__kwdefaults__ is not None
pull_objects.__kwdefaults__["initial_backoff"] = 0.05

Reply = Message | Exception | None
"""What came back for a message; an exception if it cannot be read, None if nothing came."""


def state_record(state: Mapping[str, Tensor]) -> ConfigRecord:
    """A state as one value, a safetensors file.

    Flower moves every part of a message with a request of its own, and an array is three of them:
    with one array per tensor a SuperLink was busy for seconds in every round.
    """
    return ConfigRecord({STATE: state_bytes(state)})


def packed(state: ConfigRecord, about: Any) -> RecordDict:
    """What is sent: a state, and what is to be said about it."""
    return RecordDict({STATE: state, ABOUT: ConfigRecord({"json": json.dumps(about)})})


def unpacked(message: Message) -> tuple[Tensors, Any]:
    """Both again."""
    records = message.content.config_records
    payload = records[STATE][STATE]
    assert isinstance(payload, bytes)
    return state_from_bytes(payload), json.loads(str(records[ABOUT]["json"]))


def packed_contribution(contribution: Contribution) -> RecordDict:
    """Whatever a device of any strategy sends to our own server, with every tensor by its name."""
    plain = ("samples", "loss", "width", "device", "sent_bytes")
    about = {name: getattr(contribution, name) for name in plain}
    about["rows"] = {key: rows.tolist() for key, rows in contribution.rows.items()}
    sent = ServerState(contribution.tensors, memory=contribution.memory)
    return packed(state_record(sent.flat()), about)


def unpacked_contribution(message: Message) -> Contribution:
    """The contribution again, to the bit."""
    tensors, about = unpacked(message)
    about["rows"] = {key: np.array(rows, np.int64) for key, rows in about["rows"].items()}
    sent = ServerState.from_flat(tensors)
    return Contribution(sent.tensors, memory=sent.memory, **about)


def update_reply(payload: bytes) -> RecordDict:
    """An update that is bytes already; none of them for a device that sits the round out."""
    return RecordDict({UPDATE: ConfigRecord({UPDATE: payload} if payload else {})})


def shared_facts(dataset: DataSet) -> dict[str, Any]:
    """What the server tells devices about the data."""
    return {name: getattr(dataset.facts, name) for name in _SHARED_FACTS}


def with_shared_facts(dataset: DataSet, facts: Mapping[str, Any]) -> DataSet:
    """A device's data, read as the server's is."""
    alike: dict[str, Any] = {name: tuple(facts[name]) for name in _SHARED_FACTS}
    train, test = (
        replace(split, facts=replace(split.facts, **alike))
        for split in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def ask(
    grid: Grid,
    messages: Sequence[Message],
    timeout_s: float = math.inf,
    poll_s: float = 0.1,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Reply]:
    """Send messages and wait for the replies, in the order of the messages."""
    names = list(grid.push_messages(messages))
    waiting, replies = deque(filter(None, names)), dict[str, Reply]()
    begin = time.monotonic()
    while waiting:
        replies[waiting[0]] = reply = _fetched(grid, waiting[0])
        if reply is not None:
            waiting.popleft()
            continue
        waited_s = time.monotonic() - begin
        if is_over() or waited_s >= timeout_s:
            break
        # Looking at one at a time: a SuperLink that is asked about all of them all the time is busy
        # with that. All are needed, so it does not matter which one comes next.
        waiting.rotate(-1)
        time.sleep(max(poll_s, min(_WAIT_SHARE * waited_s, _LONGEST_POLL_S)))
    for name in waiting:  # who came while others were looked at is not late
        replies[name] = _fetched(grid, name)
    return [replies.get(name) for name in names]


def _fetched(grid: Grid, name: str) -> Reply:
    """The reply to one message: one that cannot even be unpacked spoils no other."""
    try:
        return next(iter(grid.pull_messages([name])), None)
    except httpx.HTTPError:
        raise  # the SuperLink cannot be reached: that is no device's fault
    except Exception as error:
        return error
