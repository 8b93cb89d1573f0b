"""Secure aggregation without a network: every stage, with devices that leave and that lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocofl.errors import CocoflError, RejectedUpdate
from cocofl.flower import secure_sum
from cocofl.flower.secure_sum import Roster, Secrets, SecureSum, Sum, Terms, TooFew

TERMS = Terms(sizes=(4, 3, 5, 1), least=3)
EVERYBODY = 3


def numbers_of(node: int) -> dict[int, np.ndarray]:
    """Negative ones, too, which wrap around."""
    return {
        block: (np.arange(size) * 7 - 3 * node + 100 * block).astype(np.int64).astype(np.uint64)
        for block, size in enumerate(TERMS.sizes)
    }


class Round:
    """All stages of a round, one after the other, and whatever was said in them."""

    def __init__(self, blocks: dict[int, set[int]]) -> None:
        self.server = SecureSum(TERMS)
        self.secrets: dict[int, Secrets] = {}
        self.offers: dict[int, bytes] = {}
        for node, own in blocks.items():
            offered = secure_sum.offer(TERMS, {*own, EVERYBODY})
            self.secrets[node], self.offers[node] = offered

    def share(self, gone: set[int] = frozenset()) -> dict[int, bytes]:
        roster = self.server.enrol(self.offers)
        shares = {}
        for node in self.secrets.keys() - gone:
            self.secrets[node], shares[node] = secure_sum.share(TERMS, self.secrets[node], roster)
        return shares

    def mask(self, shares: dict[int, bytes], gone: set[int] = frozenset()) -> dict[int, bytes]:
        masked = {}
        for node, parcels in self.server.route(shares).items():
            if node not in gone:
                hidden = secure_sum.mask(TERMS, self.secrets[node], parcels, numbers_of(node))
                self.secrets[node], masked[node] = hidden
        return masked

    def reveal(self, masked: dict[int, bytes], gone: set[int] = frozenset()) -> dict[int, bytes]:
        for node, hidden in masked.items():
            self.server.add(node, hidden)
        survivors, reveals = self.server.survivors(), {}
        for node in masked.keys() - gone:
            revealed = secure_sum.reveal(TERMS, self.secrets[node], survivors)
            self.secrets[node], reveals[node] = revealed
        return reveals


def play(blocks: dict[int, set[int]], *gone: set[int]) -> dict[int, Sum]:
    """The sums of a round in which devices are gone from a stage on."""
    first, second, third = (*gone, set(), set(), set())[:3]
    one = Round(blocks)
    reveals = one.reveal(one.mask(one.share(first), second), third)
    assert not one.server.refused
    return one.server.open(reveals)


def expected(block: int, nodes: set[int]) -> np.ndarray:
    return np.sum([numbers_of(node)[block] for node in nodes], axis=0, dtype=np.uint64)


def check(sums: dict[int, Sum], wanted: dict[int, set[int]]) -> None:
    assert sums.keys() == wanted.keys()
    for block, nodes in wanted.items():
        assert sums[block].devices == len(nodes)
        np.testing.assert_array_equal(sums[block].numbers, expected(block, nodes))


SPANS = {11: {0, 1}, 12: {0, 1, 2}, 13: {0, 1, 2}, 14: {1, 2}, 15: {0}}
"""Block 0 has four devices, block 1 four, block 2 three."""
TRAINERS = {block: {n for n, own in SPANS.items() if block in own} for block in range(3)}


def test_the_sums_are_those_over_who_trained_each_block() -> None:
    check(play(SPANS), {**TRAINERS, EVERYBODY: set(SPANS)})


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("gone", [11, 12, 14, 15])
def test_a_device_may_leave_before_or_after_others_have_masked(stage: int, gone: int) -> None:
    left = {block: nodes - {gone} for block, nodes in TRAINERS.items()}
    wanted = {block: nodes for block, nodes in left.items() if len(nodes) >= 3}
    sums = play(SPANS, *[set()] * stage, {gone})
    check(sums, {**wanted, EVERYBODY: set(SPANS) - {gone}})


def test_a_device_may_leave_after_it_has_masked() -> None:
    check(play(SPANS, set(), set(), {11, 12}), {**TRAINERS, EVERYBODY: set(SPANS)})


def test_devices_may_leave_at_every_stage() -> None:
    spans = {node: {0, 1, 2} for node in range(20, 29)}
    left = set(spans) - {20, 21}
    check(play(spans, {20}, {21}, {22, 23}), dict.fromkeys(range(4), left))


@settings(max_examples=15)
@given(st.data())
def test_whoever_leaves_the_sums_are_of_those_who_are_left(data: st.DataObject) -> None:
    own = st.sets(st.integers(0, 2))
    spans = {node: data.draw(own) for node in range(1, data.draw(st.integers(4, 7)) + 1)}
    first = data.draw(st.sets(st.sampled_from(sorted(spans)), max_size=1))
    second = data.draw(st.sets(st.sampled_from(sorted(set(spans) - first)), max_size=1))
    there, left = set(spans) - first, set(spans) - first - second
    try:
        sums = play(spans, first, second)
    except TooFew:
        assert len(left) < max(3, len(spans) // 2 + 1)
        return
    trainers = {b: {n for n in left if b in spans[n]} for b in range(3)}
    started = {b: sum(b in spans[n] for n in there) for b in range(3)}
    wanted = {b: nodes for b, nodes in trainers.items() if len(nodes) >= 3 <= started[b]}
    check(sums, {**wanted, EVERYBODY: left})


def test_a_block_that_too_few_train_is_not_even_sent() -> None:
    one = Round({1: {0}, 2: {0}, 3: {1}, 4: {1}, 5: {1}})
    shares = one.share()
    masked = one.mask(shares)
    assert one.server.blocks_of(1) == (EVERYBODY,)
    assert one.server.blocks_of(3) == (1, EVERYBODY)
    assert len(masked[1]) == 8 * 1
    assert len(masked[3]) == 8 * (3 + 1) == one.server.masked_bytes(3)
    sums = one.server.open(one.reveal(masked))
    assert sums.keys() == {1, EVERYBODY}


def test_too_few_devices_end_a_round_at_any_stage() -> None:
    four = {node: {0} for node in (1, 2, 3, 4)}
    with pytest.raises(TooFew, match=r"2 devices offered.*3 are needed"):
        Round({1: {0}, 2: {0}}).share()
    for gone in ([{1, 2}], [set(), {1, 2}]):
        with pytest.raises(TooFew, match="2 devices are left of 4; 3 are needed"):
            play(four, *gone)
    with pytest.raises(TooFew, match="2 devices revealed their shares; 3 are needed"):
        play(four, set(), set(), {1, 2})


# --- what the server sees ------------------------------------------------------------------------


def test_masked_numbers_look_like_nothing() -> None:
    terms = Terms((2000,), 3)
    zeros = {0: np.zeros(2000, np.uint64)}
    server, secrets, offers = SecureSum(terms), {}, {}
    for node in (1, 2, 3):
        secrets[node], offers[node] = secure_sum.offer(terms, [0])
    roster, shares, masked = server.enrol(offers), {}, {}
    for node, own in list(secrets.items()):
        secrets[node], shares[node] = secure_sum.share(terms, own, roster)
    for node, parcels in server.route(shares).items():
        secrets[node], masked[node] = secure_sum.mask(terms, secrets[node], parcels, zeros)
    bits = np.unpackbits(np.frombuffer(b"".join(masked.values()), np.uint8))
    assert bits.mean() == pytest.approx(0.5, abs=0.01)
    assert len(set(masked.values())) == 3
    # Even all pairs' masks gone, each device's own mask stays: the sum of all is still hidden.
    total = sum(np.frombuffer(one, np.uint64) for one in masked.values())
    assert np.unpackbits(total.view(np.uint8)).mean() == pytest.approx(0.5, abs=0.01)


def test_a_device_reveals_once_and_either_keys_or_masks() -> None:
    one = Round({node: {0} for node in (1, 2, 3, 4)})
    masked = one.mask(one.share())
    before = dict(one.secrets)
    one.reveal(masked)
    everybody = one.server.survivors()
    without_4 = one.server.roster.bits(one.server.roster.members[:3])
    with pytest.raises(RejectedUpdate, match="revealed already"):
        secure_sum.reveal(TERMS, one.secrets[1], without_4)
    # Half of the devices are told one story, half the other: neither half is enough.
    told = {1: everybody, 2: everybody, 3: without_4}
    reveals = {n: secure_sum.reveal(TERMS, before[n], bits)[1] for n, bits in told.items()}
    with pytest.raises(TooFew, match="of node 4 is wrong"):
        one.server.open(reveals)


def test_a_thin_block_stays_closed_after_a_device_has_left() -> None:
    one = Round({1: {0}, 2: {0}, 3: {0}, 4: {1}, 5: {1}, 6: {1}})
    masked = one.mask(one.share(), gone={3})
    assert len(masked[1]) == 8 * (4 + 1)  # block 0 was sent
    reveals = one.reveal(masked)
    # Of 1 and 2 only the seed of everybody's block is revealed: an index, a chunk and padding.
    assert {len(content) for content in reveals.values()} == {2 * 36 + 52 + 3 * 52}
    assert one.server.open(reveals).keys() == {1, EVERYBODY}


# --- messages that cannot be ---------------------------------------------------------------------


def test_a_bad_offer_costs_its_sender_only() -> None:
    one = Round({node: {0} for node in (1, 2, 3, 4)})
    for bad in (b"", one.offers[4][:-1], bytes(67), b"\x02" + bytes(66), b"\xff" * 67, 7):
        one.server.refused.clear()
        one.offers[4] = bad  # type: ignore[assignment]
        roster = Roster.read(one.server.enrol(one.offers), TERMS)
        assert [member.node for member in roster.members] == [1, 2, 3]
        assert list(one.server.refused) == [4]


def test_bad_shares_and_bad_masked_numbers_cost_their_sender_only() -> None:
    one = Round({node: {0} for node in (1, 2, 3, 4, 5)})
    shares = one.share()
    shares[5] = shares[5][:-1]
    masked = one.mask(shares)
    assert list(masked) == [1, 2, 3, 4]
    for bad in (masked[4][:-1], masked[4] + b"\0", b"", "text"):
        with pytest.raises(RejectedUpdate, match="masked numbers have 40 bytes"):
            one.server.add(4, bad)  # type: ignore[arg-type]
    del masked[4]
    check(one.server.open(one.reveal(masked)), {0: {1, 2, 3}, EVERYBODY: {1, 2, 3}})
    with pytest.raises(RejectedUpdate, match="nothing of this device"):
        one.server.add(3, masked[3])


def test_a_lie_about_shares_is_seen() -> None:
    one = Round({node: {0} for node in (1, 2, 3, 4)})
    reveals = one.reveal(one.mask(one.share(), gone={4}))
    reveals[2] = reveals[2][:-1] + bytes([reveals[2][-1] ^ 1])
    with pytest.raises(TooFew, match=r"revealed of node \d is wrong"):
        one.server.open(reveals)


@pytest.mark.parametrize("stage", ["share", "mask", "reveal"])
def test_a_device_refuses_what_a_server_cannot_have_meant(stage: str) -> None:
    one = Round({node: {0} for node in (1, 2, 3, 4)})
    roster = one.server.enrol(one.offers)
    entry = 8 + TERMS.offer_bytes
    if stage == "share":
        others = roster[:16] + roster[16 + entry :]
        twice = roster[:16] + roster[16 : 16 + entry] * 4
        for bad in (b"", roster[:-1], roster + b"\0", roster[: 16 + entry], others, twice):
            with pytest.raises(RejectedUpdate):
                secure_sum.share(TERMS, one.secrets[1], bad)
        stranger = replace(one.secrets[1], offer=one.offers[2][::-1])
        with pytest.raises(RejectedUpdate, match="lacks what this device has offered"):
            secure_sum.share(TERMS, stranger, roster)
        return
    shares = one.share()
    parcels = one.server.route(shares)[1]
    if stage == "mask":
        for bad in (
            b"",
            parcels[:-1],
            parcels + b"\0",
            b"\xff" + parcels[1:],
            b"\x0e" + parcels[1:],
        ):
            with pytest.raises(CocoflError):
                secure_sum.mask(TERMS, one.secrets[1], bad, numbers_of(1))
        with pytest.raises(TooFew, match="1 devices are left of 4"):
            secure_sum.mask(TERMS, one.secrets[1], b"\x01" + parcels[1:], numbers_of(1))
        return
    kept, _ = secure_sum.mask(TERMS, one.secrets[1], parcels, numbers_of(1))
    for bad in (b"", b"\0", b"\x01", b"\x03", b"\x0e", b"\xff", b"\x0f\0"):
        with pytest.raises(CocoflError):
            secure_sum.reveal(TERMS, kept, bad)


def test_shares_of_another_round_are_worth_nothing() -> None:
    one, other = (Round({node: {0} for node in (1, 2, 3)}) for _ in range(2))
    other.offers, other.secrets = one.offers, dict(one.secrets)
    old, new = one.share(), other.share()  # the same keys, another roster
    new[3] = old[3]
    masked = other.mask(new)
    with pytest.raises(RejectedUpdate, match="what node 3 has sealed cannot be opened"):
        other.reveal(masked)
