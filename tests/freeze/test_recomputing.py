"""Trained blocks that are computed again in the backward pass: the same numbers, less memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cocofl import BlockChain, InvalidSetting, Span, freeze, split
from cocofl.freeze import VARIANTS
from cocofl.profiling.memory import peak_tensor_bytes

IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def unit(inside: int, out: int, *more: nn.Module) -> nn.Module:
    layers = [nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out, momentum=None), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), *more)


@pytest.fixture
def chain() -> BlockChain:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = nn.Sequential(unit(3, 8), unit(8, 8, nn.Dropout(0.5)), unit(8, 8), head)
    return split(model, IMAGES)


def trained(chain: BlockChain, span: Span, variant: str, *, checkpoint: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    net = freeze(chain, span, variant=variant, backend="reference", checkpoint=checkpoint)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        if step == 2:
            net.measure_scales()
        optimizer.zero_grad()
        net(IMAGES).square().sum().backward()
        optimizer.step()
    buffers = {f"buffer {key}": buffer for key, buffer in net.trained.named_buffers()}
    return net.update().tensors | buffers | {"drawn": torch.rand(1)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("span", [Span(0, 4), Span(1, 2), Span(0, 2) | Span(3, 4)])
def test_weights_statistics_scales_and_random_numbers_are_the_same_bits(variant, span, chain):
    plain, again = (trained(chain, span, variant, checkpoint=one) for one in (False, True))
    assert plain.keys() == again.keys()
    assert any(key.startswith("scales.") for key in plain)
    assert [key for key in plain if not torch.equal(plain[key], again[key])] == []


def test_it_takes_less_memory(chain):
    plain, again = (
        peak_tensor_bytes(partial(freeze, chain, Span(0, 4), checkpoint=one), (IMAGES,))
        for one in (False, True)
    )
    assert again < 0.7 * plain


def test_a_block_that_overwrites_its_input_is_refused():
    blocks = [nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1))]
    net = freeze(BlockChain(blocks, example=IMAGES), Span(0, 2), variant="f", checkpoint=True)
    with pytest.raises(InvalidSetting, match="overwrites its input"):
        net(IMAGES)
