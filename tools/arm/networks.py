"""Frozen networks on ARM beside the reference on x86: the same outputs, within a tolerance.

python networks.py save FILE      # on x86: what the reference kernel computes
arm-python networks.py check FILE # under emulation: the kernels that `auto` chooses
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cocofl import Span, chain_state, freeze, split
from cocofl.freeze import KernelPlan
from cocofl.models import MODELS

# Codes may differ by one where a sum lies between two of them, in every layer.
TOLERANCE = 0.05


def outputs(backend: str) -> dict[str, Tensor]:
    """Of three tiny networks, with a block in the middle trained: scores, and its gradients."""
    found = {}
    for name in ("mobilenet", "resnet18", "densenet40"):
        torch.manual_seed(0)
        model = MODELS[name](10, tiny=True).eval()
        x = model.example_input(4)
        chain = split(model, x)
        middle = len(chain) // 2
        # A plan that never takes a whole region to float32: that would be off by what int8 rounds.
        plan = KernelPlan()
        span, state = Span(middle, middle + 1), chain_state(chain)
        net = freeze(chain, span, backend=backend, state=state, plan=plan)
        scores = net(x)
        scores.square().mean().backward()
        gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        found[f"{name} scores"] = scores.detach()
        found[f"{name} gradients"] = torch.cat(gradients)
    return found


def main() -> int:
    """Save, or compare with what was saved."""
    task, file = sys.argv[1:]
    if task == "save":
        save_file(outputs("reference"), file)
        return 0
    wrong = 0
    truth = load_file(file)
    for name, found in outputs("auto").items():
        error = float((found - truth[name]).norm() / truth[name].norm())
        wrong += not error <= TOLERANCE
        print(f"{name:24} off by {error:.4f} (at most {TOLERANCE})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
