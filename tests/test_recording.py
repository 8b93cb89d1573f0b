"""Models that torch.fx cannot trace symbolically are recorded while they run."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cocofl import BlockChain, Span, freeze, split
from cocofl.errors import CannotSplit, InvalidExample
from cocofl.models import MODELS
from tests.test_chain import VECTOR, Module, Net, assert_same


def flow(function: Any) -> nn.Module:
    """A submodule with a parameter and a forward of its own, between two linear layers."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return function(self, x)

    return nn.Sequential(nn.Linear(6, 6), Own(), nn.Linear(6, 6))


def targets(chain: BlockChain) -> list[str]:
    return [str(n.target) for b in chain.blocks for n in b.graph.nodes if n.op == "call_module"]


def test_control_flow_on_sizes_and_types_is_seen_through() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or len(x.shape) > 2:
            raise ValueError
        batch, width = x.shape
        if width > 1:
            x = x.view(batch, 2, width // 2).flatten(1) + x.new_zeros(batch * 2 - batch, width)
        return x * m.scale

    chain = assert_same(flow(forward), VECTOR)
    assert targets(chain) == ["0", "2"]
    assert chain(torch.rand(9, 6)).shape == (9, 6)


def test_every_network_of_ours_records_as_it_traces() -> None:
    model = MODELS["resnet18"](10, tiny=True)
    example = model.example_input(4)
    symbolic, recorded = (split(model, example, by_running=way) for way in (False, True))
    assert [symbolic.block_keys(i) for i in range(len(symbolic))] == [
        recorded.block_keys(i) for i in range(len(recorded))
    ]
    rows = [
        [row[2] for row in freeze(chain, Span(1, 2), backend="reference").describe()]
        for chain in (symbolic, recorded)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, x: x * m.scale if x.sum() > 0 else x, "content of a tensor"),
        (lambda m, x: x * m.scale * int(x.shape[0]), "with another batch size"),
        (lambda m, x: x * m.scale if torch.rand([]) < 0.5 else x, "decided by chance"),
        (lambda m, x: Square.apply(x) * m.scale, "Square, an autograd function"),
        (lambda m, x: setattr(m, "calls", m.calls + 1) or x * m.scale, "changes 'calls'"),
    ],
)
def test_what_holds_for_the_example_only_keeps_its_module_whole(forward: Any, reason: str) -> None:
    model = flow(forward)
    with pytest.warns(UserWarning, match=rf"keeps Own .* whole.*{reason}"):
        chain = split(model, VECTOR, by_running=True)
    assert targets(chain) == ["0", "1", "2"]
    x = torch.rand(7, 6)
    for training in (True, False):
        torch.manual_seed(0)
        expected = model.train(training)(x)
        torch.manual_seed(0)
        assert torch.equal(chain.train(training)(x), expected)


def corner(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[0], 6)
    mask[:, :2] = 0
    return mask


def by_a_view(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[0], 6)
    mask.view(-1)[:3].fill_(0)
    return mask


def added_up(x: Tensor) -> Tensor:
    positions = torch.arange(6.0)
    positions += x.shape[0]
    return positions


