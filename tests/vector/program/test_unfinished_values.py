"""Values that a layer leaves to its reader to finish come out as if it had finished them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cocofl import Span, chain_state, split
from cocofl.freeze.kernels import Geometry
from cocofl.models import MODELS
from cocofl.vector import Cohort, DeviceWork, Program, Sgd
from cocofl.vector.kernels import plain
from cocofl.vector.kernels.base import (
    Activation,
    Asked,
    Coefficients,
    Moments,
    Reading,
    from_rows,
    row_count,
    rows_of,
)
from cocofl.vector.kernels.choice import KernelSet, LayerKernels
from cocofl.vector.program.instructions import Layer
from cocofl.vector.program.stacked_layers import Weights, stacked_layer

BATCH, SAMPLES, STEPS = 4, 16, 2


def convolve(x: Tensor, w: Tensor, g: Geometry) -> Tensor:
    each = zip(x, w, strict=True)
    made = [F.conv2d(a, b, None, g.stride, g.padding, g.dilation, g.groups) for a, b in each]
    return torch.stack(made)


def gradients(g: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        gx, gw = torch.autograd.grad(convolve(x, w, geometry), (x, w), g)
    return gx, gw


def finished(x: Tensor, reading: Reading | None) -> Tensor:
    return from_rows(plain.read(rows_of(x), reading), x)


class ReadingKernels(KernelSet):
    """Every convolution finishes what it reads, in plain PyTorch."""

    def convolution(
        self, x: Tensor, shape: Sequence[int], geometry: Geometry
    ) -> LayerKernels | None:
        del x, shape

        def forward(
            x: Tensor, w: Tensor, g: Geometry, reading: Reading | None, valid: Tensor | None
        ) -> tuple[Tensor, Moments | None]:
            y = convolve(finished(x, reading), w, g)
            rows = None if valid is None else valid * (row_count(y) // y.shape[1])
            return y, None if rows is None else plain.moments_of(rows_of(y), rows)

        def weight(
            g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, asked: Tensor,
            reading: Reading | None,
        ) -> Tensor:  # fmt: skip
            del asked
            return gradients(g, finished(x, reading), w, geometry)[1]

        def of_input(g: Tensor, w: Tensor, x: Tensor, geometry: Geometry, asked: Tensor) -> Tensor:
            del asked
            return gradients(g, x, w, geometry)[0]

        return LayerKernels(forward, of_input, weight, reads=True)


def cohort(name: str, kernels: KernelSet | None) -> tuple[Cohort, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name](10, tiny=True).double()
    x, y = model.example_input(SAMPLES).double(), torch.randint(0, 10, (SAMPLES,))
    chain = split(model, x[:BATCH])
    program = Program(chain, torch.device("cpu"))
    if kernels is not None:
        program.kernels = kernels
    made = Cohort(
        chain, lambda i: ((x[i],), y[i]), devices=4, batch=BATCH,
        optimizer=Sgd(weight_decay=0.01), precision="fp32", program=program,
    )  # fmt: skip
    return made, chain_state(chain)


@pytest.mark.parametrize("name", ["mobilenet", "densenet40", "resnet18"])
def test_leaving_values_to_readers_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    original = Layer._unfinished

    def note(self: Layer, y: Tensor, *more: object) -> Tensor:
        left.append(self.name)
        return original(self, y, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Layer, "_unfinished", note)
    found = []
    for kernels in (None, ReadingKernels()):
        made, state = cohort(name, kernels)
        n = made.program.n_blocks
        spans = [Span(0, n), Span(n // 2, n), Span(0, 1)]
        works = [DeviceWork(span, "ff", 0.05) for span in spans]
        valid = np.array([[BATCH] * 3, [BATCH, 3, 2]])
        indices = np.random.default_rng(1).integers(0, SAMPLES, (STEPS, 3, BATCH))
        made.train(made.rows_of([state]), [frozenset()], works, indices, valid)
        found.append(torch.cat([made.parameters, made.statistics, made.losses[:, None]], 1)[:3])
    assert len(left) > 2 * STEPS
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_a_convolution_of_few_inputs_reads_what_is_not_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU such a one is a matrix product where no gradient goes further back."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 1, 6, 6), torch.randn(2, 1, 1, 3, 3)
    weights, geometry = Weights(w.requires_grad_(), w.detach(), w.detach()), Geometry()
    asked, kernels = Asked(*torch.ones(2, 2, dtype=torch.bool)), ReadingKernels()
    reading = Reading(Coefficients(*torch.randn(4, 2, 1)), Activation(True), None)
    y, _ = stacked_layer(x, weights, geometry, asked, kernels, reading=reading)
    torch.testing.assert_close(y, convolve(finished(x, reading), w, geometry))
