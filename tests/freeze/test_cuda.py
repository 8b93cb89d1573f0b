"""The reference on a GPU computes what it computes on the CPU; CI has none and says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cocofl import Span, freeze, split
from cocofl.models import MODELS
from cocofl.vector import Precision

# Transformers draw their dropout differently there, and an untrained norm of each channel by itself
# turns one differing code into another gradient.
COMPARABLE = ["densenet40", "mobilenet", "mobilenet-large", "resnet18", "resnet50"]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def step(name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = MODELS[name](10, tiny=True)
    x = model.example_input(8)
    chain = split(model.to(device), x.to(device))
    net = freeze(chain, Span(1, 2), backend="reference")
    output = net(x.to(device))
    F.cross_entropy(output, torch.arange(8, device=device)).backward()
    gradient = torch.cat([p.grad.flatten() for p in net.trained.parameters() if p.grad is not None])
    return output.detach().cpu(), gradient.cpu()


@needs_gpu
@pytest.mark.parametrize("name", COMPARABLE)
def test_the_reference_on_a_gpu_agrees_with_the_cpu(name: str) -> None:
    with Precision("fp32").active():
        output, gradient = step(name, "cuda")
    expected, expected_gradient = step(name, "cpu")
    # A sum that falls next to a rounding may take either code, so a few codes differ by one.
    assert (output - expected).norm() < 0.01 * expected.norm()
    assert F.cosine_similarity(gradient, expected_gradient, dim=0) > 0.999
