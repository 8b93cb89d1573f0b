"""What kernels of our own can do is found in a network: attention, and a norm with its sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import split
from cocofl.models import MODELS
from cocofl.vector.kernels.choice import KernelSet
from cocofl.vector.program.instructions import (
    Attend,
    Drop,
    Instruction,
    Linears,
    NormaliseSamples,
)
from cocofl.vector.program.program import Program


class Attending(nn.Module):
    """One attention with options of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.options = nn.Linear(8, 8), nn.Linear(8, 3), options

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, **self.options)
        return self.outer(y.transpose(1, 2).flatten(2).mean(1))


def instructions(model: nn.Module, x: Tensor) -> list[Instruction]:
    return Program(split(model, x), torch.device("cpu")).instructions


def test_every_layer_of_a_transformer_attends() -> None:
    model = MODELS["transformer"](3, tiny=True)
    found = [i for i in instructions(model, model.example_input(4)) if isinstance(i, Attend)]
    assert len(found) == len(model.layers)
    assert all(i.mask == "0.unsqueeze_1" and i.scale is None for i in found)


@pytest.mark.parametrize(
    ("options", "is_known"),
    [
        ({}, True),
        ({"scale": 0.25, "dropout_p": 0.0}, True),
        ({"is_causal": True}, False),
        ({"dropout_p": 0.5}, False),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, False),
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_pytorch(
    options: dict[str, Any], is_known: bool
) -> None:
    found = instructions(Attending(**options), torch.randn(4, 5, 8))
    assert any(isinstance(i, Attend) for i in found) == is_known


def test_without_a_gpu_there_is_no_kernel() -> None:
    heads = torch.randn(2, 2, 5, 4)
    assert KernelSet.on(torch.device("cpu")).attention(heads, heads, heads, None) is None
    assert KernelSet.on(torch.device("cpu")).chains(heads) is None
    assert KernelSet.on(torch.device("cpu")).linear(heads, 4) is None


@pytest.mark.parametrize(("dropout", "has_drop"), [(0.1, True), (0.0, False)])
def test_a_norm_takes_in_the_sum_and_the_dropout_before_it(dropout: float, has_drop: bool) -> None:
    model = MODELS["transformer"](3, tiny=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    found = instructions(model, model.example_input(4))
    norms = [i for i in found if isinstance(i, NormaliseSamples)]
    assert len(norms) == 2 * len(model.layers)
    assert all(i.total is not None and (i.drop is not None) == has_drop for i in norms)
    # One dropout after the embedding, whose sum is measured, and one after each ReLU stay.
    assert sum(isinstance(i, Drop) for i in found) == (1 + len(model.layers)) * has_drop


class SumReadTwice(nn.Module):
    """The sum before the norm is also what the block goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.inner(x).sigmoid()
        return self.outer(self.norm(total) * total)


def test_a_sum_that_others_read_stays() -> None:
    found = instructions(SumReadTwice(), torch.randn(4, 8))
    assert [i.total for i in found if isinstance(i, NormaliseSamples)] == [None]


def test_linear_layers_of_one_input_go_together() -> None:
    model = MODELS["transformer"](3, tiny=True)
    chain = split(model, model.example_input(4))
    program = Program(chain, torch.device("cpu"))
    found = [i for i in program.instructions if isinstance(i, Linears)]
    assert [len(i.layers) for i in found] == [3, 1, 1, 1] * len(model.layers)
    # What is added later is what the first of the network and of the hidden layer read.
    assert [i.shares for i in found] == [True, False, True, False] * len(model.layers)
    # Frozen devices still find each of them by itself.
    assert len(program.layers) == 6 * len(model.layers)
