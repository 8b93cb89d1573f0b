"""The contract of an update: how a device's contribution travels, and what the server accepts.

Both sides know the network, so an update does not name its tensors. It says which blocks it is of,
and then come the values of exactly these blocks' tensors, in the network's own order, as one flat
tensor per type; scales follow, with a bit for each that the blocks can have. An unknown key, a
missing tensor or half a block cannot be said in this language, and a few hundred bytes are all that
is sent besides the values.

It also says what it answers: a round, a nonce that only this device was given, and a fingerprint of
the state that it began with. So an old update cannot be sent again, nor one for another device.

The bytes are a safetensors file with one line of JSON as metadata. There is only one way to write
an update: the server makes the header that the metadata asks for, and compares. Nothing is
allocated before sizes agree, and nothing is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cocofl.budget import bytes_text
from cocofl.chain import BlockChain
from cocofl.errors import RejectedUpdate
from cocofl.fl.codec import Codec, Identity, is_encoded
from cocofl.fl.state import Contribution, Tensors
from cocofl.freeze import Network
from cocofl.freeze.state import trained_state
from cocofl.span import Blocks, Span

MAX_SAMPLES = 1_000_000
MAX_CHANGE = 1.0
"""Measured, honest updates are 0.03 to 0.35 of 1 + the norm of what they change."""
SCALES = (1e-20, 1e6)
"""No scale is outside: measured are 4e-6 to 0.14, of gradients and of values."""
_FORMAT = "cocofl update 2"
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
_json = json.JSONEncoder(separators=(",", ":")).encode


class Request(NamedTuple):
    """What an update answers. Its header says so, and so it is good for nothing else."""

    round_index: int = 0
    nonce: str = ""
    """Drawn for one device in one round, and told to nobody else."""
    state: str = ""
    """A fingerprint of the state that the device was given."""


UNASKED = Request()
"""Of an update that nobody asked for, which no server takes."""


class Slot(NamedTuple):
    """One tensor of the network, or a scale, and what it is in an update."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    codec: Codec
    stretch: str
    """The flat tensor of the file that holds its values."""

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return self.codec.size_bytes(self.shape, self.dtype)


class _Facts(NamedTuple):
    """What a device says about its update."""

    blocks: Blocks
    samples: int
    loss: float
    scales: int
    """A bit for each scale of the blocks that is there."""


