"""How much of a network int8 can do, counted by hand."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from cocofl import BlockChain, Span, freeze, split
from cocofl.freeze.network import Network


def test_multiplications_are_those_of_all_layers_and_heads_stay_float() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, groups=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )  # fmt: skip
    network = Network.of(split(model, torch.randn(2, 3, 8, 8)))
    first, second, head = 2 * 8 * 36 * 27, 2 * 8 * 16 * 36, 2 * 5 * 128
    assert [one.every for one in network.work] == [first, second, head]
    assert [one.int8 for one in network.work] == [first, second, 0]
    assert network.int8_share == pytest.approx((first + second) / (first + second + head))
    assert network.what_stays_float == ""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_what_stays_in_float_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    chain = split(Recurrent(), torch.randn(2, 5, 8))
    assert Network.of(chain).work[0].every == 2 * 5 * (64 * 8 + 64 * 16)
    with caplog.at_level(logging.WARNING, "cocofl"):
        for _ in range(2):
            freeze(chain, Span(1, 2), backend="reference")
    lines = [line for line in caplog.messages if "float32" in line]
    assert lines == [
        "frozen, 100 % of this network's multiplications stay in float32 (in LSTM, Linear)"
    ]


def test_encoder_layers_are_counted_though_pytorch_runs_them_as_one_call() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), layer, nn.Flatten(), nn.Linear(80, 3))
    chain = split(model, torch.randn(2, 5, 8))
    work = Network.of(chain).work
    weights = 4 * 16 * 16 + 2 * 16 * 32
    attention = 2 * 5 * 5 * 16
    assert sum(one.every for one in work[1:-1]) == 2 * 5 * weights + 2 * attention
    assert sum(one.int8 for one in work[1:-1]) == 2 * 5 * (2 * 16 * 32)
    described = freeze(chain, Span(0, 1), backend="reference").describe()
    kernels = {row.operation: row.kernel for row in described if row.block}
    assert kernels["linear 16→32 + relu"] == kernels["linear 32→16"] == "reference"
    assert kernels["MultiheadAttention"] == "float32"


def test_volumes_are_frozen_in_float() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))
    x = torch.randn(2, 2, 6, 6, 6)
    chain = split(model, x)
    assert freeze(chain, Span(1, 2), backend="reference")(x).shape == (2, 3)
    assert "100 %" in (line := Network.of(chain).what_stays_float)
    assert "Conv3d" in line


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("padding", "int8"), [("same", True), ("valid", True), ("odd", False)])
def test_padding_by_name_has_an_int8_form_where_it_is_alike_on_both_sides(padding, int8):
    kernel = 4 if padding == "odd" else 3
    named = "same" if padding == "odd" else padding
    along = nn.Conv1d(6, 8, kernel, padding=named, dilation=1)
    flat = nn.Conv2d(3, 8, (kernel, 5), padding=named)
    for layer, x in ((along, torch.randn(2, 6, 16)), (flat, torch.randn(2, 3, 9, 9))):
        model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
        expected = model(x)
        net = freeze(split(model, x), Span(1, 2), backend="reference")
        assert (net.describe()[0].kernel == "reference") == int8
        assert (net(x) - expected).abs().max() < 0.05 * expected.abs().max()


def test_layers_that_multiply_are_named_and_blocks_that_stay_whole_are_not() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            x.view(-1)[0] = 0  # through a view
            return x

    model = nn.Sequential(nn.Embedding(9, 8), Written(), Written(), nn.Flatten(), nn.Linear(40, 2))
    line = Network(split(model, torch.zeros(2, 5, dtype=torch.long))).what_stays_float
    assert line.endswith("100 % of this network's multiplications stay in float32 (in Linear)")


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[..., 0] = 2 * x[..., 1]
        y[:, 2] = 0
        return torch.relu(self.second(y)) + y


def test_layers_stay_int8_beside_a_write_into_a_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Overwriting(), Overwriting(), nn.Linear(8, 8))
    model, x = nn.Sequential(model, nn.Flatten(), nn.Linear(40, 2)), torch.randn(4, 5, 8)
    chain = split(model, x)
    expected = model(x)
    expected.square().sum().backward()
    net = freeze(chain, Span(0, 1), backend="reference")
    kernels = [row.kernel for row in net.describe() if row.operation.startswith("linear")]
    assert kernels == ["float32", *["reference"] * 5]
    found = net(x)
    found.square().sum().backward()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    weight, gradient = model[0][0].weight, next(net.trained.parameters()).grad
    assert (gradient - weight.grad).norm() < 0.1 * weight.grad.norm()
    # Trained, such a block measures what the tensor is after it was written to.
    trained = freeze(chain, Span(1, 2), backend="reference")
    trained.measure_scales()
    trained(x).square().sum().backward()
    scales = trained.update().tensors
    assert {"scales.1.setitem_1.output", "scales.1.setitem_1.gradient"} <= scales.keys()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(2, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 10], dtype=torch.int32)
        products = torch._grouped_mm(self.gate(x).bfloat16(), self.weight.bfloat16(), ends)
        return products.float()


def test_products_without_a_layer_are_counted_and_named() -> None:
    chain = split(nn.Sequential(Experts(), Experts(), nn.Linear(8, 2)), torch.randn(10, 8))
    assert [one.every for one in Network.of(chain).work] == [2 * 10 * 8 * 16] * 2 + [10 * 8 * 2]
    line = Network.of(chain).what_stays_float
    assert line.endswith(
        "52 % of this network's multiplications stay in float32 (in Linear, _grouped_mm)"
    )


class _Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (_Attending(), "MultiheadAttention"),
        (_Recurrent(nn.LSTM(8, 8, batch_first=True)), "LSTM"),
        (_Recurrent(nn.GRU(8, 8, batch_first=True)), "GRU"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_without_an_int8_form_say_so_in_one_line(layer: nn.Module, named: str) -> None:
    chain = BlockChain([layer, nn.Linear(8, 8), nn.Linear(8, 2)], example=torch.randn(2, 5, 8))
    line = Network(chain).what_stays_float
    assert named in line
    assert "stay in float32" in line
    assert "\n" not in line
