"""The contract of an update: how a device's contribution travels, and what the server accepts.

Both sides know the network, so an update does not name its tensors. It says which blocks it is of,
and then come the values of exactly these blocks' tensors, in the network's own order, as one flat
tensor per type; scales follow, with a bit for each that the blocks can have. An unknown key, a
missing tensor or half a block cannot be said in this language, and a few hundred bytes are all that
is sent besides the values.

The bytes are a safetensors file with one line of JSON as metadata. There is only one way to write
an update: the server makes the header that the metadata asks for, and compares. Nothing is
allocated before sizes agree, and nothing is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cocofl.budget import bytes_text
from cocofl.chain import BlockChain
from cocofl.checks import check_number
from cocofl.errors import RejectedUpdate
from cocofl.fl.codec import Codec, Identity
from cocofl.fl.state import Contribution, Tensors
from cocofl.freeze import Network
from cocofl.freeze.state import block_state
from cocofl.span import Blocks, Span

_FORMAT = "cocofl update 1"
_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SCALES, _ENCODED = "scales", "encoded"
_HEADER_BYTES = 4096
_VARIANCE = "running_var"


@dataclass(frozen=True)
class Limits:
    """What the server takes for reasonable, whatever a device says."""

    max_samples: int = 1_000_000
    """The most samples that one device's update may stand for: they are its weight in the merge."""
    max_change: float = 10.0
    """The largest norm of a change, as a multiple of 1 + the norm of what it changes."""

    def __post_init__(self) -> None:
        check_number("flower.max_samples", self.max_samples, least=1)
        check_number("flower.max_change", self.max_change, above=0)