class Contract:
    """What updates of one network look like; devices and server make it from the same model.

    >>> from torch import nn
    >>> from cocofl import split
    >>> chain = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
    >>> contract = Contract(chain)
    >>> state = {slot.key: torch.zeros(slot.shape) for slot in contract.slots(Span(0, 2))}
    >>> trained = {"2.weight": torch.full((2, 8), 0.1), "2.bias": torch.full((2,), 0.1)}
    >>> sent = contract.encode(Contribution(trained, 5))
    >>> blocks, received = contract.decode(sent, state)
    >>> str(blocks), received.samples, sorted(received.tensors)
    ('1:2', 5, ['2.bias', '2.weight'])
    >>> contract.decode(sent[:-1], state)
    Traceback (most recent call last):
    cocofl.errors.RejectedUpdate: 1:2 needs 72 bytes of values; 71 came
    """

    def __init__(
        self,
        chain: BlockChain,
        codec: Codec | None = None,
        *,
        max_samples: int = MAX_SAMPLES,
        max_change: float = MAX_CHANGE,
    ) -> None:
        self._codec = codec or Identity()
        self._max_samples, self._max_change = max_samples, max_change
        self._slots = [
            [self._slot(key, tensor) for key, tensor in trained_state(chain, index).items()]
            for index in range(len(chain))
        ]
        self._scales = [
            [Slot(key, torch.float32, (), Identity(), _SCALES) for key in keys]
            for keys in Network.of(chain).block_scale_keys
        ]
        everything = Span(0, len(self._slots))
        slots, scales = self.slots(everything), self.scales(everything)
        # A bit for every scale, and the ends of every other block.
        self._header_limit = _HEADER_BYTES + len(scales) + 8 * len(self._slots)
        self.max_bytes = 8 + self._header_limit + sum(slot.nbytes for slot in slots + scales)

    def _slot(self, key: str, tensor: Tensor) -> Slot:
        codec = self._codec if is_encoded(key, tensor) else Identity()
        stretch = _DTYPES[tensor.dtype] if self._codec.is_exact else _ENCODED
        return Slot(key, tensor.dtype, tuple(tensor.shape), codec, stretch)

    def slots(self, blocks: Blocks) -> list[Slot]:
        """The tensors of blocks, in order."""
        return [slot for block in blocks for slot in self._slots[block]]

    def scales(self, blocks: Blocks) -> list[Slot]:
        """The scales that a device can measure in blocks."""
        return [slot for block in blocks for slot in self._scales[block]]

    # --- the device's side -----------------------------------------------------------------------

    def encode(self, contribution: Contribution, request: Request = UNASKED) -> bytes:
        """A contribution as bytes, which answer a request; it must be of whole blocks."""
        tensors, payloads = contribution.tensors, contribution.payloads
        blocks = self._blocks_of(tensors)
        bits = sum(1 << i for i, slot in enumerate(self.scales(blocks)) if slot.key in tensors)
        facts = _Facts(blocks, contribution.samples, float(contribution.loss), bits)
        header, slots = self._form(facts, request)
        encode, rng = Identity().encode, np.random.default_rng(0)
        return header + b"".join(
            payloads.get(slot.key) or encode(tensors[slot.key], tensors[slot.key], rng)
            for slot in slots
        )

    def _blocks_of(self, tensors: Mapping[str, Tensor]) -> Blocks:
        touched = [
            f"{index}:{index + 1}"
            for index, block in enumerate(self._slots)
            if any(slot.key in tensors for slot in block)
        ]
        if not touched:
            raise RejectedUpdate("span", "the contribution has no tensor of the network")
        blocks = Blocks.parse("+".join(touched))
        wanted = {slot.key: slot for slot in self.slots(blocks)}
        measured = {slot.key for slot in self.scales(blocks)}
        for key in sorted(wanted.keys() ^ (tensors.keys() - measured)):
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

    def decode(
        self, payload: bytes, state: Mapping[str, Tensor], request: Request = UNASKED
    ) -> tuple[Blocks, Contribution]:
        """What a device that was asked sent for a state, if every bit of it is as it should be.

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
        facts = self._facts(payload, request)
        blocks = facts.blocks
        header, slots = self._form(facts, request)
        if not payload.startswith(header):
            raise RejectedUpdate("format", "the header is not the one that belongs to its metadata")
        ends = list(accumulate((slot.nbytes for slot in slots), initial=len(header)))
        if len(payload) != ends[-1]:
            wanted, came = ends[-1] - len(header), len(payload) - len(header)
            raise RejectedUpdate("size", f"{blocks} needs {wanted} bytes of values; {came} came")
        found = {
            slot.key: _value(slot, payload[begin:end], state)
            for slot, (begin, end) in zip(slots, pairwise(ends), strict=True)
        }
        self._check_change(found, state, blocks)
        # In the network's own order, as a device's contribution has them.
        order = self.slots(blocks) + self.scales(blocks)
        tensors = {slot.key: found[slot.key] for slot in order if slot.key in found}
        return blocks, Contribution(tensors, facts.samples, facts.loss)

    def _facts(self, payload: bytes, request: Request) -> _Facts:
        """What the metadata says of an answer to a request."""
        length = int.from_bytes(payload[:8], "little")
        if len(payload) < 8 or not 2 <= length <= min(self._header_limit, len(payload) - 8):
            raise RejectedUpdate("format", "the update is no safetensors file of this size")
        try:
            text = json.loads(payload[8 : 8 + length].decode("ascii"))["__metadata__"]["cocofl"]
            content: Any = json.loads(text)
            ends, samples, loss = content["span"], content["samples"], content["loss"]
            bits = int(content["scales"], 16)
            answered = content["round"], content["nonce"], content["state"]
        # A header is hostile until it is known: deep nesting and long numbers are mistakes too.
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RejectedUpdate("format", f"the metadata cannot be read: {error!r:.200}") from None
        _check_request(answered, request)
        blocks = self._read_blocks(ends)
        most = self._max_samples
        if not (type(samples) is int and 1 <= samples <= most):
            raise RejectedUpdate(
                "samples", f"the update claims {samples!r:.20} samples; expected 1 to {most}"
            )
        if not (isinstance(loss, float) and math.isfinite(loss)):
            raise RejectedUpdate("values", f"the loss is {loss!r:.20}; expected a finite number")
        if not 0 <= bits < 2 ** len(self.scales(blocks)):
            raise RejectedUpdate("scales", f"the update has scales that {blocks} does not have")
        return _Facts(blocks, samples, loss, bits)

    def _read_blocks(self, ends: Any) -> Blocks:
        """Blocks from the ends of their spans; each begins after the one before has ended."""
        count = len(self._slots)
        are_numbers = isinstance(ends, list) and all(type(end) is int for end in ends)
        in_order = sorted(set(ends) & set(range(count + 1))) if are_numbers else []
        if not in_order or in_order != ends or len(ends) % 2:
            raise RejectedUpdate(
                "span", f"the span is {ends!r:.60}; the network has {count} blocks"
            )
        spans = zip(ends[::2], ends[1::2], strict=True)
        return Blocks.parse("+".join(f"{start}:{stop}" for start, stop in spans))

    def _check_change(self, new: Tensors, state: Mapping[str, Tensor], blocks: Blocks) -> None:
        keys = [slot.key for slot in self.slots(blocks)]
        size = math.hypot(*(float(state[key].double().norm()) for key in keys))
        change = math.hypot(*(float((new[key].double() - state[key]).norm()) for key in keys))
        most = self._max_change * (1 + size)
        if not change <= most:
            raise RejectedUpdate(
                "change",
                f"the update moves {blocks} by {change:.3g}; at most {most:.3g} "
                f"is allowed (max_change = {self._max_change:g})",
            )

    # --- the form --------------------------------------------------------------------------------

    def _form(self, facts: _Facts, request: Request) -> tuple[bytes, list[Slot]]:
        """The only header that an update with these facts can have, and what follows it."""
        blocks, samples, loss, bits = facts
        slots, scales = self.slots(blocks), self.scales(blocks)
        # Who has another network in mind is found out by names, types and shapes.
        listing = [(slot.key, _DTYPES[slot.dtype], slot.shape) for slot in slots]
        layout: list[Any] = [listing, [slot.key for slot in scales]]
        if not self._codec.is_exact:
            layout.append(repr(self._codec))
        metadata = {
            "format": _FORMAT,
            "round": request.round_index + 1,
            "nonce": request.nonce,
            "state": request.state,
            "layout": hashlib.sha256(_json(layout).encode()).hexdigest()[:16],
            "span": [end for span in blocks.spans for end in (span.start, span.stop)],
            "samples": samples,
            "loss": loss,
            "scales": f"{bits:x}",
        }
        header: dict[str, Any] = {"__metadata__": {"cocofl": _json(metadata)}}
        # Tensors of one type lie together, wider types first so that all are aligned.
        slots.sort(key=lambda slot: (-slot.dtype.itemsize, _DTYPES[slot.dtype]))
        slots += [slot for i, slot in enumerate(scales) if bits >> i & 1]
        at = 0
        for name, stretch in groupby(slots, lambda slot: slot.stretch):
            held = list(stretch)
            dtype = torch.uint8 if name == _ENCODED else held[0].dtype
            end = at + sum(slot.nbytes for slot in held)
            header[name] = {
                "dtype": _DTYPES[dtype],
                "shape": [(end - at) // dtype.itemsize],
                "data_offsets": [at, end],
            }
            at = end
        text = _json(header).encode("ascii")
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, slots


def _check_request(answered: tuple[Any, Any, Any], request: Request) -> None:
    """Refuse what answers another request: an old update is not worth anything now."""
    number, nonce, state = answered
    if number != (asked := request.round_index + 1):
        said = f"round {number}" if type(number) is int else "no round"
        raise RejectedUpdate("request", f"the update is of {said}; asked was round {asked}")
    if nonce != request.nonce:
        raise RejectedUpdate("request", "the update answers another request than this device's")
    if state != request.state:
        raise RejectedUpdate("request", "the update was made from another state than was sent")


def _value(slot: Slot, payload: bytes, state: Mapping[str, Tensor]) -> Tensor:
    """A tensor from its bytes, if it can be one."""
    is_scale = slot.stretch == _SCALES
    try:
        found = slot.codec.decode(payload, torch.empty(()) if is_scale else state[slot.key])
    except Exception as error:  # whatever a codec of the user's makes of hostile bytes
        raise RejectedUpdate("format", f"{slot.key!r}: {error!r:.200}") from error
    if tuple(found.shape) != slot.shape or found.dtype != slot.dtype:
        raise RejectedUpdate("layout", f"{slot.key!r} is decoded to another shape or type")
    if not bool(torch.isfinite(found).all()):
        raise RejectedUpdate("values", f"{slot.key!r} holds NaN or infinite values")
    if is_scale and not SCALES[0] <= float(found) <= SCALES[1]:
        raise RejectedUpdate(
            "scales",
            f"{slot.key!r} is {float(found):.3g}; expected a number from {SCALES[0]:g} to "
            f"{SCALES[1]:g}",
        )
    if slot.key.endswith("running_var") and bool((found < 0).any()):
        raise RejectedUpdate("values", f"{slot.key!r} holds a negative variance")
    return found
