"""A table without measuring: work per block and role, divided by what a device can do.

Time is multiply-accumulates over a rate plus bytes moved over a bandwidth. Memory is replayed
block by block. This is a rough picture (within a factor of two, often less) for where nothing was
measured; fractions are nearer to the truth than seconds, since what is wrong about a device is
wrong about full training, too. Every table made here says that it is analytic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from cocofl.chain import BlockChain
from cocofl.errors import CocoflError, InvalidSetting
from cocofl.freeze import FLOAT32, AdaptedChain, freeze, upload_sizes
from cocofl.freeze.adapters import PREFIX
from cocofl.freeze.dispatch import OperationWatch
from cocofl.profiling.configurations import Configuration, Cost
from cocofl.profiling.device_rates import Device, device_named
from cocofl.profiling.subject import (
    LEVELS,
    STEPS,
    Inputs,
    Settings,
    Subject,
    interpolated,
    six_digits,
)
from cocofl.profiling.table import ProfileTable
from cocofl.span import Blocks, Role, Span

# Costs of all others are between those of these.
COUNTED_WIDTHS = tuple(sorted({*LEVELS, *STEPS[::7], 1.0}))
# Where a model can be cut shows with few samples; only counting takes the whole mini-batch.
_SAMPLES = 2
_READ_AND_WRITE = 2.0
# How much of the bytes that float32 operations write is still written in each variant:
# fusion makes a norm part of its layer; int8 has a quarter of the bytes.
_TRAFFIC = {"f": 1.0, "ff": 0.6, "qff": 0.15}
# How much of what float32 keeps for backward a passing block keeps: masks where it is int8.
_KEPT = {"f": 1.0, "ff": 0.6, "qff": 0.12}
# Weights of a frozen block, and of a passing one with its own weights for backward.
_WEIGHTS = {"f": (1.0, 1.0), "ff": (1.0, 1.0), "qff": (0.25, 0.5)}
# What fusion and int8 leave as it is.
_STAYS_FLOAT = re.compile(
    "scaled_dot_product|layer_norm|group_norm|softmax|gelu|silu|sigmoid|hardswish"
)


@dataclass(frozen=True)
class AdapterWork:
    """What is trained of a block beside its frozen maps, with one mini-batch."""

    learned_bytes: float
    macs: float
    written_bytes: float
    saved_bytes: float
    """Kept for backward, all in all: adapters keep what their maps read, in float32."""


@dataclass
class BlockWork:
    """What one block does with one mini-batch in float32.

    ``float_macs`` of the ``macs``, and ``float_bytes`` of the ``written_bytes``, belong to
    operations such as attention that stay in float32 when the block is frozen.
    """

    parameter_bytes: float
    state_bytes: float
    macs: float = 0.0
    float_macs: float = 0.0
    written_bytes: float = 0.0
    float_bytes: float = 0.0
    saved_bytes: float = 0.0
    largest_bytes: float = 0.0
    output_bytes: float = 0.0
    adapters: AdapterWork | None = None
    """What its adapters add where they are all that is trained of it."""

    @property
    def upload_bytes(self) -> float:
        """What a device that trains it sends."""
        return self.state_bytes if self.adapters is None else self.adapters.learned_bytes

    @property
    def float_share(self) -> float:
        """The share of the bytes that are written in float32 when the block is frozen."""
        return self.float_bytes / max(self.written_bytes, 1.0)


def block_work(chain: BlockChain, inputs: Inputs) -> list[BlockWork]:
    """Count each block's work by running it once; the chain is left untouched."""
    if not isinstance(chain, AdaptedChain):
        return _counted(chain, inputs)
    whole, adapted = _counted(chain.plain, inputs), _counted(chain, inputs)
    for index in chain.learning_blocks:
        whole[index].adapters = _adapter_work(whole[index], adapted[index], chain.learned[index])
    return whole


def _adapter_work(plain: BlockWork, adapted: BlockWork, learned: Sequence[str]) -> AdapterWork:
    """What a block with adapters does more than the same without, and what it keeps in all."""
    has_head = any(not key.startswith(PREFIX) for key in learned)
    return AdapterWork(
        learned_bytes=adapted.state_bytes,
        # Of a head there is one product more, the gradient of its weight; of adapters three.
        macs=max(0.0, adapted.macs - plain.macs) + has_head * plain.macs / 3,
        written_bytes=max(0.0, adapted.written_bytes - plain.written_bytes),
        saved_bytes=adapted.saved_bytes,
    )


