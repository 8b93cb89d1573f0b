"""Whether a chain's devices compute together what each computes alone, tried out on its example.

A network may do anything; what a cohort makes of it is right or is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from cocofl.chain import BlockChain
from cocofl.errors import CocoflError
from cocofl.freeze import State, chain_state, freeze
from cocofl.models.widths import Place
from cocofl.span import Span
from cocofl.vector.training.cohort import Cohort, DeviceWork
from cocofl.vector.training.levels import factor_row
from cocofl.vector.training.losses import one_by_one
from cocofl.vector.training.optimizer import Sgd

_SAMPLES = 4
_LR = 0.05
# Of the length of a tensor's change: where sums differ in their last bit, int8 codes tip over.
_TOLERANCES = {"f": 0.02, "ff": 0.02, "qff": 0.3}
# Of the largest change of all: a bias before a norm has no gradient but for rounding.
_ROUNDING = 1e-3
_OTHERWISE = "stacked it would learn something else"
_FAILURES = (CocoflError, RuntimeError, ValueError, LookupError, TypeError, AssertionError)


def disagreement(chain: BlockChain) -> str | None:
    """Why devices should train this chain one after the other; None where they can together."""
    if chain.example is None:
        return "it has no example input to try it with"
    still, reason = _without_dropout(chain), None
    # One tipped code can turn a small gradient around. A mistake shows with any input.
    for factor in (1.0, 0.9, 1.1):
        assert still.example is not None
        reason = _try_out(still, _few(still.example, factor))
        if reason is None or not reason.startswith(_OTHERWISE):
            break
    return reason


def narrows(chain: BlockChain, narrow: BlockChain, places: Mapping[str, Place]) -> bool:
    """Whether a narrower network, at ``places`` of a chain's tensors, learns as if by itself.

    So it is where channels meet only in layers and in instructions that are told how many there
    are.
    """
    # In float32 a sum in another order may open a ReLU; but not all networks know float64.
    for dtype in (torch.float64, torch.float32):
        try:
            return _narrows(_still_in(dtype, chain), _still_in(dtype, narrow), places)
        except _FAILURES:
            continue
    return False


def _narrows(wide: BlockChain, narrow: BlockChain, places: Mapping[str, Place]) -> bool:
    begin, state = chain_state(narrow), chain_state(wide)
    for key, tensor in begin.items():
        state[key] = state[key].clone()
        state[key][places[key]] = tensor
    assert narrow.example is not None
    inputs = narrow.example
    cohort = _cohort(wide, inputs, 1)
    factors = factor_row(cohort.program.layout.parameters, places)
    level = cohort.add_level(factors, cohort.program.channels_in(narrow))
    work = DeviceWork(cohort.everything, "f", _LR, level=level)
    (update,) = _together(cohort, state, [work])
    found = {key: tensor[places[key]] for key, tensor in update.items()}
    return _difference(_alone(narrow, work, inputs), found, begin, _TOLERANCES["f"]) is None


def _try_out(chain: BlockChain, inputs: tuple[Any, ...]) -> str | None:
    n = len(chain)
    works = [
        DeviceWork(Span(0, n), "qff", _LR),
        DeviceWork(Span(0, 1), "qff", _LR),
        DeviceWork(Span(0, 1), "f", _LR),
        DeviceWork(Span(n - 1, n), "ff", _LR),
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            alone = [_alone(chain, work, inputs) for work in works]
            again = _alone(chain, works[0], inputs)
        except _FAILURES as e:
            return f"a device alone could not train it either ({type(e).__name__}: {e})"
        try:
            together = _together(_cohort(chain, inputs, len(works)), chain_state(chain), works)
        except _FAILURES as e:
            return f"it has no stacked form ({type(e).__name__}: {e})"
    begin = chain_state(chain)
    if (key := _difference(alone[0], again, begin, 0.0)) is not None:
        return f"it draws random numbers of its own ({key} differs between two tries)"
    for work, one, found in zip(works, alone, together, strict=True):
        if (key := _difference(one, found, begin, _TOLERANCES[work.variant])) is not None:
            return f"{_OTHERWISE} (at {key}, blocks {work.blocks} trained)"
    return None


def _without_dropout(chain: BlockChain) -> BlockChain:
    still = deepcopy(chain)
    for module in still.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return still


def _still_in(dtype: torch.dtype, chain: BlockChain) -> BlockChain:
    """Without dropout, with few samples as its example, in another precision."""
    still = _without_dropout(chain).to(dtype)
    assert still.example is not None
    few = _few(still.example)
    still.example = tuple(x.to(dtype) if x.is_floating_point() else x for x in few)
    return still


def _few(example: tuple[Any, ...], factor: float = 1.0) -> tuple[Any, ...]:
    """The first samples, their numbers (not tokens, say) times ``factor``."""
    size = len(example[0])
    first, *others = example
    if first.is_floating_point() and not first.any():
        # Zeros say what shape samples have, and no more: norms would have nothing to divide.
        drawn = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
        example = (drawn.to(first), *others)
    few = [x[:_SAMPLES] if len(x) == size else x for x in example]
    return tuple(x * factor if x.is_floating_point() else x for x in few)


def _energy(outputs: Any, _labels: Tensor | None = None) -> Tensor:
    """A loss that any output has."""
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return torch.stack([x.square().mean() for x in leaves if x.is_floating_point()]).sum()


def _alone(chain: BlockChain, work: DeviceWork, inputs: tuple[Any, ...]) -> State:
    state = chain_state(chain)
    net = freeze(chain, work.blocks, variant=work.variant, backend="reference", state=state).train()
    if work.variant == "qff":
        net.measure_scales()
    trained = [p for p in net.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=work.lr)
    _energy(net(*[x.clone() for x in inputs])).backward()
    sgd.step()
    return net.update().tensors


def _cohort(chain: BlockChain, inputs: tuple[Any, ...], devices: int) -> Cohort:
    batch = len(inputs[0])
    labels = torch.zeros(batch, dtype=torch.long)
    return Cohort(
        chain,
        lambda i: (tuple(x[i] for x in inputs), labels[i]),
        devices=devices,
        batch=batch,
        optimizer=Sgd(),
        loss=one_by_one(_energy),
        precision="fp32",
    )


def _together(cohort: Cohort, state: State, works: list[DeviceWork]) -> list[State]:
    """What each device sends after one step on all of the cohort's samples."""
    indices = np.broadcast_to(np.arange(cohort.batch), (1, len(works), cohort.batch)).copy()
    valid = np.full((1, len(works)), cohort.batch)
    cohort.train(cohort.rows_of([state]), [frozenset()], works, indices, valid)
    return [cohort.update(cohort.rows_now(d), work) for d, work in enumerate(works)]


def _difference(expected: State, found: State, begin: State, tolerance: float) -> str | None:
    """A key that only one of them has, or at which they went different ways from ``begin``."""
    for key in sorted(expected.keys() ^ found.keys()):
        return key
    floats = {k for k, t in expected.items() if t.is_floating_point() and k in begin}
    changes = {key: float((expected[key] - begin[key]).norm()) for key in floats}
    rounding = _ROUNDING * max(changes.values(), default=0.0)
    for key, change in changes.items():
        if not (found[key] - expected[key]).norm() <= tolerance * change + rounding:
            return key
    return None
