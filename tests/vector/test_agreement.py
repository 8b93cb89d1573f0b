"""Which of the odd networks that ``freeze`` is tested with a cohort can train."""

from __future__ import annotations

import pytest
import torch

from cocofl import split
from cocofl.models import MODELS
from cocofl.vector.agreement import disagreement
from tests.freeze.networks import NETWORKS

ALONE = {
    # Samples change places, or a size is part of the result.
    "ConcatenatedToABatch": "it has no stacked form",
    "SizeInTheOutput": "it has no stacked form",
    # Randomness that is no dropout module's.
    "FunctionalDropout": "it has no stacked form",
    "StochasticDepth": "it draws random numbers of its own",
    # The scales of a chunk and of what it was cut from are not the same keys.
    "WholeTupleOutput": "stacked it would learn something else",
}
A_FEW = [*ALONE, *list(NETWORKS)[::16]]


def check(name: str) -> None:
    network = NETWORKS[name]
    torch.manual_seed(0)
    found = disagreement(split(network.build(), network.inputs))
    if name in ALONE:
        assert found is not None
        assert found.startswith(ALONE[name])
    else:
        assert found is None


@pytest.mark.parametrize("name", A_FEW)
def test_a_few_networks(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_built_in_networks(name: str) -> None:
    """The engine relies on this: it tries out only networks of others."""
    torch.manual_seed(0)
    model = MODELS[name](10, tiny=True)
    assert disagreement(split(model, model.example_input(4))) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in A_FEW])
def test_all_other_networks(name: str) -> None:
    check(name)
