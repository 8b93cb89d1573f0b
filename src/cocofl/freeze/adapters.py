"""Low-rank adapters (LoRA, Hu et al., ICLR 2022): small matrices that learn beside frozen maps.

A linear map ``W`` becomes ``W + alpha / rank * up · down``. ``W`` stays as it is, so it can be
computed in int8 where the block is trained, too. ``down`` begins at random and ``up`` with zeros:
at first nothing changes.

:func:`~cocofl.freeze.adapting.adapt` makes a chain with adapters of an ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting
from cocofl.freeze.layers import LinearLayer
from cocofl.freeze.state import State
from cocofl.rng import stream

PREFIX = "lora."
"""Of the keys that adapters have in a state, before the name of the layer."""
RANK, ALPHA = 8, 16.0


@dataclass(frozen=True)
class LowRank:
    """How large adapters are, and how much they count."""

    rank: int = RANK
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidSetting(f"the rank is {self.rank}; an adapter needs at least 1")
        if not 0 < self.alpha < math.inf:
            raise InvalidSetting(f"alpha is {self.alpha:g}; expected a number above 0")

    @property
    def factor(self) -> float:
        """By which what an adapter says is multiplied."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer."""

    block: int
    layer: str
    kind: LinearLayer
    down_shape: tuple[int, ...]
    up_shape: tuple[int, int]

    @property
    def weight(self) -> str:
        """The key of what it adds to."""
        return f"{self.layer}.weight"

    @property
    def down(self) -> str:
        """The key of the first factor: (rank, in, ...)."""
        return f"{PREFIX}{self.layer}.down"

    @property
    def up(self) -> str:
        """The key of the second factor: (out, rank)."""
        return f"{PREFIX}{self.layer}.up"

    def product(self, state: Mapping[str, Tensor]) -> Tensor:
        """Both factors as one weight, as the layer has it."""
        down, up = state[self.down].detach(), state[self.up].detach()
        weight = (up @ down.flatten(1)).view(len(up), *down.shape[1:])
        return self.kind.own_weight(weight)


def adapter(
    y: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    factor: float,
    stride: Sequence[int] = (),
    padding: Sequence[int] = (),
    dilation: Sequence[int] = (),
) -> Tensor:
    """What a map made of ``x``, with what its adapter adds."""
    if down.ndim == 2:
        return torch.add(y, F.linear(F.linear(x, down), up), alpha=factor)
    convolve: Any = F.conv1d if down.ndim == 3 else F.conv2d
    inner = convolve(x, down, None, tuple(stride), tuple(padding), tuple(dilation))
    pointwise = up.view(*up.shape, *[1] * (down.ndim - 2))
    return torch.add(y, convolve(inner, pointwise), alpha=factor)


class AdaptedChain(BlockChain):
    """A chain whose linear maps carry adapters; they, and the head, are all that learns.

    Its keys are those of the model, and ``lora.…`` keys beside them.
    """

    learned: tuple[tuple[str, ...], ...]

    def __init__(
        self,
        plain: BlockChain,
        blocks: Sequence[nn.Module],
        adapters: Sequence[Adapter],
        learned: Sequence[Sequence[str]],
        low_rank: LowRank,
    ) -> None:
        keys = {**plain.keys, **{key: key for own in learned for key in own}}
        named = [("", block) for block in blocks]
        rest, wiring = plain.rest, plain.wiring
        super().__init__(named, wiring=wiring, example=plain.example, rest=rest, keys=keys)
        # Not a part of this one: its modules are here already.
        self._plain = (plain,)
        self.adapters, self.low_rank = tuple(adapters), low_rank
        self.learned = tuple(map(tuple, learned))

    @property
    def plain(self) -> BlockChain:
        """The chain without adapters, which shares all else."""
        return self._plain[0]

    def fresh_adapters(self, seed: int) -> State:
        """The factors to begin with: the same for the same seed."""
        rng, found = stream(seed, "adapters"), State()
        for one in self.adapters:
            limit = 1 / math.sqrt(math.prod(one.down_shape[1:]))
            drawn = rng.uniform(-limit, limit, one.down_shape)
            like = self.blocks[one.block].get_parameter(one.up)
            found[one.down] = torch.from_numpy(drawn).to(like.dtype)
            found[one.up] = torch.zeros_like(like, requires_grad=False)
        return found

    def merged(self, state: Mapping[str, Tensor], blocks: Container[int] | None = None) -> State:
        """A state of the plain chain: the weights of ``blocks`` (all) with their adapters in them.

        One that has no adapters, since they were merged before, stays as it is.
        """
        found = {key: t for key, t in state.items() if not key.startswith(PREFIX)}
        for one in self.adapters:
            if one.down in state and (blocks is None or one.block in blocks):
                own, factor = found[one.weight], self.low_rank.factor
                found[one.weight] = torch.add(own, one.product(state).to(own), alpha=factor)
        return found
