"""How states, requests and contributions become Flower's records, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from cocofl.data import DataSet
from cocofl.data.labels import recoded
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.runlog import state_bytes, state_from_bytes

STATE, ABOUT, UPDATE = "state", "about", "update"
# What devices must know of the server's data, so that theirs means the same: one may lack classes,
# and its pictures may be darker.
_SHARED_FACTS = ("class_names", "mean", "std")


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


def fingerprint(state: ConfigRecord) -> str:
    """What tells one state that is sent from another."""
    payload = state[STATE]
    assert isinstance(payload, bytes)
    return hashlib.sha256(payload).hexdigest()[:32]


def packed_contribution(contribution: Contribution) -> RecordDict:
    """Whatever a device of any strategy sends to our own server, with every tensor by its name."""
    plain = ("samples", "loss", "width", "roll", "device", "sent_bytes")
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
        replace(
            split,
            facts=replace(split.facts, **alike),
            labels=recoded(
                split.labels, split.facts.labels, split.facts.class_names, alike["class_names"]
            ),
        )
        for split in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)
