"""Your own network on unequal devices: nothing to register, nothing to rewrite.

python examples/bring_your_own_model.py

A factory returns any nn.Module with an example input; the experiment names it module:function.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from cocofl import Experiment, simulate
from cocofl.experiment import model_with


class Block(nn.Module):
    """A residual block of the user's own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and what the block adds to it."""
        return torch.relu(self.norm(self.conv(x)) + x)


def network(channels: int = 16) -> tuple[nn.Module, Tensor]:
    """Images of 1×8×8 to 10 classes; `model.options` may set the channels."""
    body = [nn.Conv2d(1, channels, 3, padding=1), *(Block(channels) for _ in range(4))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*body, *head), torch.randn(32, 1, 8, 8)


def main() -> None:
    """Train it on digits for three rounds, then use it as any other module."""
    experiment = Experiment(name="mine", rounds=3).changed(
        {
            "model.name": "bring_your_own_model:network",
            "devices.per_round": 4,
            "engine.workers": 1,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(experiment, out=Path(folder) / "mine")
        model = model_with(run)
        print(f"accuracy {run.final.scores['accuracy']:.1%} after {len(run.rounds)} rounds")
        for device, group, span, fate in run.rounds[-1].devices:
            print(f"  device {device:2} ({group}) trained blocks {span}: {fate}")
        print("scores of one image:", model(torch.zeros(1, 1, 8, 8)).shape)


if __name__ == "__main__":
    main()
