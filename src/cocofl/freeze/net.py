"""``freeze``: a chain and the blocks to train become a network for an ordinary training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocofl.chain import BlockChain, Wiring
from cocofl.errors import CannotLower, InvalidSetting, InvalidSpan
from cocofl.freeze.floating import fused, with_batch_statistics
from cocofl.freeze.kernels import kernel, safe_weight_bits
from cocofl.freeze.layout import channels_first
from cocofl.freeze.lean import lean_blocks
from cocofl.freeze.lowering import LoweredBlock, lower
from cocofl.freeze.observe import ScaleMeter
from cocofl.freeze.plan import KernelPlan
from cocofl.freeze.region import ChooseKernel, IntegerRegion, Row
from cocofl.freeze.state import State, Update, block_state, chain_state, check_state, scales_of
from cocofl.freeze.twins import twin
from cocofl.numerics import HEADROOM
from cocofl.span import Blocks, Role

VARIANTS = ("f", "ff", "qff")
BACKENDS = ("auto", "reference", "onednn", "legacy")

_DEFAULT_PLAN = KernelPlan()


def freeze(
    chain: BlockChain,
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
    ``state_is_checked`` saves looking at every tensor again for each device of a round.
    The chain is left untouched.

    >>> from cocofl import Span, split
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = freeze(split(model, torch.ones(1, 4)), Span(1, 2), backend="reference")
    >>> sorted(net.update().tensors)
    ['2.bias', '2.weight']
    """
    if not isinstance(chain, BlockChain):
        raise InvalidSetting(
            f"freeze takes a BlockChain, not a {type(chain).__name__}; "
            "make one with cocofl.split(model, example)"
        )
    if not isinstance(blocks, Blocks):
        raise InvalidSpan(f"the span is {blocks!r}; expected one such as cocofl.Span(2, 4)")
    blocks.check_fits(len(chain))
    _check_choice("variant", variant, VARIANTS)
    _check_choice("backend", backend, BACKENDS)
    if not 1 <= headroom < math.inf:
        raise InvalidSetting(f"headroom is {headroom}; a grid needs at least its measured range, 1")
    if weight_bits not in {None, 7, 8}:
        raise InvalidSetting(f"weight_bits is {weight_bits}; expected 7 or 8")
    lowered = lower(chain)
    if state is None:
        state = chain_state(chain)
    if not state_is_checked:
        check_state(chain, state, lowered)
    if variant != "qff":
        parts = _float_parts(chain, blocks, state, lowered, fuse=variant == "ff")
    else:
        integer = IntegerSettings(
            choose=_chooser(backend, _DEFAULT_PLAN if plan is None else plan),
            headroom=headroom,
            weight_bits=weight_bits or (8 if backend == "reference" else safe_weight_bits()),
        )
        parts = _integer_parts(chain, blocks, state, lowered, integer)
    return FrozenNet(chain, blocks, lowered, parts)


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidSetting(f"unknown {what} {value!r}; expected one of {', '.join(choices)}")


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


class IntegerSettings(NamedTuple):
    """How frozen blocks are computed in int8."""

    choose: ChooseKernel
    headroom: float
    weight_bits: int


