"""``freeze``: a chain and the blocks to train become a network for an ordinary training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting, InvalidSpan
from cocofl.freeze.block_copy import copy_block
from cocofl.freeze.floating import fused, with_batch_statistics
from cocofl.freeze.kernel_plan import KernelPlan
from cocofl.freeze.kernels import backend_names, kernel, safe_weight_bits
from cocofl.freeze.layout import channels_first
from cocofl.freeze.network import Network
from cocofl.freeze.observe import ScaleMeter
from cocofl.freeze.region import ChooseKernel, IntegerRegion, IntegerSettings, OperationInfo
from cocofl.freeze.state import State, Update, block_state, chain_state, check_state
from cocofl.numerics import HEADROOM
from cocofl.span import Blocks, Role

VARIANTS = ("f", "ff", "qff")
_DEFAULT_PLAN = KernelPlan()


def freeze(
    chain: BlockChain | Network,
    blocks: Blocks,
    *,
    variant: str = "qff",
    backend: str = "auto",
    state: Mapping[str, Tensor] | None = None,
    headroom: float = HEADROOM,
    weight_bits: int | None = None,
    plan: KernelPlan | None = None,
    state_is_checked: bool = False,
) -> FrozenNet:
    """A network that trains ``blocks`` (a span, or several) in float32 and freezes the others.

    ``variant``: ``f`` freezes only; ``ff`` also folds BatchNorm, with the server's statistics;
    ``qff`` also computes the frozen blocks in int8. ``state`` is what the server sent (by
    default the chain's own weights). ``backend`` names the int8 kernels; ``auto`` measures and
    picks the fastest per operation, and obeys ``plan`` where that has chosen already.
    ``weight_bits`` of a frozen weight are 8, or 7 where sums of ``backend`` would saturate.
    ``state_is_checked`` saves looking at every tensor again for each device of a round.
    The chain is left untouched.

    >>> from cocofl import Span, split
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = freeze(split(model, torch.ones(1, 4)), Span(1, 2), backend="reference")
    >>> sorted(net.update().tensors)
    ['2.bias', '2.weight']
    """
    network = Network.of(chain)
    if not isinstance(blocks, Blocks):
        raise InvalidSpan(f"the span is {blocks!r}; expected one such as cocofl.Span(2, 4)")
    blocks.check_fits(len(network))
    _check_choice("variant", variant, VARIANTS)
    _check_choice("backend", backend, backend_names())
    if not 1 <= headroom < math.inf:
        raise InvalidSetting(f"headroom is {headroom}; a grid needs at least its measured range, 1")
    if weight_bits not in {None, 7, 8}:
        raise InvalidSetting(f"weight_bits is {weight_bits}; expected 7 or 8")
    if state is None:
        state = chain_state(network.chain)
    if not state_is_checked:
        check_state(network.chain, state, network.scale_keys)
    if variant != "qff":
        parts = _float_parts(network, blocks, state, fuse=variant == "ff")
    else:
        settings = IntegerSettings(
            choose=_chooser(backend, _DEFAULT_PLAN if plan is None else plan),
            headroom=headroom,
            weight_bits=_weight_bits(weight_bits, backend),
        )
        parts = _integer_parts(network, blocks, state, settings)
    return FrozenNet(network, blocks, parts)


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidSetting(f"unknown {what} {value!r}; expected one of {', '.join(choices)}")


def _weight_bits(asked: int | None, backend: str) -> int:
    safe = safe_weight_bits(backend)
    if asked is not None and asked > safe:
        raise InvalidSetting(
            f"weight_bits is {asked}, but on this processor sums of backend {backend!r} saturate "
            f"with more than {safe}; leave it out, or use backend='reference'"
        )
    return asked or safe


def _chooser(backend: str, plan: KernelPlan) -> ChooseKernel:
    if backend == "auto":
        return plan.choose
    forced = kernel(backend)
    return lambda _: forced


class Part(NamedTuple):
    """One stretch of the network: a block in float32, or all blocks of one int8 region."""

    run: Callable[..., Any]
    role: Role
    blocks: range
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    channels_last: bool = True


class FrozenNet(nn.Module):
    """A chain of which some blocks learn. Train it like any module.

    Call :meth:`measure_scales` before the last mini-batch, and :meth:`update` after it.
    """

    def __init__(self, network: Network, blocks: Blocks, parts: Sequence[Part]) -> None:
        super().__init__()
        self.blocks = blocks
        # Not the network itself: what is frozen must not keep the chain's float weights alive.
        self._parts, self._lowered = tuple(parts), network.lowered.blocks
        self._inputs = network.chain.wiring[0].inputs
        self._finished = _finished_after(parts)
        self._measuring = False
        self._scales: State = {}
        modules = [(part, part.run) for part in parts if isinstance(part.run, nn.Module)]
        self.trained = nn.ModuleList(run for part, run in modules if part.role is Role.TRAINED)
        self.frozen = nn.ModuleList(run for part, run in modules if part.role is not Role.TRAINED)
        # A fused block has no training mode: its statistics are the server's.
        self._always_eval = [block for block in self.frozen if not block.training]

    def train(self, mode: bool = True) -> FrozenNet:
        """Set the mode of the trained blocks; folded ones stay as they are."""
        super().train(mode)
        for block in self._always_eval:
            block.eval()
        return self

    def forward(self, *inputs: Any) -> Any:
        """What the model returns."""
        if len(inputs) != len(self._inputs):
            raise InvalidSetting(
                f"the network takes {len(self._inputs)} inputs ({', '.join(self._inputs)}), "
                f"not {len(inputs)}"
            )
        values = {name: _fast_layout(x) for name, x in zip(self._inputs, inputs, strict=True)}
        del inputs
        result: Any = None
        for part, finished in zip(self._parts, self._finished, strict=True):
            arguments = [values[name] for name in part.inputs]
            for name in finished:
                values.pop(name, None)
            result = self._run(part, arguments)
            many = len(part.outputs) > 1
            values.update(zip(part.outputs, result if many else [result], strict=True))
        self._measuring = False
        return result

    def _run(self, part: Part, arguments: list[Any]) -> Any:
        if not part.channels_last:
            arguments = [channels_first(x) if isinstance(x, Tensor) else x for x in arguments]
        if part.role is Role.FROZEN:
            with torch.no_grad():
                return part.run(*arguments)
        if part.role is Role.TRAINED and self._measuring:
            (index,) = part.blocks
            block = self._lowered[index].graph(part.run)  # type: ignore[arg-type]
            meter = ScaleMeter(index, block, self._lowered[index], self._scales)
            return meter.run(*arguments)
        return part.run(*arguments)

    def measure_scales(self) -> None:
        """Measure the trained blocks' scales in the next forward and backward pass.

        Meant for the last mini-batch of a round; every other one then costs nothing extra.
        """
        self._measuring = True

    def update(self) -> Update:
        """What this device uploads: tensors and scales of the trained blocks, nothing else."""
        tensors = {
            key: tensor.detach().clone(memory_format=torch.contiguous_format)
            for block in self.trained
            for key, tensor in block_state(block).items()
        }
        return Update(self.blocks, tensors | self._scales)

    def describe(self) -> list[OperationInfo]:
        """Block, role, operation and kernel of each operation."""
        found: list[OperationInfo] = []
        for part in self._parts:
            if isinstance(part.run, IntegerRegion):
                found += part.run.operations
                continue
            (index,) = part.blocks
            texts = self._lowered[index].descriptions
            found += [OperationInfo(index, part.role.value, text, "float32") for text in texts]
        return found


def _fast_layout(x: Any) -> Any:
    """Images channels last: what every fast convolution wants."""
    if isinstance(x, Tensor) and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _finished_after(parts: Sequence[Part]) -> list[list[str]]:
    """Per part, the values that no later part takes."""
    finished: list[list[str]] = []
    later: set[str] = set()
    for part in reversed(parts):
        finished.append([name for name in part.inputs if name not in later])
        later.update(part.inputs)
    return finished[::-1]


def _float_part(network: Network, block: nn.Module, role: Role, index: int) -> Part:
    wiring = network.chain.wiring[index]
    channels_last = network.lowered.blocks[index].channels_last
    if channels_last:
        block = block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if role is not Role.TRAINED:
        block.requires_grad_(False)
    blocks = range(index, index + 1)
    return Part(block, role, blocks, wiring.inputs, wiring.outputs, channels_last)


def _trained_part(network: Network, index: int, state: Mapping[str, Tensor]) -> Part:
    block = copy_block(network.trained_blocks[index], state).train()
    return _float_part(network, block, Role.TRAINED, index)


def _float_parts(
    network: Network, trained: Blocks, state: Mapping[str, Tensor], *, fuse: bool
) -> list[Part]:
    parts = []
    for index, role in enumerate(trained.roles(len(network))):
        if role is Role.TRAINED:
            parts.append(_trained_part(network, index, state))
            continue
        block, low = copy_block(network.chain.blocks[index], state), network.lowered.blocks[index]
        if fuse:
            block = fused(low.graph(block), low.flat_nodes)
        else:
            block = with_batch_statistics(block.train())
        parts.append(_float_part(network, block, role, index))
    return parts


def _integer_parts(
    network: Network, trained: Blocks, state: Mapping[str, Tensor], settings: IntegerSettings
) -> list[Part]:
    parts = []
    for blocks, role in trained.regions(len(network)):
        if role is Role.TRAINED:
            parts += [_trained_part(network, index, state) for index in blocks]
        else:
            parts.append(integer_part(network, blocks, role, state, settings))
    return parts


def integer_part(
    network: Network,
    blocks: range,
    role: Role,
    state: Mapping[str, Tensor],
    settings: IntegerSettings,
) -> Part:
    """Consecutive frozen blocks as one int8 region."""
    lowered, chain = network.lowered, network.chain
    # By key: a model may have tensors whose names begin like those of scales.
    scales = {key: float(state[key]) for key in network.scale_keys if key in state}
    scheme = lowered.scheme(blocks, role is Role.PASSING, frozenset(scales))
    low = lowered.blocks
    own = [(i, low[i], low[i].graph(copy_block(chain.blocks[i], state))) for i in blocks]
    region = IntegerRegion(scheme, own, scales, settings)
    borders = lowered.borders(blocks)
    return Part(region, role, blocks, tuple(borders.taken), tuple(borders.returned))
