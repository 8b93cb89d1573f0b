from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, fx, nn

from cocofl import CocoflError
from cocofl.models import MODELS, Network

WIDTHS = [0.01, 0.125, 0.4, 0.625, 0.8125]


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def n_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name: str, width: float = 1.0) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](10, width=width)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), torch.arange(len(x)))


@pytest.mark.parametrize("tiny", [True, False])
def test_one_score_per_class(name: str, tiny: bool) -> None:
    model = MODELS[name](7, tiny=tiny).eval()
    with torch.no_grad():
        scores = model(model.example_input(batch_size=2))
    assert scores.shape == (2, 7)
    assert scores.isfinite().all()


def test_example_input_is_the_same_every_time_and_draws_nothing_from_the_global_stream(
    name: str,
) -> None:
    model = MODELS[name](7, tiny=True)
    before = torch.get_rng_state()
    assert model.example_input(3).equal(model.example_input(3))
    assert torch.get_rng_state().equal(before)


def test_tiny_is_tiny(name: str) -> None:
    model = MODELS[name](10, tiny=True)
    x = model.example_input()
    assert n_parameters(model) < 100_000
    loss(model, x).backward()
    times_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        loss(model, x).backward()
        times_s.append(time.perf_counter() - start_s)
    assert min(times_s) < 0.1


def test_every_parameter_has_a_gradient(name: str) -> None:
    model = MODELS[name](10, tiny=True)
    loss(model, model.example_input()).backward()
    without = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    # A softmax does not change when every key moves by the same vector.
    assert [key for key in without if not key.endswith("key.bias")] == []


@pytest.mark.parametrize("training", [True, False])
def test_traces_with_fx_to_the_same_bits(name: str, training: bool) -> None:
    model = MODELS[name](10, tiny=True)
    traced = fx.symbolic_trace(model)  # once, in train mode: the mode must not be baked in
    model.train(training)
    traced.train(training)
    x = model.example_input()
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert traced(x).equal(expected)


def test_eval_mode_is_deterministic_and_knows_no_neighbours(name: str) -> None:
    model = MODELS[name](10, tiny=True).eval()
    x = model.example_input(batch_size=4)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize("width", WIDTHS)
def test_narrower_tensors_fit_into_the_full_ones(name: str, width: float) -> None:
    full, narrow = shapes(on_meta(name)), shapes(on_meta(name, width))
    assert narrow.keys() == full.keys()
    for key, shape in narrow.items():
        assert len(shape) == len(full[key])
        assert all(a <= b for a, b in zip(shape, full[key], strict=True)), key
    assert [key for key in full if "classifier" in key and key.endswith("bias")]


def test_cost_falls_with_the_width(name: str) -> None:
    sizes = [n_parameters(on_meta(name, width)) for width in [*WIDTHS, 1.0]]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("width", [0.125, 0.5])
def test_narrow_tiny_networks_run(name: str, width: float) -> None:
    model = MODELS[name](10, width=width, tiny=True)
    assert model(model.example_input()).shape == (2, 10)


@pytest.mark.parametrize("width", [0.0, -0.5, 1.5, float("nan")])
def test_impossible_widths_are_refused(name: str, width: float) -> None:
    with pytest.raises(CocoflError, match=r"a ratio in \(0, 1\]"):
        MODELS[name](10, width=width)


def test_no_classes_are_refused(name: str) -> None:
    with pytest.raises(CocoflError, match="num_classes is 0"):
        MODELS[name](0)


def test_networks_are_ordinary_modules(name: str) -> None:
    model = MODELS[name](10, tiny=True)
    assert isinstance(model, Network)
    assert isinstance(model, nn.Module)
    twin = MODELS[name](10, tiny=True)
    twin.load_state_dict(model.state_dict())
    x = model.example_input()
    assert twin.eval()(x).equal(model.eval()(x))
