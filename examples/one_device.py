"""One device: what fits, what it costs, what it uploads.

python examples/one_device.py
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from cocofl import Span, chain_state, freeze, split
from cocofl.models import MODELS


def main() -> None:
    """Train three spans of a MobileNetV2 on real digits, next to training all of it."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    x = F.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    y = torch.tensor(labels)

    torch.manual_seed(0)
    chain = split(MODELS["mobilenet"](10), x[:32])
    state = chain_state(chain)
    print(f"MobileNetV2 in {len(chain)} blocks; 8 steps of 32 digits each, after 1 to warm up\n")
    print("   span   ms/step   upload kB   loss")
    for span in [Span(0, 20), Span(10, 14), Span(10, 11), Span(19, 20)]:
        net = freeze(chain, span, state=state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        order = torch.Generator().manual_seed(0)
        for step in range(9):
            if step == 1:
                begin = time.perf_counter()
            if step == 8:
                net.measure_scales()  # beside its weights, a device uploads their ranges
            batch = torch.randint(0, len(x), (32,), generator=order)
            loss = F.cross_entropy(net(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ms = (time.perf_counter() - begin) / 8 * 1e3
        update = net.update()
        state = state | update.tensors  # what a server does with a single device
        print(f"{span!s:>7} {ms:9.1f} {update.nbytes / 1e3:11.1f} {loss.item():6.2f}")

    print("\nWhat blocks 10 and 11 do while only block 10 is trained:\n")
    for row in freeze(chain, Span(10, 11), state=state).describe():
        if row.block in {10, 11}:
            print(f"{row.block:4} {row.role:8} {row.operation:32} {row.kernel}")


if __name__ == "__main__":
    main()
