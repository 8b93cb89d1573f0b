"""``freeze``: a chain and the blocks to train become a network for an ordinary training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cocofl.chain import BlockChain, Wiring
from cocofl.chain.blocks import Flow
from cocofl.errors import InvalidSetting, InvalidSpan
from cocofl.freeze.fusion import fused, with_batch_statistics
from cocofl.freeze.kernel_plan import FLOAT, INT8, KernelPlan
from cocofl.freeze.kernels import backend_names, kernel, safe_weight_bits
from cocofl.freeze.layout import channels_first, channels_last
from cocofl.freeze.network import Network
from cocofl.freeze.patience import told_if_long
from cocofl.freeze.precision import (
    BFLOAT16,
    FLOAT32,
    PRECISIONS,
    in_bfloat16,
    in_precision,
    tell_if_slow,
)
from cocofl.freeze.recomputing import recomputed
from cocofl.freeze.region import ChooseKernel, IntegerRegion, IntegerSettings, LearningRegion
from cocofl.freeze.scale_notes import ScaleMeter, ScaleNotes
from cocofl.freeze.state import State, Update, block_state, chain_state
from cocofl.freeze.traced_blocks import copy_block
from cocofl.numerics import HEADROOM
from cocofl.span import Blocks, Role, Span

VARIANTS = ("f", "ff", "qff")
_DEFAULT_PLAN = KernelPlan(regions=True)
_LOOKS = 3


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
    calibrate: bool = True,
    checkpoint: bool = False,
    precision: str = FLOAT32,
    state_is_checked: bool = False,
) -> FrozenNet:
    """A network that trains ``blocks`` (a span, or several) in float32 and freezes the others.

    ``variant``: ``f`` freezes only; ``ff`` also folds BatchNorm, with the server's statistics;
    ``qff`` also computes the frozen blocks in int8. ``state`` is what the server sent (by
    default the chain's own weights). ``backend`` names the int8 kernels; ``auto`` measures and
    picks the fastest per operation, computes a run of frozen blocks in float32 where that is faster
    still, and obeys ``plan`` where that has chosen already.
    ``weight_bits`` of a frozen weight are 8, or 7 where sums of ``backend`` would saturate.
    Scales that the state lacks are measured in the first mini-batch, which takes longer than those
    after it (or by :func:`calibrate` beforehand); with ``calibrate=False`` on the fly in all.
    With ``checkpoint`` trained blocks keep their inputs only, and the backward pass computes them
    again: less memory, more time, the same numbers. With ``precision="bfloat16"`` they are computed
    so; their weights, gradients and norm statistics stay float32.
    ``state_is_checked`` saves looking at every tensor again. The chain is left untouched.

    >>> from cocofl import Span, split
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = freeze(split(model, torch.ones(1, 4)), Span(1, 2), backend="reference")
    >>> sorted(net.update().tensors)
    ['2.bias', '2.weight']
    """
    network = chain if isinstance(chain, Network) else _looked_at(chain)
    blocks = _learning(network, blocks)
    _check_settings(variant, backend, headroom, weight_bits)
    _check_precision(precision, network)
    state = chain_state(network.chain) if state is None else state
    if not state_is_checked:
        network.expected.check(state, network.scale_keys)
    plan = _DEFAULT_PLAN if plan is None else plan
    settings = None
    if variant == "qff":
        bits = _weight_bits(weight_bits, backend)
        settings = IntegerSettings(_chooser(backend, plan), headroom, bits, calibrate)
        network.tell_what_stays_float()
    parts: list[Part] = []
    for part_of, region, role, own in _pieces(network, blocks, state):
        if settings is None or (role is Role.TRAINED and not network.adapted):
            again, fuse = checkpoint and role is Role.TRAINED, variant == "ff"
            parts += _float_parts(part_of, region, role, own, fuse=fuse, checkpoint=again)
        elif backend == "auto":
            parts += _faster_parts(part_of, region, role, own, settings, plan)
        else:
            parts.append(integer_part(part_of, region, role, own, settings))
    return FrozenNet(network, blocks, [part.trained_in(precision) for part in parts])


def _looked_at(chain: BlockChain) -> Network:
    if (known := Network.known(chain)) is not None:
        return known
    with told_if_long("looking at what this network computes; freezing it again takes less"):
        return Network.of(chain)


def first_blocks(chain: BlockChain | Network, count: int, state: State) -> FrozenNet:
    """The first so many blocks, all trained; it returns what the last of them hands on."""
    network = Network.of(chain)
    parts = _float_parts(network, range(count), Role.TRAINED, state, fuse=False)
    return FrozenNet(network, Span(0, count), parts)


def _pieces(
    network: Network, blocks: Blocks, state: Mapping[str, Tensor]
) -> Iterator[tuple[Network, range, Role, Mapping[str, Tensor]]]:
    """The regions of the chain: of which network each is made, its role, and its state.

    Adapters that do not learn are a part of their weights. Blocks that do are pieces of their own.
    """
    adapted, every = network.adapted, range(len(network))
    if adapted is None:
        for region, role in blocks.regions(len(network)):
            yield network, region, role, state
        return
    merged = adapted.merged(state, [index for index in every if index not in blocks])
    for region, role in blocks.regions(len(network)):
        if role is not Role.TRAINED:
            yield network.plain, region, role, merged
        else:
            for index in region:
                yield network, range(index, index + 1), role, state


def _learning(network: Network, blocks: Any) -> Blocks:
    """The blocks that are asked for, as far as they have something to learn."""
    if not isinstance(blocks, Blocks):
        raise InvalidSpan(f"the span is {blocks!r}; expected one such as cocofl.Span(2, 4)")
    blocks.check_fits(len(network))
    return network.learning(blocks)


def _check_settings(variant: str, backend: str, headroom: float, weight_bits: int | None) -> None:
    _check_choice("variant", variant, VARIANTS)
    _check_choice("backend", backend, backend_names())
    if not 1 <= headroom < math.inf:
        raise InvalidSetting(f"headroom is {headroom}; a grid needs at least its measured range, 1")
    if weight_bits not in {None, 7, 8}:
        raise InvalidSetting(f"weight_bits is {weight_bits}; expected 7 or 8")


def _check_precision(precision: str, network: Network) -> None:
    _check_choice("precision", precision, PRECISIONS)
    if precision == FLOAT32:
        return
    if network.adapted is not None:
        raise InvalidSetting(
            "low-rank adapters are trained in float32; leave out precision, or train whole blocks"
        )
    tell_if_slow()


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


class OperationInfo(NamedTuple):
    """One line of :meth:`FrozenNet.describe`."""

    block: int
    role: str
    operation: str
    kernel: str


class Part(NamedTuple):
    """One stretch of the network: a block in float32, or all blocks of one int8 region."""

    run: Callable[..., Any]
    role: Role
    blocks: range
    wiring: Wiring
    channels_last: bool = True
    recomputes: nn.Module | None = None
    """The block, where the backward pass computes it again."""
    dtype: torch.dtype | None = None
    """What floats are here, in a network that is computed in several precisions."""

    def __call__(self, *arguments: Any) -> Any:
        """What it hands on, in the layout that it runs with; of what is frozen, no gradient."""
        if self.dtype is not None:
            arguments = in_precision(arguments, self.dtype)
        if not self.channels_last:
            arguments = tuple(channels_first(x) if isinstance(x, Tensor) else x for x in arguments)
        run = partial(in_bfloat16, self.run) if self.dtype is torch.bfloat16 else self.run
        with torch.set_grad_enabled(self.role is not Role.FROZEN and torch.is_grad_enabled()):
            if self.recomputes is not None and torch.is_grad_enabled():
                return recomputed(run, self.recomputes, arguments)
            return run(*arguments)

    @property
    def precision(self) -> str:
        """Of what it computes in floats."""
        return BFLOAT16 if self.dtype is torch.bfloat16 else FLOAT32

    def trained_in(self, precision: str) -> Part:
        """In this precision if it is trained, in float32 if not."""
        if precision == FLOAT32:
            return self
        return self._replace(dtype=torch.bfloat16 if self.role is Role.TRAINED else torch.float32)


class FrozenNet(nn.Module):
    """A chain of which some blocks learn. Train it like any module.

    Call :meth:`measure_scales` before the last mini-batch, and :meth:`update` after it.
    """

    def __init__(self, network: Network, blocks: Blocks, parts: Sequence[Part]) -> None:
        super().__init__()
        self.blocks = blocks
        # Not the network itself: what is frozen must not keep the chain's float weights alive.
        self._parts, self._learned = tuple(parts), network.chain.learned
        learning, plain = network.lowered.blocks, network.plain.lowered.blocks
        self._lowered = [(learning if i in blocks else plain)[i] for i in range(len(network))]
        self._flow = Flow(network.chain.wiring[0].inputs, [part.wiring for part in parts])
        self._returns_float32 = any(part.dtype is not None for part in parts)
        self._measuring = False
        self._scales: State = {}
        modules = [(part, part.run) for part in parts if isinstance(part.run, nn.Module)]
        self.trained = nn.ModuleList(run for part, run in modules if part.role is Role.TRAINED)
        self.frozen = nn.ModuleList(run for part, run in modules if part.role is not Role.TRAINED)
        # A fused block has no training mode: its statistics are the server's.
        every = (*self.trained, *self.frozen)
        self._always_eval = [block for block in every if not block.training]

    def train(self, mode: bool = True) -> FrozenNet:
        """Set the mode of the trained blocks; folded ones stay as they are."""
        super().train(mode)
        for block in self._always_eval:
            block.eval()
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns."""
        calls = [partial(self._run, part) for part in self._parts]
        given = self._flow.in_order(inputs, named)
        result = self._flow.run(calls, [channels_last(x) for x in given])
        self._measuring = False
        if self._returns_float32:
            result = in_precision(result, torch.float32)
        returns = self._lowered[-1].returns
        return returns(**result) if returns is not None and type(result) is dict else result

    def _run(self, part: Part, *arguments: Any) -> Any:
        if part.role is Role.TRAINED and self._measuring:
            (index,) = part.blocks
            low = self._lowered[index]
            notes = ScaleNotes(low.sites, self._scales)
            if isinstance(part.run, LearningRegion):
                part.run.notes = notes
            else:
                block = low.graph(part.run)  # type: ignore[arg-type]
                part = part._replace(run=ScaleMeter(index, block, notes).run)
        return part(*arguments)

    def measure_scales(self) -> None:
        """Measure the trained blocks' scales in the next forward and backward pass.

        Meant for the last mini-batch of a round; every other one then costs nothing extra.
        """
        self._measuring = True

    @property
    def scales(self) -> State:
        """What has been measured of the trained blocks."""
        return dict(self._scales)

    def update(self) -> Update:
        """What this device uploads: tensors and scales of the trained blocks, nothing else."""
        tensors = {
            key: tensor.detach().clone(memory_format=torch.contiguous_format)
            for index, block in zip(self.blocks, self.trained, strict=True)
            for key, tensor in block_state(block).items()
            if self._learned is None or key in self._learned[index]
        }
        return Update(self.blocks, tensors | self._scales)

    def describe(self) -> list[OperationInfo]:
        """Block, role, operation and kernel of each operation."""
        found: list[OperationInfo] = []
        for part in self._parts:
            run = part.run.region if isinstance(part.run, LearningRegion) else part.run
            kernels = run.kernels if isinstance(run, IntegerRegion) else {}
            for index in part.blocks:
                low = self._lowered[index]
                for op, text in zip(low.operations, low.descriptions, strict=True):
                    kernel_name = kernels.get(op.name, part.precision)
                    found.append(OperationInfo(index, part.role.value, text, kernel_name))
        return found

    def time_shares(self, *inputs: Any, **named: Any) -> dict[str, float]:
        """Of a step's time the shares of what is trained, frozen in int8, and frozen in float32.

        Each part runs by itself, forward and, where gradients pass, backward; the least of three
        times counts. Nothing of the network changes.
        """
        seconds = dict.fromkeys(("trained", INT8, FLOAT), 0.0)

        def timed(part: Part, *arguments: Any) -> Any:
            kind = INT8 if isinstance(part.run, IntegerRegion) else FLOAT
            if part.role is Role.TRAINED:
                kind = "trained"
            taken = []
            for _ in range(_LOOKS):
                own = [_own_copy(x, part.role is not Role.FROZEN) for x in arguments]
                begin = time.perf_counter()
                result = part(*own)
                _go_backward(result)
                taken.append(time.perf_counter() - begin)
            seconds[kind] += min(taken)
            return pytree.tree_map_only(Tensor, Tensor.detach, result)

        before = {key: tensor.clone() for key, tensor in self.state_dict().items()}
        gradients = [(p, p.grad) for p in self.parameters()]
        self.zero_grad(set_to_none=True)  # and not into those that are there
        given = [channels_last(x) for x in self._flow.in_order(inputs, named)]
        self._flow.run([partial(timed, part) for part in self._parts], given)
        self.load_state_dict(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        total = sum(seconds.values())
        return {kind: taken / total for kind, taken in seconds.items()}


def _float_parts(
    network: Network,
    blocks: range,
    role: Role,
    state: Mapping[str, Tensor],
    *,
    fuse: bool,
    checkpoint: bool = False,
) -> list[Part]:
    return [
        _float_part(network, index, role, state, fuse=fuse, checkpoint=checkpoint)
        for index in blocks
    ]


def _float_part(
    network: Network,
    index: int,
    role: Role,
    state: Mapping[str, Tensor],
    *,
    fuse: bool,
    checkpoint: bool,
) -> Part:
    """One block in float32: trained, or frozen as in variants ``f`` and ``ff``."""
    low, adapted = network.lowered.blocks[index], network.adapted
    originals = network.trained_blocks if role is Role.TRAINED else network.chain.blocks
    block = copy_block(originals[index], state).train()
    if adapted is not None:
        # Behind a map stands its adapter, so no norm can be folded into it.
        block = block.eval() if fuse else with_batch_statistics(block)
        block.requires_grad_(False)
        for key in adapted.learned[index]:
            block.get_parameter(key).requires_grad_()
    elif role is not Role.TRAINED:
        block = fused(low.graph(block), low.flat_nodes) if fuse else with_batch_statistics(block)
        block.requires_grad_(False)
    if low.channels_last:
        block = block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wiring = network.chain.wiring[index]
    again = block if checkpoint else None
    return Part(block, role, range(index, index + 1), wiring, low.channels_last, again)


def _faster_parts(
    network: Network,
    blocks: range,
    role: Role,
    state: Mapping[str, Tensor],
    settings: IntegerSettings,
    plan: KernelPlan,
) -> list[Part]:
    """Consecutive frozen blocks in int8 or, with norms folded, in float32: what is faster here."""

    def integers() -> list[Part]:
        return [integer_part(network, blocks, role, state, settings)]

    def floats() -> list[Part]:
        return _float_parts(network, blocks, role, state, fuse=True)

    def contenders() -> dict[str, Callable[[], object]]:
        both = {INT8: integers(), FLOAT: floats()}
        runs = {name: _trial(network, parts) for name, parts in both.items()}
        for run in runs.values():
            run()  # warms up
        return runs

    # Calibrated, it is as fast as if all had been known.
    known = frozenset(key for key in network.scale_keys if settings.calibrate or key in state)
    region = network.lowered.signature(blocks, role is not Role.FROZEN, known)
    return floats() if plan.choose_for_region(region, contenders) == FLOAT else integers()


def _trial(network: Network, parts: Sequence[Part]) -> Callable[[], object]:
    """Run these parts on the example, backward too where gradients pass."""
    blocks, passing = parts[0].blocks, parts[0].role is not Role.FROZEN
    values = network.values_before(blocks.start)
    taken = list(network.lowered.borders(range(blocks.start, parts[-1].blocks.stop))[0])
    flow = Flow(taken, [part.wiring for part in parts])

    def run() -> None:
        given = [channels_last(_own_copy(values[name], passing)) for name in taken]
        with torch.set_grad_enabled(passing):
            result = flow.run([partial(Part.__call__, part) for part in parts], given)
        _go_backward(result)

    return run


def _go_backward(result: Any) -> None:
    """From gradients of one, where any can pass."""
    ends = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])


def _own_copy(x: Any, needs_gradient: bool) -> Any:
    """What a block may write into."""
    if isinstance(x, Tensor):
        return x.detach().requires_grad_(needs_gradient and x.is_floating_point()).clone()
    return x


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
    scheme_of = partial(lowered.scheme, blocks, role is not Role.FROZEN)
    lowered.refuse_other_than_float32(blocks)
    low = lowered.blocks
    own = [(low[i], chain.blocks[i]) for i in blocks]
    region = IntegerRegion(scheme_of, own, state, scales, settings)
    run: IntegerRegion | LearningRegion = region
    if role is Role.TRAINED:
        keys = [key for i in blocks for key in low[i].learned.values()]
        run = LearningRegion(region, {key: state[key] for key in keys})
    taken, returned = lowered.borders(blocks)
    return Part(run, role, blocks, Wiring(tuple(taken), tuple(returned)))
