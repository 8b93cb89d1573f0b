"""Secure aggregation: a server learns sums of what devices send, and nothing of any one of them.

The protocol of Bonawitz et al. (CCS 2017), block by block, since devices train different blocks:

========= ============================================ ==========================================
stage     a device sends                               the server sends
========= ============================================ ==========================================
offer     two public keys, which blocks it will train  that a round begins
share     shares of its secrets, one sealed for each   the roster: everybody's offer
mask      its numbers behind masks                     the shares that others sealed for it
reveal    shares of what has to be taken away          who has sent masked numbers
========= ============================================ ==========================================

Every two devices that train a block agree on a mask, which one adds and the other subtracts; each
adds a mask of its own besides. A device that is gone after the third stage leaves its pairs' masks
in the sum: the others hold shares of the key that they are made of. A block that fewer than
``least`` devices train is not sent, and one that fewer are left with is not opened. For one device
a peer reveals either shares of that key or shares of its own masks, never both, and more than half
of the roster are needed for either.

Each stage is a function on bytes. Numbers are uint64 and wrap around. Flower's sealing and shares
are used as they are; its generator of masks is not, since that knows 2³² of them.
"""

from __future__ import annotations

import hashlib
import os
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from numpy.typing import NDArray

from cocofl.errors import CocoflError, RejectedUpdate

Numbers = NDArray[np.uint64]

MOST_DEVICES = 1024
_CURVE = ec.SECP256R1()
_PUBLIC_BYTES, _PRIVATE_BYTES, _SEED_BYTES, _CHUNK_BYTES = 33, 32, 16, 16
_NODE_BYTES, _NONCE_BYTES, _DIGEST_BYTES, _INDEX_BYTES = 8, 16, 32, 4
_KEY_SHARE_BYTES = _INDEX_BYTES + _PRIVATE_BYTES + _CHUNK_BYTES  # shares are of padded secrets


class TooFew(CocoflError):
    """Too few devices are left for a sum that hides each of them."""


# --- what everybody knows ------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What a round's sums are of, agreed on beforehand."""

    sizes: tuple[int, ...]
    """How many numbers each block has."""
    least: int = 3
    """No sum over fewer devices is opened."""

    @property
    def offer_bytes(self) -> int:
        """Two keys, and a bit for each block."""
        return 2 * _PUBLIC_BYTES + _bit_bytes(len(self.sizes))


class Member(NamedTuple):
    """A device that takes part, by its offer."""

    node: int
    offer: bytes
    blocks: tuple[int, ...]

    @property
    def mask_key(self) -> ec.EllipticCurvePublicKey:
        """Of this and another's private key the masks of both are made."""
        return _public(self.offer[:_PUBLIC_BYTES])

    @property
    def seal_key(self) -> ec.EllipticCurvePublicKey:
        """What is sealed with it only this device can open."""
        return _public(self.offer[_PUBLIC_BYTES : 2 * _PUBLIC_BYTES])

    @classmethod
    def read(cls, node: int, offer: bytes, terms: Terms) -> Member:
        """From what a device offers, if it can be an offer."""
        if not isinstance(offer, bytes) or len(offer) != terms.offer_bytes:
            raise RejectedUpdate("size", f"an offer has {terms.offer_bytes} bytes")
        blocks = _places(offer[2 * _PUBLIC_BYTES :], len(terms.sizes))
        member = cls(node, offer, blocks)
        try:
            _ = member.mask_key, member.seal_key
        except ValueError:
            raise RejectedUpdate("format", "a key of the offer is none") from None
        if not blocks:
            raise RejectedUpdate("span", "the offer is of no block")
        return member