@pytest.mark.parametrize("by_running", [False, True])
@pytest.mark.parametrize("mask", [corner, by_a_view, added_up])
def test_what_is_written_into_a_tensor_made_of_sizes_counts(mask: Any, by_running: bool) -> None:
    model = Module(lambda m, x: m.b(m.a(x)) * mask(x), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    chain = split(model, VECTOR, by_running=by_running)
    for x in (VECTOR, VECTOR, torch.rand(7, 6)):
        assert torch.equal(chain(x), model(x))


def test_content_written_into_a_tensor_made_of_sizes_decides_nothing() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        copied = torch.zeros(x.shape[0], 6)
        copied[:] = x
        return m.b(m.a(x) if copied.sum() > 0 else -m.a(x))

    with pytest.raises(CannotSplit, match=r"content of a tensor, at .*test_recording.py:\d+"):
        split(Module(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), VECTOR)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_batch_size_in_the_model_itself_is_an_error_that_names_the_line() -> None:
    model = Module(lambda m, x: m.b(m.a(x) * int(x.shape[0])), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    with pytest.raises(CannotSplit, match=r"another batch size: see .*test_recording.py:\d+"):
        split(model, VECTOR)


def test_draw_that_only_training_makes_keeps_its_place() -> None:
    """A layer that is skipped with probability 0, as Whisper has it."""

    class Skipping(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second):
                if self.training and torch.rand([]) < 0.0:
                    continue
                x = nn.functional.dropout(layer(x), 0.5, self.training)
            return x

    assert len(assert_same(Skipping(), VECTOR)) == 2


@dataclass
class Scores(dict):  # type: ignore[type-arg]
    logits: Tensor
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self.update({key: x for key, x in vars(self).items() if x is not None})


class Named(Net):
    def forward(
        self, x: Tensor, unused: Tensor | None = None, mask: Tensor | None = None
    ) -> Scores:
        x = self.first(x)
        if mask is not None:
            x = x.masked_fill(mask[:, None] == 0, 0.0)
        return Scores(logits=self.second(x) * (1 if mask is None else mask[:, None]))


def test_inputs_by_name_and_a_dataclass_as_output() -> None:
    model, mask = Named(), torch.tensor([1, 0, 1, 1])
    chain = split(model, {"x": VECTOR, "mask": mask})
    expected = model(VECTOR, mask=mask).logits
    for net in (chain, freeze(chain, Span(0, 1), variant="ff")):
        for result in (net(VECTOR, mask), net(x=VECTOR, mask=mask), net(VECTOR, mask=mask)):
            assert type(result) is Scores
            assert torch.equal(result.logits, expected)
    with pytest.raises(InvalidExample, match="the network takes x, mask; given are 1 by position"):
        chain(VECTOR, weights=mask)
    with pytest.raises(InvalidExample, match=re.escape("Named.forward takes (x")):
        split(model, {"x": VECTOR, "masks": mask})


class Watched(nn.Module):
    """Watches its layers by hooks that its first call installs, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.seen: list[Tensor] = []
        self.is_watched = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_watched:
            for layer in self.layers:
                layer.register_forward_hook(lambda _layer, _given, y: self.seen.append(y))
            self.is_watched = True
        self.seen.clear()
        x = self.layers(x)
        return x + 0 * x.sum() if len(self.seen) == 3 else x.new_zeros(3)


def test_hooks_that_a_first_call_installs_are_undone_with_what_it_notes() -> None:
    model = Watched()
    chain = split(model, VECTOR, by_running=True)
    assert not model.is_watched
    assert not any(layer._forward_hooks for layer in model.layers)
    assert torch.equal(chain(VECTOR), model(VECTOR))


class Layer(Net):
    """A layer that adds a learned table to what it makes."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if x.shape[0] < 1:
            raise ValueError
        return x + self.second(self.first(x) + table).relu()


class WithTable(nn.Module):
    """Relative positions as T5 has them: from parameters alone, and added in all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.table = nn.Embedding(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, table = self.stem(x), self.table(torch.arange(6)).mean(0)
        for layer in self.layers:
            x = layer(x, table)
        return x


def test_value_from_parameters_alone_crosses_cuts_and_takes_gradients_back() -> None:
    chain = assert_same(WithTable(), VECTOR)
    assert len(chain) == 4
    assert chain.block_keys(0) == ("stem.weight", "stem.bias", "table.weight")
    model = WithTable()
    model(VECTOR).sum().backward()
    net = freeze(split(model, VECTOR), Span(0, 1), variant="ff")
    net(VECTOR).sum().backward()
    torch.testing.assert_close(
        dict(net.trained[0].named_parameters())["table.weight"].grad, model.table.weight.grad
    )
    last = freeze(split(model, VECTOR), Span(3, 4), backend="reference")
    last(VECTOR).sum().backward()
    assert all(key.startswith(("layers.2.", "scales.")) for key in last.update().tensors)


def test_tied_weight_learns_from_both_ends_or_not_at_all() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.middle(self.first(x)))

    model = Tied()
    model(VECTOR).sum().backward()
    chain = split(model, VECTOR)
    for span in (Span(0, 1), Span(0, 2), Span(0, 3)):
        net = freeze(chain, span, variant="f")
        net(VECTOR).sum().backward()
        own = dict(net.trained[0].named_parameters())["first.weight"]
        torch.testing.assert_close(own.grad, model.first.weight.grad)
    assert list(freeze(chain, Span(2, 3), variant="f").update().tensors) == ["second.bias"]
    with torch.no_grad():
        model.first.weight.zero_()
    chain.load_state_dict(model.state_dict())
    assert torch.equal(chain(VECTOR), model.second.bias.expand(4, 6))


class InOut(nn.Module):
    """A linear layer with its weight as (in, out), as GPT-2 has it."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8) * 0.3)
        self.bias = nn.Parameter(torch.randn(8))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        size = x.size()[:-1] + (8,)  # noqa: RUF005, as GPT-2 writes it
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)
        return y if self.factor == 1.0 else y * self.factor


@pytest.mark.parametrize(("factor", "kernels"), [(1.0, {"reference"}), (2.0, {"float32"})])
def test_product_with_a_transposed_weight_is_int8_where_it_is_nothing_else(
    factor: float, kernels: set[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(InOut(factor), nn.Linear(8, 6), nn.Linear(6, 6)).eval()
    chain = split(model, VECTOR, by_running=True)
    net = freeze(chain, Span(1, 2), backend="reference")
    assert {row.kernel for row in net.describe() if row.block == 0} == kernels
    expected = model(VECTOR)
    assert (net(VECTOR) - expected).abs().max() < 0.05 * expected.abs().max()
