"""What is added from outside: an int8 layer type and a kernel backend, in one place each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import KernelPlan, Span, chain_state, freeze, split
from cocofl.freeze import KERNELS, LAYERS, Kernel, LinearMap, Prepared
from cocofl.numerics import Codes, Grid, as_float, quantize
from cocofl.vector import DeviceWork, disagreement
from tests.vector.serial import draw_round
from tests.vector.training.test_cohort import BATCH, SAMPLES, cohort_of, serially, together


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.two(F.relu(self.one(x)))) + x)


def signals() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv1d(2, 8, 5, stride=2, padding=2), nn.BatchNorm1d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(stem, Residual(), Residual(), head)


X = torch.randn(SAMPLES, 2, 32, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (SAMPLES,), generator=torch.Generator().manual_seed(2))


def test_a_layer_type_that_is_not_known_stays_in_float(monkeypatch):
    monkeypatch.delitem(LAYERS, nn.Conv1d)
    net = freeze(split(signals(), X[:BATCH]), Span(3, 4), backend="reference")
    assert {row.kernel for row in net.describe()} == {"float32"}


@pytest.mark.parametrize("backend", ["reference", "onednn"])
def test_a_layer_type_runs_forward_and_backward_in_int8(backend):
    chain = split(signals(), X[:BATCH])
    names = {row.operation for row in freeze(chain, Span(3, 4), backend=backend).describe()}
    assert {"conv1d 5 2→8 + norm + relu", "conv1d 3 8→8 + norm + add + relu"} <= names
    for span in (Span(0, 1), Span(1, 2), Span(3, 4)):
        gradients = []
        for variant in ("ff", "qff"):
            net = freeze(chain, span, variant=variant, backend=backend)
            F.cross_entropy(net(X), Y).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.trained.parameters()]))
        assert F.cosine_similarity(*gradients, dim=0) > 0.97


def test_a_layer_type_trains_in_a_cohort():
    chain = split(signals(), X[:BATCH])
    assert disagreement(chain) is None
    spans = [Span(0, 1), Span(1, 2), Span(3, 4), Span(0, 4), Span(1, 2) | Span(3, 4)]
    works = [DeviceWork(span, "qff", 0.05) for span in spans]
    state, cohort = chain_state(chain), cohort_of(chain, X, Y)
    assert [layer.op.kind for layer in cohort.program.layers[:2]] == [LAYERS[nn.Conv1d]] * 2
    one = draw_round(works, SAMPLES, BATCH, [[8, 8], [8], [8, 5], [8, 8], [6]])
    expected, found = serially(chain, state, one, X, Y), together(cohort, state, one)
    for (a, _), (b, _) in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        assert max((a[key] - b[key]).abs().max() for key in a if key in state) < 1e-2


# A kernel backend


def prepare(linear_map: LinearMap) -> Prepared:
    """int8 products summed in whole numbers, in plain PyTorch."""
    codes = linear_map.weight.codes.double()
    g, middle = linear_map.geometry, linear_map.input_zero_point

    def run(x: Codes, out: Grid | None, addend: Codes | Tensor | None) -> Codes | Tensor:
        values = x.values.double() - middle
        if g is None:
            y = F.linear(values, codes) * linear_map.weight.scale
        else:
            y = F.conv2d(values, codes, None, g.stride, g.padding, g.dilation, g.groups)
            y = y * linear_map.weight.scale.view(-1, 1, 1)
        y = y * x.grid.scale
        if linear_map.bias is not None:
            y = y + (linear_map.bias if g is None else linear_map.bias.view(-1, 1, 1))
        if addend is not None:
            y = y + as_float(addend)
        y = (y.relu() if linear_map.relu else y).float()
        return y if out is None else quantize(y, out)

    return run


@pytest.fixture
def whole_numbers(monkeypatch):
    own = Kernel("whole-numbers", prepare, lambda: None, integer=True)
    monkeypatch.setitem(KERNELS, own.name, own)
    return own


def test_an_own_kernel_can_be_asked_for_and_computes_the_reference(whole_numbers):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    model.extend([nn.Linear(128, 8), nn.Linear(8, 3)])
    x = torch.randn(4, 3, 8, 8)
    chain = split(model, x)
    found = []
    for backend in ("reference", whole_numbers.name):
        net = freeze(chain, Span(0, 1), backend=backend, weight_bits=8)
        y = net(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in net.parameters())])
    assert whole_numbers.name in {row.kernel for row in net.describe()}
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()


def test_a_plan_may_choose_an_own_kernel(whole_numbers):
    chain = split(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)), torch.randn(2, 3, 8, 8))
    plan = KernelPlan()
    freeze(chain, Span(1, 2), plan=plan)
    chosen = KernelPlan(dict.fromkeys(plan.choices, whole_numbers.name), fixed=True)
    net = freeze(chain, Span(1, 2), plan=chosen)
    assert net.describe()[0].kernel == whole_numbers.name
