"""Which networks a cohort can train: odd ones that ``freeze`` is tested with, and narrower ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import split
from cocofl.models import MODELS
from cocofl.models.widths import places
from cocofl.vector.training.agreement import disagreement, narrows
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


def test_a_network_that_cannot_be_quantized() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    found = disagreement(split(layers, torch.rand(4, 4, dtype=torch.float64)))
    assert found is not None
    assert found.startswith("a device alone could not train it either (CannotLower")


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


def is_part(full: nn.Module, narrow: nn.Module, x: Tensor) -> bool:
    return narrows(split(full, x), split(narrow, x), places(full, narrow))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_built_in_networks_have_narrower_ones_as_a_part(name: str) -> None:
    torch.manual_seed(0)
    full, narrow = (MODELS[name](10, width=w, tiny=True) for w in (1.0, 0.5))
    assert is_part(full, narrow, full.example_input(4))


class Between(nn.Module):
    """A function of a hidden layer's channels."""

    def __init__(self, hidden: int, function: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(6, hidden), function, nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Attention(nn.Module):
    """Of all channels with themselves."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, scale=self.scale).squeeze(1)


class InGroups(nn.Module):
    """A GroupNorm of two groups, whatever the number of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class OnlyFloat32(nn.Module):
    """A LayerNorm that takes nothing else."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float())


@pytest.mark.parametrize(
    ("of_channels", "is_known"),
    [
        (nn.LayerNorm, True),
        (lambda n: nn.LayerNorm(n, elementwise_affine=False), True),
        (OnlyFloat32, True),
        (lambda _: Attention(), True),
        (lambda n: nn.Sequential(nn.LayerNorm(n), Attention(), nn.ReLU()), True),
        # Numbers that a width changes, unknown to a cohort.
        (lambda n: Attention(n**-0.5), False),
        (InGroups, False),
        (nn.RMSNorm, False),
        (lambda _: nn.Softmax(-1), False),
    ],
)
def test_what_a_width_may_change(of_channels: Any, is_known: bool) -> None:
    torch.manual_seed(0)
    full, narrow = (Between(n, of_channels(n)) for n in (8, 4))
    assert is_part(full, narrow, torch.randn(4, 5, 6)) == is_known


class Positions(nn.Module):
    """A vector for each position, looked up by a buffer that no sample changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.places = nn.Embedding(5, 8)
        self.register_buffer("order", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x) + self.places(self.order)).mean(1))


def test_an_embedding_of_what_is_the_same_for_all_samples() -> None:
    torch.manual_seed(0)
    assert disagreement(split(Positions(), torch.randn(4, 5, 6))) is None


def test_an_example_of_zeros_says_no_more_than_its_shape() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 3))
    assert disagreement(split(net, torch.zeros(4, 3, 9))) is None
