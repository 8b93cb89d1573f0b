"""Steps that oneDNN computes wrongly in channels-last layout: in a process that they may kill."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from cocofl import Span, freeze, split
from cocofl.freeze.layout import channels_first, enough_channels
from cocofl.freeze.lowering import lower

OWN_MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from cocofl import Span, freeze, split

class Functional(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, None, self.stride)

image = torch.randn(8, 1, 34, 34)
for kind in (nn.Conv2d, Functional):
    layer = kind(3, 11, 1, stride=2, bias=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), layer)
    chain = split(model, image)
    net = freeze(chain, Span(0, len(chain)), variant="f").train()
    for _ in range(3):
        net(image).sum().backward()
        model(image).sum().backward()
    for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
"""
FEDERATED = """
import numpy as np
from cocofl import data
from cocofl.fl.trainer import TrainerSpec, Task, Trainer
from cocofl.fl.state import ServerState
from cocofl.fl.training import Training
from cocofl.fl.widths import OrderedWork, WidthWork
from cocofl.freeze import chain_state
from cocofl.profiling.subject import Subject

digits = data.load("digits")
subject = Subject("resnet10-digits", 16, 10)
trainer = Trainer(TrainerSpec(subject, Training(batch=16, epochs=2), digits.train, digits.test))
state = ServerState(chain_state(trainer.chain()))
for work in (WidthWork(0.25), OrderedWork((0.25, 0.5))):
    trainer.train(Task(5, 2, 3, np.arange(48), work, 0.1), state)
"""


def run(script: str) -> None:
    # glibc's checks find what was written beyond a buffer when that is freed, not by chance.
    checks = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    environment = os.environ | (checks if sys.platform == "linux" else {})
    script = f"import torch\ntorch.set_num_threads(1)\n{script}\nprint('alive')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_strided_pointwise_convolution_of_few_channels_is_trained() -> None:
    run(OWN_MODEL)


def test_narrow_networks_with_strided_shortcuts_are_trained() -> None:
    run(FEDERATED)


def network(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 5, 1, stride=2))


def test_only_blocks_with_too_few_channels_leave_the_fast_layout() -> None:
    image = torch.randn(2, 3, 12, 12)
    few, enough = (
        [block.channels_last for block in lower(split(network(n), image, fine=True))]
        for n in (enough_channels() - 1, enough_channels())
    )
    assert few == [True, False]
    assert enough == [True, True]


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 5, 1, 1), (4, 5, 8, 8), (3,), ()])
def test_channels_first_has_the_strides_of_a_new_tensor(shape: tuple[int, ...]) -> None:
    x: Tensor = torch.randn(shape)
    last = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    assert channels_first(last).stride() == x.stride()
    assert torch.equal(channels_first(last), x)


def test_group_norm_of_a_frozen_block_s_output_is_left_channels_first() -> None:
    """Channels last its backward pass crashes where the input needs no gradient."""
    norm = nn.GroupNorm(2, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(norm, nn.ReLU()), nn.Conv2d(8, 4, 3))
    chain = split(model, torch.randn(2, 3, 8, 8), cuts=["0", "1"])
    assert [low.channels_last for low in lower(chain)] == [True, False, True]
    net = freeze(chain, Span(1, 2), backend="reference")
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in net.trained.parameters())