class FrozenNet(nn.Module):
    """A chain of which some blocks learn. Train it like any module.

    Call :meth:`measure_scales` before the last mini-batch, and :meth:`update` after it.
    """

    def __init__(
        self,
        chain: BlockChain,
        blocks: Blocks,
        lowered: Sequence[LoweredBlock],
        parts: Sequence[Part],
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self._parts, self._lowered = tuple(parts), tuple(lowered)
        self._inputs = chain.wiring[0].inputs
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

    def describe(self) -> list[Row]:
        """Block, role, operation and kernel, one row per operation."""
        rows: list[Row] = []
        for part in self._parts:
            if isinstance(part.run, IntegerRegion):
                rows += part.run.rows
                continue
            (index,) = part.blocks
            texts = self._lowered[index].descriptions
            rows += [Row(index, part.role.value, text, "float32") for text in texts]
        return rows


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


def _float_part(
    block: nn.Module, role: Role, index: int, wiring: Wiring, channels_last: bool
) -> Part:
    if channels_last:
        block = block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if role is not Role.TRAINED:
        block.requires_grad_(False)
    blocks = range(index, index + 1)
    return Part(block, role, blocks, wiring.inputs, wiring.outputs, channels_last)


def _float_parts(
    chain: BlockChain,
    trained: Blocks,
    state: Mapping[str, Tensor],
    lowered: Sequence[LoweredBlock],
    *,
    fuse: bool,
) -> list[Part]:
    parts = []
    for index, (block, wiring) in enumerate(zip(chain.blocks, chain.wiring, strict=True)):
        role, low = trained.role(index), lowered[index]
        if role is Role.TRAINED:
            own = twin(lean_blocks(chain)[index], state).train()
        elif fuse:
            own = fused(low.graph(twin(block, state)), low.flat_nodes)
        else:
            own = with_batch_statistics(twin(block, state).train())
        parts.append(_float_part(own, role, index, wiring, low.channels_last))
    return parts


def _integer_parts(
    chain: BlockChain,
    trained: Blocks,
    state: Mapping[str, Tensor],
    lowered: Sequence[LoweredBlock],
    settings: IntegerSettings,
) -> list[Part]:
    parts = []
    for blocks, role in trained.regions(len(chain)):
        if role is not Role.TRAINED:
            parts.append(integer_part(chain, blocks, role, state, lowered, settings))
            continue
        for index in blocks:
            block = twin(lean_blocks(chain)[index], state).train()
            wiring, channels_last = chain.wiring[index], lowered[index].channels_last
            parts.append(_float_part(block, role, index, wiring, channels_last))
    return parts


def integer_part(
    chain: BlockChain,
    blocks: range,
    role: Role,
    state: Mapping[str, Tensor],
    lowered: Sequence[LoweredBlock],
    settings: IntegerSettings,
) -> Part:
    """Consecutive frozen blocks as one int8 region."""
    borders = region_borders(chain, blocks, lowered)
    region = IntegerRegion(
        [(i, lowered[i], lowered[i].graph(twin(chain.blocks[i], state))) for i in blocks],
        inputs=tuple(borders.taken.values()),
        outputs=_one_or_many(borders.returned.values()),
        scales=scales_of(state, lowered),
        non_negative=frozenset[str]().union(*(low.non_negative for low in lowered)),
        headroom=settings.headroom,
        weight_bits=settings.weight_bits,
        choose=settings.choose,
        passing=role is Role.PASSING,
    )
    return Part(region, role, blocks, tuple(borders.taken), tuple(borders.returned))


class RegionBorders(NamedTuple):
    """What a run of blocks takes and returns: names in the chain, and what the region has them by.

    What is returned may be a structure of several values.
    """

    taken: dict[str, str]
    returned: dict[str, Any]


def region_borders(
    chain: BlockChain, blocks: range, lowered: Sequence[LoweredBlock]
) -> RegionBorders:
    """The values that enter and leave consecutive blocks."""
    produced: dict[str, Any] = {}  # by the name in the chain, what the region calls it
    taken: dict[str, str] = {}
    for index in blocks:
        wiring, low = chain.wiring[index], lowered[index]
        for name, value in zip(wiring.inputs, low.inputs, strict=True):
            if name not in produced:
                taken[name] = value
        many = len(wiring.outputs) > 1
        produced.update(zip(wiring.outputs, low.outputs if many else [low.outputs], strict=True))
    for one, other in combinations(taken, 2):
        if taken[one] == taken[other]:
            raise CannotLower(
                f"{one!r} and {other!r} are one value once dropout is gone, but block "
                f"{blocks.start} takes both; hand on one of them"
            )
    if blocks.stop == len(chain):
        outputs: tuple[str, ...] = chain.wiring[-1].outputs
    else:
        later = {name for wiring in chain.wiring[blocks.stop :] for name in wiring.inputs}
        outputs = tuple(name for name in produced if name in later)
    return RegionBorders(taken, {name: produced[name] for name in outputs})


def _one_or_many(items: Iterable[Any]) -> Any:
    found = tuple(items)
    return found[0] if len(found) == 1 else found
