"""What the headroom of the server's scales costs, and what it saves.

    python bench/headroom.py

A small network learns real digits in rounds. Each round a device freezes the blocks around a
random span, with the scales of the round before, and the same devices, spans and batches are
run with every headroom. Printed are the loss at the end, and how many codes saturated.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cocofl import Span, all_spans, chain_state, freeze, split
from cocofl.rng import stream

HEADROOMS = [1.0, 1.25, 1.5, 2.0, 3.0, 4.0]


def network() -> nn.Module:
    def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *layer(1, 16, 1), *layer(16, 16, 1), *layer(16, 32, 2), *layer(32, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def losses(headroom: float, seed: int, rounds: int) -> tuple[float, float]:
    """Loss on all digits after the rounds: with scales from the server, evaluated in float."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    torch.manual_seed(seed)
    chain = split(network(), x[:32])
    spans, draw = list(all_spans(len(chain))), stream(seed, "headroom")
    state: dict[str, Tensor] = chain_state(chain)
    full = Span(0, len(chain))
    for round_ in range(rounds):
        span = full if round_ == 0 else spans[draw.integers(len(spans))]
        net = freeze(chain, span, backend="reference", state=state, headroom=headroom)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(15):
            batch = torch.from_numpy(draw.integers(len(x), size=32))
            if step == 14:
                net.measure_scales()
            loss = F.cross_entropy(net(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = state | net.update().tensors
    with torch.no_grad():
        last = Span(len(chain) - 1, len(chain))
        in_float = freeze(chain, last, variant="ff", state=state).eval()(x)
        in_int8 = freeze(chain, last, backend="reference", state=state, headroom=headroom).eval()(x)
    return F.cross_entropy(in_float, y).item(), float((in_int8 - in_float).norm() / in_float.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.rounds} rounds of 15 steps, {args.seeds} seeds, reference kernels")
    print(f"{'headroom':>9} {'loss':>8} {'± std':>8} {'int8 error':>11}")
    for headroom in HEADROOMS:
        found = [losses(headroom, seed, args.rounds) for seed in range(args.seeds)]
        ends, errors = zip(*found, strict=True)
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        print(f"{headroom:9.2f} {statistics.mean(ends):8.4f} {spread:8.4f}", end=" ")
        print(f"{statistics.mean(errors):11.4f}")


if __name__ == "__main__":
    main()
