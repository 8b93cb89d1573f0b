"""What a network says at several exits: classifiers behind some of its blocks.

An *exit* is a linear classifier on the means, over space or time, of what a block hands on. Exits
are tensors of the server's state beside those of the network, under keys as ``exits.5.weight`` for
that after five blocks. The last exit is the network's own classifier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.chain import BlockChain
from cocofl.errors import InvalidState
from cocofl.freeze import FrozenNet

_PREFIX = "exits."
_KEY = re.compile(r"exits\.(\d{1,4})\.(?:weight|bias)")
DIMENSIONS = {2: (), 3: (1,), 4: (2, 3)}
"""By the number of axes of a value, which of them are space or time."""


def exit_key(depth: int) -> str:
    """The name of the classifier after so many blocks."""
    return f"{_PREFIX}{depth}"


def depths_in(state: Mapping[str, Tensor]) -> list[int]:
    """After how many blocks a state has exits, ascending.

    >>> depths_in(dict.fromkeys(["exits.4.weight", "exits.4.bias", "stem.weight"], torch.ones(1)))
    [4]
    """
    return sorted({int(match[1]) for key in state if (match := _KEY.fullmatch(key))})


def pooled(values: Tensor) -> Tensor:
    """A row of features for each sample."""
    axes = DIMENSIONS[values.ndim]
    return values.mean(axes) if axes else values


class ExitScores:
    """Runs a network all of whose blocks are there to see, and says what each exit does."""

    def __init__(self, net: FrozenNet, chain: BlockChain, depths: Sequence[int]) -> None:
        self._net, self._depths, self._last = net, depths, len(chain)
        self._seen: dict[int, Tensor] = {}

        def note(depth: int, _block: Any, _inputs: Any, output: Any) -> None:
            is_one = len(chain.wiring[depth - 1].outputs) == 1
            self._seen[depth] = output if is_one else output[0]

        for depth in depths:
            net.trained[depth - 1].register_forward_hook(partial(note, depth))

    def __call__(self, inputs: Tensor, exits: Mapping[str, Tensor]) -> list[Tensor]:
        """The scores of each exit, in their order."""
        self._seen[self._last] = self._net(inputs)
        found = [self._of(depth, self._seen[depth], exits) for depth in self._depths]
        self._seen.clear()
        return found

    def _of(self, depth: int, values: Tensor, exits: Mapping[str, Tensor]) -> Tensor:
        if depth == self._last:
            return values  # of the network's own classifier
        rows, key = pooled(values), exit_key(depth)
        weight, bias = exits[f"{key}.weight"], exits[f"{key}.bias"]
        if weight.shape != (len(bias), rows.shape[-1]):
            raise InvalidState(
                f"{key}.weight has shape {list(weight.shape)}; expected {len(bias)} rows of the "
                f"{rows.shape[-1]} features that block {depth - 1} hands on"
            )
        return F.linear(rows, weight.to(rows.dtype), bias.to(rows.dtype))


def said_by(
    net: FrozenNet, chain: BlockChain, state: Mapping[str, Tensor]
) -> Callable[[Tensor], Tensor]:
    """What a whole network says: where its state has exits, the mean of what all of them do."""
    depths = depths_in(state)
    if not depths:
        return net
    for depth in depths:
        names = (f"{exit_key(depth)}.weight", f"{exit_key(depth)}.bias")
        if not 0 < depth < len(chain) or any(name not in state for name in names):
            raise InvalidState(
                f"the state has a part of {exit_key(depth)}, which is no exit of a network of "
                f"{len(chain)} blocks: expected {' and '.join(names)} after 1 to {len(chain) - 1}"
            )
    scores = ExitScores(net, chain, [*depths, len(chain)])
    return lambda inputs: torch.stack(scores(inputs, state)).mean(0)