class Slot(NamedTuple):
    """One tensor of the network."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


class Facts(NamedTuple):
    """What an update says besides its values."""

    blocks: Blocks
    samples: int
    loss: float
    scales: tuple[str, ...]


class Contract:
    """What updates of one network look like; devices and server make it from the same model.

    >>> from torch import nn
    >>> from cocofl import split
    >>> chain = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
    >>> contract = Contract(chain)
    >>> state = {slot.key: torch.zeros(slot.shape) for slot in contract.slots(Span(0, 2))}
    >>> trained = {"2.weight": torch.ones(2, 8), "2.bias": torch.ones(2)}
    >>> sent = contract.encode(Contribution(trained, 5))
    >>> blocks, received = contract.decode(sent, state)
    >>> str(blocks), received.samples, sorted(received.tensors)
    ('1:2', 5, ['2.bias', '2.weight'])
    >>> contract.decode(sent[:-1], state)
    Traceback (most recent call last):
    cocofl.errors.RejectedUpdate: 1:2 needs 72 bytes of values; 71 came
    """

    def __init__(
        self, chain: BlockChain, limits: Limits | None = None, codec: Codec | None = None
    ) -> None:
        self.limits, self._codec = limits or Limits(), codec or Identity()
        self._slots = [
            [Slot(key, t.dtype, tuple(t.shape)) for key, t in block_state(block).items()]
            for block in chain.blocks
        ]
        self._scales = Network.of(chain).block_scale_keys
        # A bit for every scale, and the ends of every other block.
        self.header_limit = _HEADER_BYTES + sum(map(len, self._scales)) + 8 * len(self._slots)
        everything = Span(0, len(self._slots))
        values = sum(map(self._size, self.slots(everything)))
        self.max_bytes = 8 + self.header_limit + values + 4 * len(self.scale_keys(everything))

    def _size(self, slot: Slot) -> int:
        """The bytes of a tensor in an update."""
        by = self._codec if slot.dtype.is_floating_point and slot.shape else Identity()
        return by.size_bytes(slot.shape, slot.dtype)

    def slots(self, blocks: Blocks) -> list[Slot]:
        """The tensors of blocks, in order."""
        return [slot for block in blocks for slot in self._slots[block]]

    def scale_keys(self, blocks: Blocks) -> list[str]:
        """The scales that a device can measure in blocks."""
        return [key for block in blocks for key in self._scales[block]]

    # --- the device's side -----------------------------------------------------------------------

    def encode(self, contribution: Contribution) -> bytes:
        """A contribution as bytes; it must be of whole blocks."""
        blocks = self._blocks_of(contribution.tensors)
        tensors = contribution.tensors
        scales = tuple(key for key in self.scale_keys(blocks) if key in tensors)
        facts = Facts(blocks, contribution.samples, float(contribution.loss), scales)
        sent = contribution.payloads
        values = [
            sent.get(slot.key) or _bytes(tensors[slot.key]) for slot in self._in_file_order(blocks)
        ]
        return b"".join([self._header(facts), *values, *(_bytes(tensors[key]) for key in scales)])

    def _blocks_of(self, tensors: Mapping[str, Tensor]) -> Blocks:
        touched = [
            Span(index, index + 1)
            for index, block in enumerate(self._slots)
            if any(slot.key in tensors for slot in block)
        ]
        if not touched:
            raise RejectedUpdate("span", "the contribution has no tensor of the network")
        blocks: Blocks = reduce(or_, touched)
        wanted = {slot.key: slot for slot in self.slots(blocks)}
        known = wanted.keys() | set(self.scale_keys(blocks))
        for key in sorted(wanted.keys() - tensors.keys()) + sorted(tensors.keys() - known):
            what = "lacks" if key in wanted else "has, besides its own tensors,"
            raise RejectedUpdate("span", f"the contribution of {blocks} {what} {key!r}")
        for key, slot in wanted.items():
            tensor = tensors[key]
            if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
                raise RejectedUpdate(
                    "layout",
                    f"{key!r} is {tensor.dtype} of shape {list(tensor.shape)}; the network has "
                    f"{slot.dtype} of shape {list(slot.shape)}",
                )
        return blocks

    # --- the server's side -----------------------------------------------------------------------

    def decode(self, payload: bytes, state: Mapping[str, Tensor]) -> tuple[Blocks, Contribution]:
        """What a device sent for a state, if every bit of it is as it should be.

        Else :class:`~cocofl.errors.RejectedUpdate`, and never any other exception.
        """
        if not isinstance(payload, bytes):
            raise RejectedUpdate("format", f"the update is {type(payload).__name__}, not bytes")
        if len(payload) > self.max_bytes:
            raise RejectedUpdate(
                "size",
                f"the update has {bytes_text(len(payload))}; all of the network needs at most "
                f"{bytes_text(self.max_bytes)}",
            )
        facts = self._facts(payload)
        header = self._header(facts)
        if not payload.startswith(header):
            raise RejectedUpdate("format", "the header is not the one that belongs to its metadata")
        tensors = self._values(payload, len(header), facts, state)
        self._check_values(tensors, state, facts)
        return facts.blocks, Contribution(tensors, facts.samples, facts.loss)

    def _facts(self, payload: bytes) -> Facts:
        """Read the metadata; every field is checked, and nothing else may be there."""
        length = int.from_bytes(payload[:8], "little")
        if len(payload) < 8 or not 2 <= length <= min(self.header_limit, len(payload) - 8):
            raise RejectedUpdate("format", "the update is no safetensors file of this size")
        try:
            text = json.loads(payload[8 : 8 + length].decode("ascii"))["__metadata__"]["cocofl"]
            content: Any = json.loads(text)
            ends, samples, loss = content["span"], content["samples"], content["loss"]
            bits = int(content["scales"], 16)
        # A header is hostile until it is known: deep nesting and long numbers are mistakes too.
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RejectedUpdate("format", f"the metadata cannot be read: {error!r:.200}") from None
        blocks = self._read_blocks(ends)
        most = self.limits.max_samples
        if not (_is_int(samples) and 1 <= samples <= most):
            raise RejectedUpdate(
                "samples", f"the update claims {samples!r:.20} samples; expected 1 to {most}"
            )
        if not (isinstance(loss, float) and math.isfinite(loss)):
            raise RejectedUpdate("values", f"the loss is {loss!r:.20}; expected a finite number")
        keys = self.scale_keys(blocks)
        if not 0 <= bits < 2 ** len(keys):
            raise RejectedUpdate("scales", f"the update has scales that {blocks} does not have")
        scales = tuple(key for i, key in enumerate(keys) if bits >> i & 1)
        return Facts(blocks, samples, loss, scales)

    def _read_blocks(self, ends: Any) -> Blocks:
        """Blocks from the ends of their spans; each begins after the one before has ended."""
        count = len(self._slots)
        if (
            not isinstance(ends, list)
            or not 2 <= len(ends) <= count + 1
            or len(ends) % 2
            or not all(map(_is_int, ends))
            or not all(a < b for a, b in pairwise([-1, *ends, count + 1]))
        ):
            raise RejectedUpdate(
                "span", f"the span is {ends!r:.60}; the network has {count} blocks"
            )
        return Blocks.parse(
            "+".join(f"{a}:{b}" for a, b in zip(ends[::2], ends[1::2], strict=True))
        )

    def _values(
        self, payload: bytes, begin: int, facts: Facts, state: Mapping[str, Tensor]
    ) -> Tensors:
        slots = self._in_file_order(facts.blocks)
        sizes = [*map(self._size, slots), *(4 for _ in facts.scales)]
        slots += [Slot(key, torch.float32, ()) for key in facts.scales]
        wanted = sum(sizes)
        if len(payload) - begin != wanted:
            raise RejectedUpdate(
                "size",
                f"{facts.blocks} needs {wanted} bytes of values; {len(payload) - begin} came",
            )
        tensors, at = {}, begin
        for slot, size in zip(slots, sizes, strict=True):
            tensors[slot.key] = self._decoded(slot, payload[at : at + size], state)
            at += size
        # In the network's own order, as a device's contribution has them.
        order = [slot.key for slot in self.slots(facts.blocks)] + list(facts.scales)
        return {key: tensors[key] for key in order}

    def _decoded(self, slot: Slot, payload: bytes, state: Mapping[str, Tensor]) -> Tensor:
        if self._codec.is_exact or not slot.dtype.is_floating_point or not slot.shape:
            return Identity().decode(payload, torch.empty(slot.shape, dtype=slot.dtype))
        try:
            found = self._codec.decode(payload, state[slot.key])
        except Exception as error:  # whatever a codec of the user's makes of hostile bytes
            raise RejectedUpdate("format", f"{slot.key!r}: {error!r:.200}") from error
        if tuple(found.shape) != slot.shape or found.dtype != slot.dtype:
            raise RejectedUpdate("layout", f"{slot.key!r} is decoded to another shape or type")
        return found

    def _check_values(
        self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], facts: Facts
    ) -> None:
        scales = set(facts.scales)
        change, size = 0.0, 0.0
        for key, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise RejectedUpdate("values", f"{key!r} holds NaN or infinite values")
            if key in scales:
                if not float(tensor) > 0:
                    raise RejectedUpdate("scales", f"{key!r} is {float(tensor)}, not above 0")
                continue
            if key.endswith(_VARIANCE) and bool((tensor < 0).any()):
                raise RejectedUpdate("values", f"{key!r} holds a negative variance")
            old = state[key].double()
            change += float((tensor.double() - old).square().sum())
            size += float(old.square().sum())
        most = self.limits.max_change * (1 + math.sqrt(size))
        if not math.sqrt(change) <= most:
            raise RejectedUpdate(
                "change",
                f"the update moves {facts.blocks} by {math.sqrt(change):.3g}; at most {most:.3g} "
                f"is allowed (max_change = {self.limits.max_change:g})",
            )

    # --- the form --------------------------------------------------------------------------------

    def _in_file_order(self, blocks: Blocks) -> list[Slot]:
        """Tensors of one type lie together, wider types first so that all are aligned."""
        return sorted(
            self.slots(blocks), key=lambda slot: (-slot.dtype.itemsize, _DTYPES[slot.dtype])
        )

    def _header(self, facts: Facts) -> bytes:
        """The only header that an update with these facts can have."""
        keys = self.scale_keys(facts.blocks)
        present = set(facts.scales)
        metadata = {
            "format": _FORMAT,
            "layout": self._fingerprint(facts.blocks),
            "span": [end for span in facts.blocks.spans for end in (span.start, span.stop)],
            "samples": facts.samples,
            "loss": facts.loss,
            "scales": f"{sum(1 << i for i, key in enumerate(keys) if key in present):x}",
        }
        header: dict[str, Any] = {"__metadata__": {"cocofl": _json(metadata)}}
        at = 0
        for name, dtype, count in self._stretches(facts):
            size = count * dtype.itemsize
            header[name] = {
                "dtype": _DTYPES[dtype],
                "shape": [count],
                "data_offsets": [at, at + size],
            }
            at += size
        text = _json(header).encode("ascii")
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _stretches(self, facts: Facts) -> Iterator[tuple[str, torch.dtype, int]]:
        """The flat tensors of the file: one per type, and the scales."""
        slots = self._in_file_order(facts.blocks)
        if not self._codec.is_exact:
            yield _ENCODED, torch.uint8, sum(map(self._size, slots))
            slots = []
        for dtype in dict.fromkeys(slot.dtype for slot in slots):
            yield _DTYPES[dtype], dtype, sum(slot.size for slot in slots if slot.dtype == dtype)
        if facts.scales:
            yield _SCALES, torch.float32, len(facts.scales)

    def _fingerprint(self, blocks: Blocks) -> str:
        """Of names, types and shapes: who has another network in mind is found out."""
        listing = [(slot.key, _DTYPES[slot.dtype], slot.shape) for slot in self.slots(blocks)]
        coded = [] if self._codec.is_exact else [repr(self._codec)]
        text = _json([listing, self.scale_keys(blocks), *coded])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    return Identity().encode(tensor, tensor, np.random.default_rng(0))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
