"""``calibrate``: the scales of a network, measured on mini-batches before it is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting
from cocofl.freeze.net import freeze
from cocofl.freeze.network import Network
from cocofl.freeze.state import State, chain_state
from cocofl.span import Span


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of one row of scores per label."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def calibrate(
    chain: BlockChain | Network,
    batches: Iterable[tuple[Any, Tensor]],
    *,
    loss: Callable[[Any, Tensor], Tensor] = cross_entropy,
    state: Mapping[str, Tensor] | None = None,
) -> State:
    """The state with the scales of every block, for :func:`freeze`; the chain is left untouched.

    Each of ``batches`` has inputs (a tensor, or a tuple of what the model takes) and labels, of
    which ``loss`` makes the gradients. Blocks run as they do when frozen, with their norms'
    statistics and without dropout, in float32; the largest of the scales of all batches counts.

    Norms whose statistics are not those of the data yet make activations of an unusual size: let
    :func:`freeze` calibrate there, which sees them as the trained blocks leave them.

    >>> from torch import nn
    >>> from cocofl import Span, freeze, split
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, y = torch.ones(3, 4), torch.tensor([0, 1, 0])
    >>> chain = split(model, x)
    >>> state = calibrate(chain, [(x, y)])
    >>> [key for key in state if key.startswith("scales.0.")]
    ['scales.0._1.output', 'scales.0._1.gradient']
    >>> net = freeze(chain, Span(1, 2), state=state, backend="reference")
    """
    network = Network.of(chain)
    state = chain_state(network.chain) if state is None else dict(state)
    plain, own = network.plain, state
    if network.adapted is not None:
        own = network.adapted.merged(state, range(len(network)))
    net = freeze(plain, Span(0, len(plain)), variant="f", state=own).eval()
    found: State = {}
    for inputs, labels in batches:
        net.measure_scales()
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        with torch.enable_grad():
            loss(net(*given), labels).backward()
        net.zero_grad(set_to_none=True)
        for key, scale in net.scales.items():
            found[key] = torch.maximum(scale, found.get(key, scale))
    if not found:
        raise InvalidSetting("calibrate needs at least one mini-batch of inputs and labels")
    return {**state, **found}
