"""A chain with all that freezing knows of it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from functools import cache, cached_property
from itertools import combinations
from typing import Any

from torch import nn

from cocofl.chain import BlockChain
from cocofl.errors import CannotLower, InvalidSetting, InvalidSpan
from cocofl.freeze.adapters import AdaptedChain
from cocofl.freeze.lowering import lower
from cocofl.freeze.memory_saving import memory_saving
from cocofl.freeze.operations import LoweredBlock, NodeOp
from cocofl.freeze.scheme import GRADIENT, OUTPUT, Grids, QuantizationScheme, scale_key
from cocofl.freeze.state import ExpectedState, trained_state
from cocofl.freeze.work import Work, run_example, work_of
from cocofl.span import Blocks

logger = logging.getLogger(__name__)
_SCALE_BYTES = 4
_MOST = 0.5


class LoweredChain:
    """The operations of a chain's blocks, and how regions of them are computed in int8."""

    def __init__(self, chain: BlockChain, blocks: tuple[LoweredBlock, ...]) -> None:
        self._wiring, self.blocks = chain.wiring, blocks
        self._dtypes = [
            {str(p.dtype): key for key, p in block.named_parameters()} for block in chain.blocks
        ]
        """Of each block the types of its parameters, each with one that is of it."""
        self.shapes = {name: shape for low in blocks for name, shape in low.shapes.items()}
        """Of all float values, on the example."""
        self._non_negative = frozenset[str]().union(*(low.non_negative for low in blocks))
        self.scheme = cache(self._scheme)
        self.signature = cache(self._signature)

    def _scheme(self, blocks: range, passing: bool, known: frozenset[str]) -> QuantizationScheme:
        """Of consecutive blocks, where these scales are known."""
        operations = [op for i in blocks for op in self.blocks[i].operations]
        grids = Grids(operations, self._non_negative, known)
        taken, returned = (tuple(values.values()) for values in self.borders(blocks))
        outputs = returned[0] if len(returned) == 1 else returned
        given = (*taken, *(name for i in blocks for name in self.blocks[i].learned))
        return QuantizationScheme.of(operations, grids, given, outputs, self.shapes, passing)

    def _signature(self, blocks: range, passing: bool, known: frozenset[str]) -> str:
        """The same for regions that take as long, whatever their weights are."""
        low = [self.blocks[i] for i in blocks]
        operations = [(b.descriptions, tuple(b.shapes.values()), b.channels_last) for b in low]
        sites = {site for b in low for site in b.sites}
        scales = sum(scale_key(site, way) in known for site in sites for way in (OUTPUT, GRADIENT))
        text = repr((operations, [sorted(self._dtypes[i]) for i in blocks], passing, scales))
        return f"region {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def refuse_other_than_float32(self, blocks: range) -> None:
        """Codes stand for nothing else."""
        for index in blocks:
            for dtype, key in self._dtypes[index].items():
                if dtype != "torch.float32":
                    raise CannotLower(
                        f"int8 needs a float32 network, but {key!r} of block {index} is {dtype}; "
                        "convert it with model.float(), or use variant='ff'"
                    )

    def borders(self, blocks: range) -> tuple[dict[str, str], dict[str, Any]]:
        """What consecutive blocks take and return: by the name in the chain, what they have it by.

        What is returned may be a structure of several values.
        """
        produced: dict[str, Any] = {}  # by the name in the chain, what the region calls it
        taken: dict[str, str] = {}
        for index in blocks:
            wiring, low = self._wiring[index], self.blocks[index]
            for name, value in zip(wiring.inputs, low.inputs, strict=True):
                if name not in produced:
                    taken[name] = value
            produced |= wiring.handed_on(low.outputs)
        for one, other in combinations(taken, 2):
            if taken[one] == taken[other]:
                raise CannotLower(
                    f"{one!r} and {other!r} are one value once dropout is gone, but block "
                    f"{blocks.start} takes both; hand on one of them"
                )
        later = {name for wiring in self._wiring[blocks.stop :] for name in wiring.inputs}
        at_end = blocks.stop == len(self.blocks)
        outputs = self._wiring[-1].outputs if at_end else [n for n in produced if n in later]
        return taken, {name: produced[name] for name in outputs}


