"""A round of secure aggregation: four messages to every device, on the server and on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from cocofl.engine.executor import Answer
from cocofl.errors import InvalidExperiment, RejectedUpdate
from cocofl.fl.state import Contribution, Tensors
from cocofl.fl.trainer import Work
from cocofl.flower import secure_sum
from cocofl.flower.secure_sum import Secrets, SecureSum, TooFew
from cocofl.flower.secure_updates import SummableUpdates
from cocofl.flower.settings import LEAST_DEVICES
from cocofl.span import Blocks

OFFER, SHARE, MASK, REVEAL = "offer", "share", "mask", "reveal"
# When each stage ends at the latest, as a share of the round's time; all but one are short.
_ENDS = {OFFER: 0.15, SHARE: 0.3, MASK: 0.85, REVEAL: 1.0}
_SECURE = "secure"

Exchange = Callable[[Mapping[int, ConfigRecord], bool, float], dict[int, Answer]]
"""Sends each node a record, with the state or without, and waits so many seconds for answers."""


# --- the server ----------------------------------------------------------------------------------


class SecureRound:
    """Collects the sum of what devices send, as the answer of one of them."""

    def __init__(self, updates: SummableUpdates, exchange: Exchange, round_s: float) -> None:
        self._updates, self._exchange, self._round_s = updates, exchange, round_s
        self._sum = SecureSum(updates.terms)
        self._without: dict[int, Answer] = {}
        """Of those who have left, and why."""
        self._bytes_up: dict[int, int] = {}

    def collect(self, nodes: list[int], state: Tensors) -> Iterator[Answer]:
        """What became of each node; the first of those in the sum has all of it."""
        self._begin, server = time.monotonic(), self._sum
        merged: list[int] = []
        together, reason = None, ""
        try:
            offers = self._stage(OFFER, dict.fromkeys(nodes, b""))
            roster = server.enrol(offers)
            members = [one.node for one in server.roster.members]
            shares = self._stage(SHARE, dict.fromkeys(members, roster))
            merged = self._add(self._stage(MASK, server.route(shares)))
            reveals = self._stage(REVEAL, dict.fromkeys(merged, server.survivors()))
            together = self._updates.contribution(server.open(reveals), state)
        except (TooFew, RejectedUpdate) as error:
            reason = f"secure: {error}"
        for node in nodes:
            yield self._answer(node, merged, together, reason)

    def work_of(self, node: int) -> str:
        """The blocks that a device has sent."""
        own = [b for b in self._sum.blocks_of(node) if b != self._updates.everybody]
        return str(Blocks.parse("+".join(f"{block}:{block + 1}" for block in own))) if own else ""

    def _stage(self, stage: str, payloads: Mapping[int, bytes]) -> dict[int, bytes]:
        """What nodes answer in a stage; who does not is out of the round."""
        left_s = self._begin + _ENDS[stage] * self._round_s - time.monotonic()
        records = {
            node: ConfigRecord({"stage": stage, "payload": payload})
            for node, payload in payloads.items()
        }
        found: dict[int, bytes] = {}
        for node, answer in self._exchange(records, stage == MASK, max(0.0, left_s)).items():
            if isinstance(answer.sent, bytes):
                found[node] = answer.sent
                self._bytes_up[node] = self._bytes_up.get(node, 0) + len(answer.sent)
            else:
                self._without[node] = answer
        return found

    def _add(self, masked: Mapping[int, bytes]) -> list[int]:
        """Add up masked numbers; whose they are."""
        added = []
        for node, hidden in masked.items():
            try:
                self._sum.add(node, hidden)
                added.append(node)
            except RejectedUpdate as error:
                self._sum.refused[node] = f"{error.reason}: {error}"
        return added

    def _answer(
        self, node: int, merged: list[int], together: Contribution | None, reason: str
    ) -> Answer:
        if together is not None and node in merged:
            # All that is known of each is that it is in the sum.
            sent = together if node == merged[0] else Contribution({}, 0, together.loss)
            sent = _of(node, sent, self._bytes_up[node])
            return Answer(node, sent)
        if node in self._sum.refused:
            return Answer(node, None, "rejected", self._sum.refused[node])
        return self._without.get(node, Answer(node, None, "lost", reason))


def _of(node: int, sent: Contribution, size: int) -> Contribution:
    return Contribution(sent.tensors, sent.samples, sent.loss, device=node, sent_bytes=size)


# --- the device ----------------------------------------------------------------------------------


def stage_of(content: RecordDict) -> tuple[str, bytes] | None:
    """The stage that a message asks for and what it says; None where it asks for a plain update."""
    record = content.config_records.get(_SECURE)
    if record is None:
        return None
    stage, payload = record["stage"], record["payload"]
    assert isinstance(stage, str)
    assert isinstance(payload, bytes)
    return stage, payload


def with_stage(content: RecordDict, record: ConfigRecord) -> RecordDict:
    """A message that asks for a stage."""
    return RecordDict({**content, _SECURE: record})


def planned_blocks(work: Work) -> Blocks:
    """The blocks that a device is going to train, which it has to say beforehand."""
    found = getattr(work, "blocks", None)
    if not isinstance(found, Blocks):
        raise InvalidExperiment(
            f"{type(work).__name__} does not say beforehand which blocks it trains (`blocks`), and "
            "masks are agreed on before that; secure aggregation cannot be used with it"
        )
    return found


class SecureDevice:
    """A device's part in a round; what it must not forget from message to message is in ``kept``.

    A process may have ended in between: only Flower's context lasts.
    """

    def __init__(self, updates: SummableUpdates, kept: RecordDict) -> None:
        if updates.terms.least < LEAST_DEVICES:
            raise InvalidExperiment(
                f"the server would open a sum over {updates.terms.least} devices; this device "
                f"takes part in sums over {LEAST_DEVICES} or more"
            )
        self._updates, self._kept = updates, kept

    def offer(self, blocks: Blocks) -> bytes:
        """Begin a round; whatever was kept of another is forgotten."""
        everything = (*blocks, self._updates.everybody)
        secrets, sent = secure_sum.offer(self._updates.terms, everything)
        return self._keep(secrets, sent)

    def share(self, roster: bytes) -> bytes:
        """The second stage."""
        return self._keep(*secure_sum.share(self._updates.terms, self._secrets(), roster))

    def mask(self, parcels: bytes, train: Callable[[], Contribution], state: Tensors) -> bytes:
        """Train, and send that behind masks."""
        terms, secrets = self._updates.terms, self._secrets()
        secure_sum.sent_blocks(terms, secrets, parcels)  # too few? then there is nothing to train
        numbers = self._updates.numbers(train(), state)
        return self._keep(*secure_sum.mask(terms, secrets, parcels, numbers))

    def reveal(self, survivors: bytes) -> bytes:
        """The last stage; then there is nothing left to tell."""
        return self._keep(*secure_sum.reveal(self._updates.terms, self._secrets(), survivors))

    def _keep(self, secrets: Secrets, sent: bytes) -> bytes:
        self._kept[_SECURE] = ConfigRecord(asdict(secrets))
        return sent

    def _secrets(self) -> Secrets:
        record = self._kept.config_records.get(_SECURE)
        if record is None:
            raise RejectedUpdate("format", "this device has offered nothing")
        kept: dict[str, Any] = dict(record)
        return Secrets(**kept)
