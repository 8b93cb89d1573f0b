"""Contributions as whole numbers that can be added up, and a contribution again of their sums.

Every block has, for each float tensor, the change times the device's samples in units of 2⁻²⁴, and
for each scale whether it was measured and its value in units of 2⁻⁴⁴. One more block, which
everybody has, counts samples and the loss. So the mean over devices is off by at most 2⁻²⁵ ≈ 3e-8
per element. Changes and scales beyond ±256 are cut there, and samples at 2²⁰: then the sum over
1024 devices fits 63 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.errors import RejectedUpdate
from cocofl.fl.state import Contribution, Tensors
from cocofl.flower.secure_sum import Numbers, Sum, Terms
from cocofl.flower.updates import Contract, Slot
from cocofl.span import Blocks

MOST_SAMPLES = 2**20
LIMIT = 256.0
_CHANGE_BITS, _SCALE_BITS = 24, 44


class SummableUpdates:
    """How contributions of one network become numbers, on devices and on the server."""

    def __init__(self, contract: Contract, n_blocks: int, least: int) -> None:
        each = [Blocks.parse(f"{block}:{block + 1}") for block in range(n_blocks)]
        self._slots = [
            [slot for slot in contract.slots(block) if slot.dtype.is_floating_point]
            for block in each
        ]
        self._scales = [contract.scales(block) for block in each]
        sizes = [
            sum(math.prod(slot.shape) for slot in slots) + 2 * len(scales)
            for slots, scales in zip(self._slots, self._scales, strict=True)
        ]
        self.everybody = n_blocks
        """The block that counts samples and the loss."""
        self.terms = Terms((*sizes, 2), least)

    def numbers(self, sent: Contribution, state: Mapping[str, Tensor]) -> dict[int, Numbers]:
        """What a device has to add, by block."""
        if not sent.is_finite:
            raise RejectedUpdate("values", "the update holds NaN or infinite values")
        samples = min(sent.samples, MOST_SAMPLES)
        found = {self.everybody: np.stack([_whole(samples, 0), _whole(sent.loss, _CHANGE_BITS)])}
        for block, slots in enumerate(self._slots):
            if any(slot.key in sent.tensors for slot in slots):
                parts = [_change(slot, sent.tensors, state, samples) for slot in slots]
                parts += [_scale(slot, sent.tensors) for slot in self._scales[block]]
                found[block] = np.concatenate(parts)
        return found

    def contribution(self, sums: Mapping[int, Sum], state: Mapping[str, Tensor]) -> Contribution:
        """What devices contribute as if they were one; its change is the mean over everybody."""
        counted = sums[self.everybody]
        samples, loss = counted.numbers.view(np.int64).tolist()
        if not counted.devices <= samples <= counted.devices * MOST_SAMPLES:
            raise RejectedUpdate("samples", "the devices' samples add up to what cannot be")
        tensors = Tensors()
        for block, found in sums.items():
            if block != self.everybody:
                tensors |= self._tensors(block, found, samples, state)
        mean_loss = loss / 2**_CHANGE_BITS / counted.devices
        return Contribution(tensors, samples, mean_loss)

    def _tensors(
        self, block: int, found: Sum, samples: int, state: Mapping[str, Tensor]
    ) -> Tensors:
        numbers, at, tensors = found.numbers.view(np.int64), 0, Tensors()
        for slot in self._slots[block]:
            end = at + math.prod(slot.shape)
            mean = numbers[at:end] / 2**_CHANGE_BITS / samples
            if len(mean) and np.abs(mean).max() > LIMIT:
                raise RejectedUpdate("change", f"the sum of {slot.key!r} is what no devices send")
            change = torch.from_numpy(mean.reshape(slot.shape))
            tensors[slot.key] = state[slot.key].double() + change
            if slot.key.endswith("running_var") and bool((tensors[slot.key] < 0).any()):
                raise RejectedUpdate("values", f"the sum of {slot.key!r} is a negative variance")
            at = end
        for slot in self._scales[block]:
            count, total = numbers[at : at + 2].tolist()
            at += 2
            if not 0 <= count <= found.devices:
                raise RejectedUpdate("scales", f"{slot.key!r} was measured {count} times")
            if count:
                scale = total / 2**_SCALE_BITS / count
                if not 0 < scale <= LIMIT:
                    raise RejectedUpdate("scales", f"{slot.key!r} is {scale:g} on average")
                tensors[slot.key] = torch.tensor(scale)
        return tensors


def _change(
    slot: Slot, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], samples: int
) -> Numbers:
    change = (tensors[slot.key].double() - state[slot.key].double()).numpy().ravel()
    return _whole(np.clip(change, -LIMIT, LIMIT) * samples, _CHANGE_BITS)


def _scale(slot: Slot, tensors: Mapping[str, Tensor]) -> Numbers:
    if slot.key not in tensors:
        return np.zeros(2, np.uint64)
    # One that is too small for these units is measured, still.
    scale = max(min(float(tensors[slot.key]), LIMIT), 2.0**-_SCALE_BITS)
    return np.stack([_whole(1, 0), _whole(scale, _SCALE_BITS)])


def _whole(values: float | NDArray[np.float64], bits: int) -> Numbers:
    """Numbers in units of 2⁻ᵇⁱᵗˢ; negative ones wrap around."""
    return np.rint(np.float64(2.0**bits) * values).astype(np.int64).astype(np.uint64)
