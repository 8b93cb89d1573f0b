"""One step in int8: a cohort rounds to the codes that ``freeze`` rounds to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl import BlockChain, Blocks, Span, chain_state, freeze, numerics
from cocofl.freeze import State
from cocofl.freeze.gradient import InputGradient
from cocofl.numerics import Codes, Grid
from cocofl.vector import DeviceWork
from tests.vector.test_cohort import BATCH, cohort_of, tiny


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """All codes that are made, each tensor as one row: both engines round in one place."""
    found: list[Tensor] = []
    levels, interleave = numerics.levels, InputGradient._interleave

    def keep(codes: Tensor) -> None:
        images = codes.ndim == 4 and codes.shape[0] == BATCH
        found.append((codes.permute(0, 2, 3, 1) if images else codes).reshape(-1).clone())

    def record(x: Tensor, *grid: Tensor | float) -> Tensor:
        codes = levels(x, *grid)  # type: ignore[arg-type]
        keep(codes)
        return codes

    def record_whole(self: InputGradient, gradient: Codes, out: Grid | None) -> Codes | Tensor:
        """Of a gradient that is made of parts, not the parts, which overlap its border."""
        before = len(found)
        whole = interleave(self, gradient, out)
        del found[before:]
        if isinstance(whole, Codes):
            keep(whole.values.float() - whole.grid.zero_point)
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "levels", record)
        patch.setattr(InputGradient, "_interleave", record_whole)
        yield found


def share_of_equal_codes(one: list[Tensor], other: list[Tensor]) -> float:
    """Each tensor of codes beside the one of the others that is most like it."""
    rest, equal = list(other), 0.0
    for codes in one:
        same = [
            (float((codes == candidate).double().mean()), i)
            for i, candidate in enumerate(rest)
            if candidate.shape == codes.shape
        ]
        assert same, "a tensor that only one of them rounds"
        best, i = max(same)
        equal += best * len(codes)
        rest.pop(i)
    return equal / sum(map(len, one))


def step_alone(
    chain: BlockChain, span: Blocks, state: State, x: Tensor, y: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The codes of the serial engine's step: on the way forward, and back."""
    net = freeze(chain, span, variant="qff", backend="reference", state=state).train()
    with recorded() as codes:
        loss = F.cross_entropy(net(x), y)
        forward = len(codes)
        loss.backward()
    return codes[:forward], codes[forward:]


def measured(chain: BlockChain, x: Tensor, y: Tensor) -> State:
    """The chain's state with a scale for everything, as after a round."""
    net = freeze(chain, Span(0, len(chain)), variant="qff", backend="reference").train()
    net.measure_scales()
    F.cross_entropy(net(x), y).backward()
    state = chain_state(chain)
    return state | {key: t for key, t in net.update().tensors.items() if key not in state}


@pytest.mark.parametrize("name", ["mobilenet", "resnet18", "densenet40", "transformer"])
@pytest.mark.parametrize("where", ["first", "middle", "last", "apart"])
@pytest.mark.parametrize("scales", ["known", "unknown"])
def test_one_step(name: str, where: str, scales: str) -> None:
    chain, x, y = tiny(name, torch.float32)
    n = len(chain)
    first, middle, last = Span(0, 1), Span(n // 2, n // 2 + 1), Span(n - 1, n)
    span = {"first": first, "middle": middle, "last": last, "apart": middle | last}[where]
    own, labels = x[:BATCH], y[:BATCH]
    state = measured(chain, own, labels) if scales == "known" else chain_state(chain)
    forward, backward = step_alone(chain, span, state, own, labels)
    cohort = cohort_of(chain, x, y, devices=1)
    known = frozenset(key for key in cohort.program.sites.keys if key in state)
    one = np.arange(BATCH)[None, None], np.full((1, 1), BATCH)
    with recorded() as stacked:
        cohort.train(cohort.rows_of([state]), [known], [DeviceWork(span, "qff", 0.05)], *one)
    assert forward
    assert share_of_equal_codes(forward, stacked) >= 0.999
    share = share_of_equal_codes([*forward, *backward], stacked)
    if share < 0.999:
        # Sums in another order tip one code of a hundred thousand over, and it tips others. So it
        # is when the serial engine gets the samples in another order, or weights with other last
        # bits.
        turned = step_alone(chain, span, state, own.flip(0), labels.flip(0))
        again = [codes.view(BATCH, -1).flip(0).reshape(-1) for part in turned for codes in part]
        nearly = {key: t * (1 + 1e-6 * torch.randn(t.shape)) for key, t in state.items()}
        nudged = step_alone(chain, span, nearly, own, labels)
        alike = min(
            share_of_equal_codes([*forward, *backward], other)
            for other in (again, [codes for part in nudged for codes in part])
        )
        assert 1 - share <= 1.5 * (1 - alike)