def _counted(chain: BlockChain, inputs: Inputs) -> list[BlockWork]:
    net = freeze(chain, Span(0, len(chain)), variant="f")
    net.train()
    # Scales are not counted: few bytes, and another table would draw other spans.
    sizes = upload_sizes(chain, scales=False)
    others = [i for i in range(len(chain)) if i not in net.blocks]
    blocks = {
        **dict(zip(net.blocks, net.trained, strict=True)),
        **dict(zip(others, net.frozen, strict=True)),
    }
    work = [
        BlockWork(sum(p.nbytes for p in blocks[i].parameters()), size)
        for i, size in enumerate(sizes)
    ]
    counter = _Counter(work[0])
    # A storage is not kept alive by a weak reference, but its address is not given to another.
    seen = {StorageWeakRef(p.untyped_storage()) for p in net.parameters()}

    def count(tensor: Tensor) -> None:
        """Let go of what backward would need: none follows, and a tensor that is given to its
        own node would never be freed."""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in seen:
            seen.add(storage)
            counter.block.saved_bytes += tensor.nbytes

    for i, counted in enumerate(work):
        blocks[i].register_forward_pre_hook(partial(counter.enter, counted))
        blocks[i].register_forward_hook(counter.leave)
    with counter, torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        net(*inputs)
    return work


class _Counter(OperationWatch):
    """Adds multiply-accumulates and the bytes that operations write to the block that runs."""

    def __init__(self, block: BlockWork) -> None:
        super().__init__()
        self.block = block

    def enter(self, block: BlockWork, _module: nn.Module, _inputs: Any) -> None:
        self.block = block

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.block.output_bytes = _nbytes(output)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = 0 if func.is_view else _nbytes(result)
        macs = 0.0
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            macs = count(*args, **(kwargs or {}), out_val=result) / 2
        elif "scaled_dot_product" in str(func):
            # Scores and the weighted sum: twice (queries × keys × channels) per head.
            macs = 2.0 * args[0].numel() * args[1].shape[-2]
        block = self.block
        block.macs += macs
        block.written_bytes += written
        block.largest_bytes = max(block.largest_bytes, written)
        if _STAYS_FLOAT.search(str(func)):
            block.float_macs += macs
            block.float_bytes += written
        return result


def _nbytes(value: Any) -> int:
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.is_floating_point())


def step_seconds(
    work: Sequence[BlockWork],
    trained: Blocks,
    variant: str,
    device: Device,
    *,
    checkpoint: bool = False,
) -> float:
    """The time of one step when a set of blocks is trained.

    With ``checkpoint`` these go forward twice.
    """
    first = min(trained)
    again = 4 / 3 if checkpoint else 1.0
    return sum(
        block_seconds(block, trained.role(i), variant, device) * (again if i in trained else 1.0)
        # With adapters most of its input gradient is needed inside the block itself.
        - (block.macs / device.float32_macs_per_s if i == first and not block.adapters else 0.0)
        for i, block in enumerate(work)
    )


def block_seconds(block: BlockWork, role: Role, variant: str, device: Device) -> float:
    """Forward, and backward where the role has one: input gradients, and those of weights."""
    moved = _READ_AND_WRITE * block.written_bytes / device.bytes_per_s
    if role is Role.TRAINED and (more := block.adapters) is not None:
        beside = _READ_AND_WRITE * more.written_bytes / device.bytes_per_s
        passing = block_seconds(block, Role.PASSING, variant, device)
        return passing + 3 * (more.macs / device.float32_macs_per_s + beside)
    if role is Role.TRAINED:
        return 3 * (block.macs / device.float32_macs_per_s + moved)
    rate = device.int8_macs_per_s if variant == "qff" else device.float32_macs_per_s
    passes = 1 if role is Role.FROZEN else 2
    in_float = block.float_macs / device.float32_macs_per_s
    # Of what fusion or int8 leave; some of the block may stay as it is.
    share = block.float_share + (1 - block.float_share) * _TRAFFIC[variant]
    return passes * ((block.macs - block.float_macs) / rate + in_float + moved * share)


