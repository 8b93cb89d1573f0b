"""States and updates: what the server sends, what a device sends back.

A state is a flat dict of tensors: the model's own state-dict keys, and ``scales.…`` keys beside
them. An update is the same for the trained blocks only. ``num_batches_tracked`` is in neither:
it counts one device's batches, so an average of it means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cocofl.chain import BlockChain
from cocofl.errors import InvalidState
from cocofl.named import nearest
from cocofl.span import Blocks

State = dict[str, Tensor]

_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Update:
    """What a device uploads: parameters, norm statistics and scales of the blocks it trained."""

    blocks: Blocks
    tensors: State

    @property
    def nbytes(self) -> int:
        """The upload volume."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def block_state(block: nn.Module) -> State:
    """The tensors of a block that are merged: parameters and norm statistics."""
    return {key: tensor for key, tensor in block.state_dict().items() if not key.endswith(_COUNTER)}


def trained_state(chain: BlockChain, index: int) -> State:
    """The tensors of a block that a device which trains it sends."""
    own = block_state(chain.blocks[index])
    return own if chain.learned is None else {key: own[key] for key in chain.learned[index]}


def chain_state(chain: BlockChain) -> State:
    """The chain's own weights as a state; no scale has been measured yet."""
    return {key: t.clone() for block in chain.blocks for key, t in block_state(block).items()}


class ExpectedState:
    """What a state of this chain consists of; made once, it spares walking through the modules."""

    def __init__(self, chain: BlockChain) -> None:
        own = {key: t for block in chain.blocks for key, t in block_state(block).items()}
        self._like = {key: (tensor.shape, tensor.dtype) for key, tensor in own.items()}
        self._tolerated = frozenset(chain.state_dict())
        """Nobody merges these, but a whole model's state has them."""

    def check(self, state: Mapping[str, Tensor], scales: Collection[str] | None) -> None:
        """Refuse a state that does not fit, naming what is wrong and what is expected.

        ``scales`` are the keys that scales may have; None for any.
        """
        expected = self._like.keys()
        for key, (shape, dtype) in self._like.items():
            if key not in state:
                raise InvalidState(
                    f"the state lacks {key!r}; expected a tensor of shape {list(shape)}"
                )
            _check_tensor(key, state[key], shape, dtype)
        _check_finite({key: state[key] for key in expected})
        allowed = {k for k in state if k.startswith("scales.") and (scales is None or k in scales)}
        _check_scales({key: state[key] for key in allowed - expected})
        for key in sorted(state.keys() - expected - allowed - self._tolerated):
            hint = nearest(key, sorted(expected | set(scales or ())))
            raise InvalidState(f"the state has {key!r}, which this chain does not know{hint}")


def check_state(
    chain: BlockChain, state: Mapping[str, Tensor], scales: Collection[str] | None
) -> None:
    """Refuse a state that does not fit the chain: see :meth:`ExpectedState.check`."""
    ExpectedState(chain).check(state, scales)


def _check_tensor(key: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidState(f"{key!r} is a {type(tensor).__name__}; expected a tensor")
    if tensor.shape != shape:
        raise InvalidState(
            f"{key!r} has shape {list(tensor.shape)}; the chain expects {list(shape)}"
        )
    if tensor.dtype != dtype:
        raise InvalidState(f"{key!r} is {tensor.dtype}; the chain expects {dtype}")


def _check_finite(tensors: State) -> None:
    floats = {key: t for key, t in tensors.items() if t.is_floating_point()}
    # A sum takes a tenth of the time of a closer look, and is finite only where all numbers are.
    vectors = [t for t in floats.values() if t.ndim == 1]  # most of them, and all small
    others = [t for t in floats.values() if t.ndim != 1]
    sums = [t.sum().float() for t in ([torch.cat(vectors)] if vectors else []) + others]
    if not sums or torch.stack(sums).isfinite().all():
        return
    for key, tensor in floats.items():
        if not tensor.isfinite().all():
            raise InvalidState(f"{key!r} holds NaN or infinite values; expected finite numbers")


def _check_scales(scales: State) -> None:
    for key, tensor in scales.items():
        if not isinstance(tensor, Tensor) or tensor.numel() != 1:
            raise InvalidState(f"{key!r} must be a tensor of one element")
        if not 0 < (scale := tensor.item()) < math.inf:
            raise InvalidState(f"{key!r} is {scale}; a scale is a positive, finite number")