class Network:
    """A chain, its lowered operations and rewritten blocks: built once, never changed.

    ``freeze`` and cohorts take it in place of the chain.
    """

    def __init__(self, chain: BlockChain) -> None:
        if not isinstance(chain, BlockChain):
            raise InvalidSetting(
                f"freeze takes a BlockChain, not a {type(chain).__name__}; "
                "make one with cocofl.split(model, example)"
            )
        self.chain, blocks = chain, lower(chain)
        self.lowered: LoweredChain
        self.plain = self
        """The network without adapters, which frozen blocks are made of."""
        if isinstance(chain, AdaptedChain):
            self.plain = Network.of(chain.plain)
            blocks = tuple(map(_learning, blocks, self.plain.lowered.blocks, chain.learned))
        self.lowered = LoweredChain(chain, blocks)
        self._told = False

    @classmethod
    def of(cls, chain: BlockChain | Network) -> Network:
        """The network of a chain; a chain keeps its own, so that it is built once."""
        if isinstance(chain, Network):
            return chain
        found = cls.known(chain)
        if found is None:
            found = cls(chain)
            chain._network = found  # type: ignore[assignment]
        return found

    @staticmethod
    def known(chain: BlockChain) -> Network | None:
        """The network that a chain keeps, if it has been looked at."""
        found: Network | None = getattr(chain, "_network", None)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a chain may be changed before it is used: its network is built anew."""
        return type(None), ()

    def __len__(self) -> int:
        return len(self.chain)

    @property
    def adapted(self) -> AdaptedChain | None:
        """The chain where it has adapters."""
        return self.chain if isinstance(self.chain, AdaptedChain) else None

    def learning(self, blocks: Blocks) -> Blocks:
        """Those of the blocks that have something to learn."""
        found = blocks.only(self.chain.learning_blocks)
        if found is None:
            raise InvalidSpan(
                f"{blocks} has nothing to learn: no adapter is there, and not the head"
            )
        return found

    def values_before(self, block: int) -> dict[str, Any]:
        """What the example has become when it reaches a block, by name."""
        return run_example(self.chain, lambda own, arguments: own(*arguments), block)

    @cached_property
    def expected(self) -> ExpectedState:
        """What a state of the chain consists of."""
        return ExpectedState(self.chain)

    @cached_property
    def with_dropout(self) -> LoweredChain:
        """The same with dropout as operations, which devices that train a block need."""
        if self.plain is self and not any(block.drops for block in self.lowered.blocks):
            return self.lowered
        return LoweredChain(self.chain, lower(self.chain, keep_dropout=True))

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """The multiplications of each block, and how many of them have an int8 form."""
        return work_of(self.chain, self.lowered.blocks)

    @cached_property
    def int8_share(self) -> float:
        """Of all multiplications, the share that has an int8 form; 1 where there are none."""
        total = sum(one.every for one in self.work)
        return sum(one.int8 for one in self.work) / total if total else 1.0

    @cached_property
    def what_stays_float(self) -> str:
        """A line about the other share; empty where that is less than half."""
        if self.int8_share >= _MOST:
            return ""
        names = sorted(frozenset[str]().union(*(one.float_layers for one in self.work)))
        where = f" (in {', '.join(names)})" if names else ""
        left = 100 * (1 - self.int8_share)
        return f"frozen, {left:.0f} % of this network's multiplications stay in float32{where}"

    def tell_what_stays_float(self) -> None:
        """Once."""
        if self.plain is not self:
            self.plain.tell_what_stays_float()
        elif not self._told and self.what_stays_float:
            logger.warning(self.what_stays_float)
        self._told = True

    @cached_property
    def trained_blocks(self) -> tuple[nn.Module, ...]:
        """The chain's blocks, rewritten to take less memory where they are trained."""
        return tuple(memory_saving(block) for block in self.chain.blocks)

    @cached_property
    def block_scale_keys(self) -> tuple[tuple[str, ...], ...]:
        """Of each block the scales that a device measures when it trains it, in order."""
        return tuple(
            tuple(scale_key(site, way) for site in block.sites for way in (OUTPUT, GRADIENT))
            for block in self.lowered.blocks
        )

    @cached_property
    def scale_keys(self) -> tuple[str, ...]:
        """Of all blocks."""
        return tuple(key for keys in self.block_scale_keys for key in keys)


def _learning(low: LoweredBlock, plain: LoweredBlock, learned: tuple[str, ...]) -> LoweredBlock:
    """A block with adapters: what learns is given to it, and scales are those of the plain one."""
    read = {
        op.name: str(op.nodes[0].target)
        for op in low.operations
        if isinstance(op, NodeOp) and op.nodes[0].op == "get_attr" and op.nodes[0].target in learned
    }
    pairs = zip(low.operations, low.descriptions, strict=True)
    kept = [(op, text) for op, text in pairs if op.name not in read]
    operations, descriptions = zip(*kept, strict=True) if kept else ((), ())
    return replace(
        low, operations=operations, descriptions=descriptions, sites=plain.sites, learned=read
    )


def upload_sizes(chain: BlockChain | Network, *, scales: bool) -> list[int]:
    """The bytes that a device sends of each block that it trains, with its scales or without.

    Scales are measured by those who freeze in int8 (variant ``qff``).
    """
    network = Network.of(chain)
    return [
        sum(tensor.nbytes for tensor in trained_state(network.chain, index).values())
        + (_SCALE_BYTES * len(keys) if scales else 0)
        for index, keys in enumerate(network.block_scale_keys)
    ]