def peak_bytes(
    work: Sequence[BlockWork],
    trained: Blocks,
    variant: str,
    input_bytes: float,
    *,
    checkpoint: bool = False,
) -> float:
    """The peak of live tensor bytes: forward up to the loss, then backward, block by block.

    With ``checkpoint`` trained blocks keep what they hand on until backward comes to them.
    """
    roles = trained.roles(len(work))
    frozen_share, passing_share = _WEIGHTS[variant]
    element = 0.25 if variant == "qff" else 1.0
    alive = input_bytes
    for block, role in zip(work, roles, strict=True):
        if role is Role.TRAINED and block.adapters is not None:
            alive += passing_share * block.parameter_bytes + 2 * block.adapters.learned_bytes
        elif role is Role.TRAINED:
            alive += block.state_bytes + block.parameter_bytes  # weights and their gradients
        else:
            share = frozen_share if role is Role.FROZEN else passing_share
            alive += share * block.parameter_bytes
    peak, kept = alive, []
    for block, role in zip(work, roles, strict=True):
        scale = 1.0 if role is Role.TRAINED else element
        peak = max(peak, alive + scale * (block.largest_bytes + block.output_bytes))
        if role is Role.FROZEN:
            kept.append(0.0)
        elif role is Role.TRAINED and block.adapters is not None:
            kept.append(block.adapters.saved_bytes)
        elif role is Role.TRAINED and checkpoint:
            kept.append(block.output_bytes)
        else:
            as_masks = role is Role.PASSING and block.float_share == 0
            kept.append((_KEPT[variant] if as_masks else 1.0) * block.saved_bytes)
        alive += kept[-1]
        peak = max(peak, alive)
    for block, role, share in zip(work[::-1], roles[::-1], kept[::-1], strict=True):
        if role is Role.FROZEN:
            break
        scale = 1.0 if role is Role.TRAINED else element
        again = block.saved_bytes if role is Role.TRAINED and checkpoint else 0.0
        peak = max(peak, alive + again + 2 * scale * block.largest_bytes)
        alive -= share
    return peak


Work = tuple[list[BlockWork], Inputs]
"""What each block does with a mini-batch, and that."""
Costs = dict[Configuration, Cost]


def analytic_table(settings: Settings, device: str = "x64") -> ProfileTable:
    """The table of every span or width, from counting alone."""
    (table,) = analytic_tables(settings, [device])
    return table


def analytic_tables(settings: Settings, devices: Sequence[str]) -> list[ProfileTable]:
    """A table for each of these devices, from counting the network's work once."""
    if settings.precision != FLOAT32:
        raise InvalidSetting(
            f"no device's rate in {settings.precision} is known, so costs cannot be counted; "
            "measure them, without --analytic"
        )
    rates = {name: device_named(name) for name in devices}
    widths = COUNTED_WIDTHS if settings.method == "width" else (None,)
    counted = {width: work_of(settings, width) for width in widths}
    n_blocks = len(next(iter(counted.values()))[0])
    return [
        settings.table(
            _costs(settings, counted, one), n_blocks, source="analytic", backend=f"analytic {name}"
        )
        for name, one in rates.items()
    ]


def _costs(settings: Settings, counted: Mapping[float | None, Work], device: Device) -> Costs:
    """What every span or width costs a device, from the work of the network or of widths of it."""
    if settings.method == "width":
        known = {
            width: cost_of(work, Span(0, len(work)), "f", inputs, device)
            for width, (work, inputs) in counted.items()
            if width is not None
        }
        return interpolated(known)
    costs: Costs = {}
    work, inputs = counted[None]
    if settings.is_compared:
        plain = [replace(block, adapters=None) for block in work]
        costs[1.0] = cost_of(plain, Span(0, len(work)), "f", inputs, device)
    learning = [i for i, block in enumerate(work) if block.adapters or not settings.rank]
    for blocks in settings.spans(learning):
        costs[blocks] = cost_of(
            work, blocks, settings.variant, inputs, device, checkpoint=settings.checkpoint
        )
    return costs


def work_of(subject: Subject, width: float | None = None) -> Work:
    """The work of each block on a mini-batch."""
    try:
        chain, inputs = subject.chain(width, samples=_SAMPLES)
        return block_work(chain, inputs), inputs
    except (CocoflError, RuntimeError):  # perhaps a model that takes one batch size only
        chain, inputs = subject.chain(width)
        return block_work(chain, inputs), inputs


def cost_of(
    work: Sequence[BlockWork],
    trained: Blocks,
    variant: str,
    inputs: Inputs,
    device: Device,
    *,
    checkpoint: bool = False,
) -> Cost:
    """What one step costs when a set of blocks is trained."""
    input_bytes = sum(x.nbytes for x in inputs)
    memory = peak_bytes(work, trained, variant, input_bytes, checkpoint=checkpoint)
    seconds = step_seconds(work, trained, variant, device, checkpoint=checkpoint)
    upload = sum(work[i].upload_bytes for i in trained)
    return Cost(six_digits(seconds), None, round(memory), round(upload))