@dataclass(frozen=True)
class Roster:
    """All who take part in a round; the same for everybody."""

    terms: Terms
    nonce: bytes
    members: tuple[Member, ...]
    """By node, ascending."""

    @property
    def threshold(self) -> int:
        """So many shares give a secret: more than half, so no two halves are told two stories."""
        return len(self.members) // 2 + 1

    @property
    def needed(self) -> int:
        """With fewer devices a round cannot go on."""
        return max(self.threshold, self.terms.least)

    @cached_property
    def digest(self) -> bytes:
        """What all that belongs to this round is bound to."""
        terms = ",".join(map(str, (*self.terms.sizes, self.terms.least)))
        return hashlib.sha256(terms.encode() + b"|" + self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """As it is sent."""
        entries = (one.node.to_bytes(_NODE_BYTES, "little") + one.offer for one in self.members)
        return self.nonce + b"".join(entries)

    @classmethod
    def read(cls, content: bytes, terms: Terms) -> Roster:
        """From what a server says, if it can be a roster."""
        entry = _NODE_BYTES + terms.offer_bytes
        count, rest = divmod(len(content) - _NONCE_BYTES, entry)
        if not isinstance(content, bytes) or rest or not terms.least <= count <= MOST_DEVICES:
            raise RejectedUpdate("size", f"a roster has {terms.least} to {MOST_DEVICES} entries")
        members = []
        for at in range(_NONCE_BYTES, len(content), entry):
            node = int.from_bytes(content[at : at + _NODE_BYTES], "little")
            offer = content[at + _NODE_BYTES : at + entry]
            members.append(Member.read(node, offer, terms))
        nodes = [one.node for one in members]
        if nodes != sorted(set(nodes)) or len({one.offer for one in members}) < count:
            raise RejectedUpdate("format", "the roster names a node or an offer twice")
        return cls(terms, content[:_NONCE_BYTES], tuple(members))

    def of(self, node: int) -> Member:
        """A member by its node."""
        return next(one for one in self.members if one.node == node)

    def owner(self, secrets: Secrets) -> Member:
        """The member whose secrets these are."""
        found = next((one for one in self.members if one.offer == secrets.offer), None)
        if found is None:
            raise RejectedUpdate("format", "the roster lacks what this device has offered")
        return found

    def among(self, bits: bytes) -> tuple[Member, ...]:
        """The members that bits name; they must be enough."""
        found = tuple(self.members[place] for place in _places(bits, len(self.members)))
        if len(found) < self.needed:
            raise TooFew(
                f"{len(found)} devices are left of {len(self.members)}; {self.needed} are needed"
            )
        return found

    def bits(self, members: Iterable[Member]) -> bytes:
        """Members as bits."""
        return _bits((self.members.index(one) for one in members), len(self.members))

    def sent_by(self, member: Member, among: Sequence[Member]) -> tuple[int, ...]:
        """The blocks of a member that enough of some devices have."""
        return tuple(
            block
            for block in member.blocks
            if sum(block in one.blocks for one in among) >= self.terms.least
        )

    def parcel_bytes(self, sender: Member) -> int:
        """The size of the shares that a member seals for another."""
        seeds = len(self.sent_by(sender, self.members))
        plain = _DIGEST_BYTES + 2 * _NODE_BYTES + _KEY_SHARE_BYTES + _seeds_share_bytes(seeds)
        sealed = 1 + 8 + 16 + (plain // 16 + 1) * 16 + 32  # as Fernet has it
        return -(-sealed // 3) * 4


# --- a device's side -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Secrets:
    """What a device keeps from stage to stage of a round."""

    offer: bytes
    mask_key: bytes
    seal_key: bytes
    seeds: bytes
    """One for each block."""
    roster: bytes = b""
    parcels: bytes = b""
    """Who has sealed shares for this device, and the shares; then nothing again."""


def offer(terms: Terms, blocks: Iterable[int]) -> tuple[Secrets, bytes]:
    """Two fresh keys, and which blocks the device will train."""
    mask_key, seal_key = (ec.generate_private_key(_CURVE) for _ in range(2))
    public = b"".join(map(_public_bytes, (mask_key, seal_key)))
    sent = public + _bits(blocks, len(terms.sizes))
    keys = (_private_bytes(mask_key), _private_bytes(seal_key))
    return Secrets(sent, *keys, os.urandom(_SEED_BYTES * len(terms.sizes))), sent


def share(terms: Terms, secrets: Secrets, roster: bytes) -> tuple[Secrets, bytes]:
    """Shares of the device's key and seeds, one sealed for each member."""
    if secrets.roster:
        raise RejectedUpdate("format", "this round has a roster already")
    known = Roster.read(roster, terms)
    own = known.owner(secrets)
    seeds = b"".join(_seed(secrets, block) for block in known.sent_by(own, known.members))
    count = len(known.members)
    keys = create_shares(secrets.mask_key, known.threshold, count)
    masks = create_shares(seeds, known.threshold, count)
    private = _private(secrets.seal_key)
    sealed = (
        encrypt(
            generate_shared_key(private, one.seal_key),
            _addressed(known, own, one) + key + mask,
        )
        for one, key, mask in zip(known.members, keys, masks, strict=True)
    )
    return replace(secrets, roster=roster), b"".join(sealed)


def sent_blocks(terms: Terms, secrets: Secrets, parcels: bytes) -> tuple[int, ...]:
    """The blocks whose numbers the device is to send: those that enough others have, too."""
    known = Roster.read(secrets.roster, terms)
    return known.sent_by(known.owner(secrets), known.among(_first_bits(known, parcels)))


def mask(
    terms: Terms, secrets: Secrets, parcels: bytes, numbers: Mapping[int, Numbers]
) -> tuple[Secrets, bytes]:
    """The device's numbers behind masks, block by block."""
    if secrets.parcels:
        raise RejectedUpdate("format", "this device has sent its numbers already")
    known = Roster.read(secrets.roster, terms)
    own, peers = known.owner(secrets), known.among(_first_bits(known, parcels))
    if own not in peers:
        raise RejectedUpdate("format", "the server left this device out")
    expected = _bit_bytes(len(known.members)) + sum(map(known.parcel_bytes, peers))
    if len(parcels) != expected:
        raise RejectedUpdate("size", f"the shares of others have {expected} bytes")
    private, hidden = _private(secrets.mask_key), []
    for block in known.sent_by(own, peers):
        total = numbers[block].astype(np.uint64)
        assert len(total) == terms.sizes[block]
        total += _mask(_seed(secrets, block), block, len(total))
        for peer in peers:
            if peer is not own and block in peer.blocks:
                _add_pair(total, private, own, peer, block)
        hidden.append(total.astype("<u8").tobytes())
    return replace(secrets, parcels=parcels), b"".join(hidden)


def reveal(terms: Terms, secrets: Secrets, survivors: bytes) -> tuple[Secrets, bytes]:
    """Shares of what the sum has too much of; once."""
    if not secrets.parcels:
        raise RejectedUpdate("format", "there is nothing to reveal, or it was revealed already")
    known = Roster.read(secrets.roster, terms)
    own = known.owner(secrets)
    first = _first_bits(known, secrets.parcels)
    peers, left = known.among(first), known.among(survivors)
    if own not in left or not set(left) <= set(peers):
        raise RejectedUpdate("format", "who is left are others than those who were there")
    private, at, found = _private(secrets.seal_key), len(first), []
    for peer in peers:
        end = at + known.parcel_bytes(peer)
        plain = _opened(known, peer, own, private, secrets.parcels[at:end])
        found.append(_revealed(known, peer, peers, left, plain))
        at = end
    spent = replace(secrets, parcels=b"", mask_key=b"", seal_key=b"", seeds=b"")
    return spent, b"".join(found)


def _opened(
    known: Roster, sender: Member, own: Member, private: ec.EllipticCurvePrivateKey, parcel: bytes
) -> bytes:
    """The shares that a member has sealed for this device."""
    try:
        plain = decrypt(generate_shared_key(private, sender.seal_key), parcel)
    except (InvalidToken, ValueError):
        plain = b""
    head = _addressed(known, sender, own)
    if not plain.startswith(head):
        raise RejectedUpdate("format", f"what node {sender.node} has sealed cannot be opened")
    return plain[len(head) :]


def _revealed(
    known: Roster, peer: Member, peers: Sequence[Member], left: Sequence[Member], plain: bytes
) -> bytes:
    """Of a member that is gone a share of its key; of one that is left, of its own masks."""
    if peer not in left:
        return plain[:_KEY_SHARE_BYTES]
    shares, shared = plain[_KEY_SHARE_BYTES:], known.sent_by(peer, known.members)
    chunks = [shared.index(block) for block in _to_open(known, peer, peers, left)]
    # The last one is padding, by which the whole is known to be right.
    pieces = (
        shares[_INDEX_BYTES + _CHUNK_BYTES * i : _INDEX_BYTES + _CHUNK_BYTES * (i + 1)]
        for i in (*chunks, len(shared))
    )
    return shares[:_INDEX_BYTES] + b"".join(pieces)


def _to_open(
    known: Roster, member: Member, peers: Sequence[Member], left: Sequence[Member]
) -> list[int]:
    """The blocks that a member has sent and that enough of those who are left have sent, too."""
    return [block for block in known.sent_by(member, peers) if block in known.sent_by(member, left)]


# --- the server's side ---------------------------------------------------------------------------


class Sum(NamedTuple):
    """The numbers of a block, added up."""

    numbers: Numbers
    devices: int


@dataclass
class SecureSum:
    """A round on the server: each stage takes what devices sent and says what to send them next.

    Whatever cannot be is refused, and noted under the node that sent it.
    """

    terms: Terms
    refused: dict[int, str] = field(default_factory=dict)
    roster: Roster = field(init=False)
    peers: tuple[Member, ...] = field(init=False)
    """Those of the roster who have shared their secrets."""
    _left: list[Member] = field(default_factory=list)
    """Those of them whose masked numbers came."""
    _totals: dict[int, Numbers] = field(default_factory=dict)

    def enrol(self, offers: Mapping[int, bytes]) -> bytes:
        """The roster."""
        members = []
        for node, content in sorted(offers.items())[:MOST_DEVICES]:
            try:
                members.append(Member.read(node, content, self.terms))
            except RejectedUpdate as error:
                self.refused[node] = f"{error.reason}: {error}"
        if len(members) < self.terms.least:
            raise TooFew(
                f"{len(members)} devices offered to take part; {self.terms.least} are needed"
            )
        self.roster = Roster(self.terms, os.urandom(_NONCE_BYTES), tuple(members))
        return self.roster.to_bytes()

    def route(self, shares: Mapping[int, bytes]) -> dict[int, bytes]:
        """By node, who is there, and what they have sealed for it."""
        roster, sealed = self.roster, dict[Member, list[bytes]]()
        for member in roster.members:
            if (content := shares.get(member.node)) is None:
                continue
            size = roster.parcel_bytes(member)
            if not isinstance(content, bytes) or len(content) != size * len(roster.members):
                self.refused[member.node] = f"size: shares have {size} bytes for each device"
                continue
            sealed[member] = [content[at : at + size] for at in range(0, len(content), size)]
        self.peers = roster.among(roster.bits(sealed))
        head = roster.bits(self.peers)
        return {
            one.node: head
            + b"".join(sealed[peer][roster.members.index(one)] for peer in self.peers)
            for one in self.peers
        }

    def blocks_of(self, node: int) -> tuple[int, ...]:
        """The blocks that a device sends."""
        return self.roster.sent_by(self.roster.of(node), self.peers)

    def masked_bytes(self, node: int) -> int:
        """The size of a device's masked numbers."""
        return 8 * sum(self.terms.sizes[block] for block in self.blocks_of(node))

    def add(self, node: int, masked: bytes) -> None:
        """Take in a device's masked numbers."""
        member = next((one for one in self.peers if one.node == node), None)
        if member is None or member in self._left:
            raise RejectedUpdate("format", "nothing of this device is expected")
        size = self.masked_bytes(node)
        if not isinstance(masked, bytes) or len(masked) != size:
            raise RejectedUpdate("size", f"masked numbers have {size} bytes")
        numbers, at = np.frombuffer(masked, "<u8"), 0
        for block in self.blocks_of(node):
            end = at + self.terms.sizes[block]
            total = self._totals.setdefault(block, np.zeros(end - at, np.uint64))
            total += numbers[at:end]
            at = end
        self._left.append(member)

    def survivors(self) -> bytes:
        """Who has sent masked numbers, as bits."""
        self._left.sort(key=lambda one: one.node)
        bits = self.roster.bits(self._left)
        self.roster.among(bits)  # are they enough?
        return bits

    def open(self, reveals: Mapping[int, bytes]) -> dict[int, Sum]:
        """The sums, of those blocks that enough devices are left of."""
        shares = self._shares(reveals)
        open_to = {one: _to_open(self.roster, one, self.peers, self._left) for one in self._left}
        opened = sorted({block for blocks in open_to.values() for block in blocks})
        for one in self.peers:
            secret = self._secret(one, shares[one])
            if one in self._left:
                if len(secret) != _SEED_BYTES * len(open_to[one]):
                    raise TooFew(f"what is revealed of node {one.node} is wrong")
                for i, block in enumerate(open_to[one]):
                    seed = secret[_SEED_BYTES * i : _SEED_BYTES * (i + 1)]
                    self._totals[block] -= _mask(seed, block, self.terms.sizes[block])
            else:
                self._take_away_pairs(one, secret, opened)
        counts = {b: sum(b in blocks for blocks in open_to.values()) for b in opened}
        return {block: Sum(self._totals[block], counts[block]) for block in opened}

    def _shares(self, reveals: Mapping[int, bytes]) -> dict[Member, list[bytes]]:
        """By member, the shares of its secret that came."""
        sizes = {
            one: _seeds_share_bytes(len(_to_open(self.roster, one, self.peers, self._left)))
            if one in self._left
            else _KEY_SHARE_BYTES
            for one in self.peers
        }
        found: dict[Member, list[bytes]] = {one: [] for one in self.peers}
        for node, content in sorted(reveals.items()):
            if not isinstance(content, bytes) or len(content) != sum(sizes.values()):
                self.refused[node] = f"size: what is revealed has {sum(sizes.values())} bytes"
                continue
            index, at = self.roster.members.index(self.roster.of(node)) + 1, 0
            own = []
            for size in sizes.values():
                own.append(content[at : at + size])
                at += size
            if any(int.from_bytes(piece[:_INDEX_BYTES], "little") != index for piece in own):
                self.refused[node] = "format: what is revealed are shares of another device"
                continue
            for one, piece in zip(self.peers, own, strict=True):
                found[one].append(piece)
        return found

    def _secret(self, member: Member, shares: Sequence[bytes]) -> bytes:
        threshold = self.roster.threshold
        if len(shares) < threshold:
            raise TooFew(f"{len(shares)} devices revealed their shares; {threshold} are needed")
        try:
            return combine_shares(list(shares[:threshold]))
        except ValueError as error:
            raise TooFew(f"what is revealed of node {member.node} is wrong: {error}") from error

    def _take_away_pairs(self, gone: Member, secret: bytes, opened: Sequence[int]) -> None:
        """Take a device's pairs' masks out of the sums; its own numbers are not in them."""
        try:
            private = _private(secret)
        except ValueError:
            private = None
        if private is None or _public_bytes(private) != gone.offer[:_PUBLIC_BYTES]:
            raise TooFew(f"what is revealed of node {gone.node} is wrong")
        for block in self.roster.sent_by(gone, self.peers):
            for peer in self._left:
                if block in opened and block in peer.blocks:
                    # As if it had come, with nothing to add.
                    _add_pair(self._totals[block], private, gone, peer, block)


# --- masks, keys, bits ---------------------------------------------------------------------------


def _mask(seed: bytes, block: int, count: int) -> Numbers:
    """As many numbers as a block has; AES in counter mode, the block being the upper half."""
    start = block.to_bytes(8, "big") + bytes(8)
    stream = Cipher(algorithms.AES(seed), modes.CTR(start)).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), "<u8").astype(np.uint64)


def _add_pair(
    total: Numbers, private: ec.EllipticCurvePrivateKey, own: Member, peer: Member, block: int
) -> None:
    """Add the mask that two devices share, which the other one subtracts."""
    seed = urlsafe_b64decode(generate_shared_key(private, peer.mask_key))
    shared = _mask(seed, block, len(total))
    if own.node < peer.node:
        total += shared
    else:
        total -= shared


def _seed(secrets: Secrets, block: int) -> bytes:
    return secrets.seeds[_SEED_BYTES * block : _SEED_BYTES * (block + 1)]


def _seeds_share_bytes(blocks: int) -> int:
    return _INDEX_BYTES + _CHUNK_BYTES * (blocks + 1)


def _addressed(known: Roster, sender: Member, to: Member) -> bytes:
    """What sealed shares begin with: they are of this round, and for one device."""
    nodes = (one.node.to_bytes(_NODE_BYTES, "little") for one in (sender, to))
    return known.digest + b"".join(nodes)


def _first_bits(known: Roster, parcels: bytes) -> bytes:
    return parcels[: _bit_bytes(len(known.members))]


def _bit_bytes(count: int) -> int:
    return -(-count // 8)


def _bits(places: Iterable[int], count: int) -> bytes:
    return sum(1 << place for place in set(places)).to_bytes(_bit_bytes(count), "little")


def _places(bits: bytes, count: int) -> tuple[int, ...]:
    value = int.from_bytes(bits, "little")
    if len(bits) != _bit_bytes(count) or value >> count:
        raise RejectedUpdate("format", f"expected a bit for each of {count}")
    return tuple(place for place in range(count) if value >> place & 1)


def _public(content: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, content)


def _public_bytes(private: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PublicFormat.CompressedPoint
    return private.public_key().public_bytes(serialization.Encoding.X962, form)


def _private(content: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(content, "big"), _CURVE)


def _private_bytes(private: ec.EllipticCurvePrivateKey) -> bytes:
    return private.private_numbers().private_value.to_bytes(_PRIVATE_BYTES, "big")
