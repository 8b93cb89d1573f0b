from __future__ import annotations

import copy
import importlib
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cocofl import BlockChain, CannotSplit, CocoflError, InvalidExample, split
from cocofl.chain.graphs import called_with

IMAGE = torch.rand(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[3, 1, 4, 1, 0, 0], [2, 7, 1, 8, 2, 8]])


def run(module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> dict[str, Tensor]:
    """Output, gradients and state after one forward and backward pass under a fixed seed."""
    module.train(training)
    module.zero_grad()
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(7)
    outputs = module(*[x * 1 for x in leaves])  # an input may be changed in place
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    result = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    sum(out.square().sum() for out in outputs if out.requires_grad).backward()
    result |= {f"input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    grads = {id(p): p.grad for p in module.parameters() if p.grad is not None}
    for key, value in module.state_dict(keep_vars=True).items():
        result[key] = value.detach().clone()
        if id(value) in grads:
            result[f"gradient of {key}"] = grads[id(value)].clone()
    result["next random number"] = torch.rand(())
    return result


def assert_same(model: nn.Module, *inputs: Tensor, **options: Any) -> BlockChain:
    """Split a copy of the model, and compare the two bit by bit in both modes."""
    chain = split(copy.deepcopy(model), inputs, **options)
    for training in (True, False):
        expected = run(model, inputs, training)
        assert sum(key.startswith("gradient") for key in expected) > 1
        actual = run(chain, inputs, training)
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert torch.equal(actual[key], value), f"{key} differs, training={training}"
    keys = [key for i in range(len(chain)) for key in chain.block_keys(i)]
    assert len(keys) == len(set(keys))
    assert set(keys) <= set(model.state_dict())
    names = [n.name for b in chain.blocks for n in b.graph.nodes if n.op.startswith("call")]
    assert len(names) == len(set(names))
    for block, wiring in zip(chain.blocks, chain.wiring, strict=True):
        taken = [n.name for n in block.graph.nodes if n.op == "placeholder"]
        assert tuple(taken) == wiring.inputs
    return chain


def conv(n: int = 8) -> nn.Conv2d:
    return nn.Conv2d(n, n, 3, padding=1)


class Module(nn.Module):
    """Layers by name, and what to do with them: ``Module(lambda m, x: m.a(x), a=nn.ReLU())``."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Residual(Module):
    pass


class DenseLayer(Module):
    pass


class SqueezeExcite(Module):
    pass


class Shuffle(Module):
    pass


class PreActivation(Module):
    pass


class InPlace(Module):
    pass


def residual() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.relu(m.norm(m.conv(x)) + x)

    return Residual(forward, conv=conv(), norm=nn.BatchNorm2d(8))


def dense_layer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:, 4:], m.conv(F.hardswish(x))], dim=1)

    return DenseLayer(forward, conv=nn.Conv2d(8, 4, 1))


def squeeze_excite() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        return x + y * torch.sigmoid(m.up(F.relu6(m.down(y.mean((2, 3), keepdim=True)))))

    return SqueezeExcite(forward, conv=conv(), down=nn.Conv2d(8, 2, 1), up=nn.Conv2d(2, 8, 1))


def shuffle() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, m.conv(right)], dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(batch, -1, height, width)

    return Shuffle(forward, conv=conv(4))


def pre_activation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return x + m.conv2(F.relu(m.norm2(m.conv1(F.relu(m.norm1(x))))))

    norms = {"norm1": nn.BatchNorm2d(8), "norm2": nn.BatchNorm2d(8)}
    return PreActivation(forward, **norms, conv1=conv(), conv2=conv())


def in_place() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.relu(x)
        y = m.conv(x)
        y += x
        return y.clamp_(max=3)

    return InPlace(forward, relu=nn.ReLU(inplace=True), conv=conv())


def net(make: Callable[[], nn.Module], n: int = 3) -> nn.Sequential:
    """Stem, ``n`` units, head; always a different random state of the modules."""
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(conv(), *(make() for _ in range(n)), *head)


UNITS = [residual, dense_layer, squeeze_excite, shuffle, pre_activation]


@pytest.mark.parametrize("make", [*UNITS, in_place])
def test_each_repeated_unit_is_a_block(make: Callable[[], nn.Module]) -> None:
    chain = assert_same(net(make), IMAGE)
    assert len(chain) == 5
    for i in range(5):
        assert {key.split(".")[0] for key in chain.block_keys(i)} == {str(i) if i < 4 else "6"}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(UNITS), min_size=2, max_size=5), st.booleans())
def test_any_mixture_of_units_stays_the_same_function(
    makers: list[Callable[[], nn.Module]], fine: bool
) -> None:
    model = nn.Sequential(conv(), *(make() for make in makers), nn.Flatten(), nn.Linear(288, 3))
    chain = assert_same(model, IMAGE, fine=fine)
    assert len(chain) >= 2
    assert all(any(True for _ in block.parameters()) for block in chain.blocks)


class Inverted(nn.Module):
    """Made of repeated modules, with a skip in some instances only."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.body = nn.Sequential(ConvNorm(), ConvNorm())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


class ConvNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(conv(), nn.BatchNorm2d(8), nn.ReLU6())


class Stage(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(residual() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def test_unit_without_a_skip_stays_whole_where_its_like_has_one() -> None:
    head = (nn.Flatten(), nn.Linear(288, 3))
    model = nn.Sequential(ConvNorm(), Inverted(skip=False), Inverted(skip=True), ConvNorm(), *head)
    chain = assert_same(model, IMAGE)
    assert [chain.block_keys(i)[0] for i in range(len(chain))] == [
        *("0.0.weight", "1.body.0.0.weight", "2.body.0.0.weight", "3.0.weight", "5.weight")
    ]


def test_stage_is_a_mere_container_even_with_a_single_unit() -> None:
    model = nn.Sequential(conv(), Stage(1), Stage(2), Stage(3), nn.Flatten(), nn.Linear(288, 3))
    assert len(assert_same(model, IMAGE)) == 1 + 6 + 1


def test_pooling_stays_with_the_module_it_is_in() -> None:
    class Transition(nn.Sequential):
        pass

    units = [Transition(ConvNorm(), nn.AvgPool2d(2)) for _ in range(2)]
    model = nn.Sequential(*units, nn.Flatten(), nn.Linear(8, 3))
    chain = assert_same(model, IMAGE)
    assert [wiring.outputs for wiring in chain.wiring[:2]] == [("_0_1",), ("_1_1",)]


def test_flat_model_is_cut_before_its_layers() -> None:
    model = nn.Sequential(
        *(conv(), nn.BatchNorm2d(8), nn.PReLU(), nn.MaxPool2d(2)),
        *(conv(), nn.GroupNorm(2, 8), nn.GELU()),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(72, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
    )
    chain = assert_same(model, IMAGE)
    first_keys = [{key.split(".")[0] for key in chain.block_keys(i)} for i in range(len(chain))]
    assert first_keys == [{"0", "1", "2"}, {"4", "5"}, {"9", "10"}, {"11"}]


def test_fine_cuts_inside_units_without_a_skip_and_before_pre_activations() -> None:
    model = nn.Sequential(conv(), Inverted(skip=False), Inverted(skip=False), pre_activation())
    assert len(assert_same(model, IMAGE)) == 6
    assert len(assert_same(model, IMAGE, fine=True)) == 6
    model[2].skip = True
    assert len(assert_same(model, IMAGE)) == 4
    assert len(assert_same(model, IMAGE, fine=True)) == 5
    assert [c.op for c in split(model, IMAGE, fine=True).blocks[4].graph.nodes][1] == "call_module"


def test_cuts_come_after_the_named_modules_and_operations() -> None:
    model = net(residual)
    chain = assert_same(model, IMAGE, cuts=["1", "relu_2"])
    assert [len(chain.block_keys(i)) for i in range(3)] == [2 + 7, 2 * 7, 2]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["1.cnov"], r"no module or operation '1.cnov' is called \(did you mean 1.conv\?\)"),
        (["2.conv"], "cannot cut after '2.conv': 2 tensors are alive there, relu, _2_conv"),
        (["6"], "cannot cut after '6': nothing comes after it"),
        (["3", "4"], "the block after '3' has no parameters, so it cannot be trained"),
        ([], "cuts is empty"),
    ],
)
def test_impossible_cuts_are_explained(cuts: list[str], message: str) -> None:
    with pytest.raises(CannotSplit, match=message):
        split(net(residual), IMAGE, cuts=cuts)


def test_cut_needs_a_layer_before_it_and_a_single_tensor() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        size = x.size(0)
        left, right = m.a(x).chunk(2, dim=1)
        return m.b(left * right).view(size, -1)

    model = Module(forward, a=conv(), b=conv(4))
    with pytest.raises(CannotSplit, match="cannot cut after 'size': no layer comes before it"):
        split(model, IMAGE, cuts=["size"])
    with pytest.raises(CannotSplit, match="'chunk', is several tensors in one"):
        split(model, IMAGE, cuts=["chunk"])
    assert len(assert_same(model, IMAGE, cuts=["mul"])) == 2


def test_cut_between_two_uses_of_a_weight_names_it() -> None:
    model = Module(lambda m, x: m.a(m.b(m.a(x))), a=conv(), b=conv())
    with pytest.raises(CannotSplit, match=r"'a.weight' is used on both sides"):
        split(model, IMAGE, cuts=["b"])


class Net(nn.Module):
    """Two linear layers around what a test is about."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)


VECTOR = torch.rand(4, 6, generator=torch.Generator().manual_seed(2))


def test_functional_dropout_follows_the_mode() -> None:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.first(x), 0.5, self.training)
            x = F.dropout(self.second(x), 0.5 if self.training else 0.0)
            return F.dropout(x, 0.1, training=not self.training)

    chain = assert_same(Dropping(), VECTOR)
    flags = [n for b in chain.blocks for n in b.graph.nodes if n.target == "training"]
    assert [n.op for n in flags] == ["get_attr"] * 3
    chain.train()
    assert not torch.equal(chain(VECTOR), chain(VECTOR))


def test_flag_never_crosses_a_cut() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(F.dropout(m.a(x), 0.5, m.training))

    for cut in ("a", "dropout"):
        model = Module(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
        chain = assert_same(model, VECTOR, cuts=[cut])
        assert [w.inputs for w in chain.wiring] == [("x",), (cut,)]


def test_mode_that_changes_the_operations_is_an_error() -> None:
    class Auxiliary(Net):
        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            return (x, self.second(x)) if self.training else self.second(x) * 2

    with pytest.raises(CannotSplit, match=r"cannot trace Auxiliary: .*train mode than in eval"):
        split(Auxiliary(), VECTOR)


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1) > 0.5)


def test_module_that_differs_by_mode_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 6), DropPath(), nn.ReLU(), nn.Linear(6, 6), DropPath())
    chain = assert_same(model, VECTOR)
    assert len(chain) == 2
    assert [n.target for n in chain.blocks[0].graph.nodes][1:4] == ["0", "1", "2"]


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y / y.norm() if y.norm() > 1 else y


def test_module_with_data_dependent_control_flow_stays_whole_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Clipped(), Clipped(), nn.Linear(6, 6))
    with pytest.warns(UserWarning, match=r"keeps Clipped \('1' and 1 more\) whole.*y.norm\(\) > 1"):
        chain = assert_same(model, VECTOR)
    assert [chain.block_keys(i)[0] for i in (1, 2)] == ["1.linear.weight", "2.linear.weight"]


def test_only_the_module_that_decides_stays_whole() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = FeedForward(), FeedForward()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if self.training else self.b(x)

    model = nn.Sequential(nn.Linear(6, 8), Switch(), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match=r"keeps Switch \('1'\) whole") as caught:
        chain = assert_same(model, VECTOR)
    assert len(chain) == 3
    assert len(caught) == 1


def test_untraceable_model_says_where_and_how_to_pass_blocks_by_hand() -> None:
    model = Module(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x), a=conv(), b=conv())
    with pytest.raises(CannotSplit) as caught:
        split(model, IMAGE)
    assert re.search(
        r"cannot trace Module: .*control flow .* content .*, at .*test_chain.py:\d+",
        str(caught.value),
    )
    assert "x.sum() > 0" in str(caught.value)
    assert "cocofl.BlockChain([stem, block1, ..., head])" in str(caught.value)


def test_no_grad_inside_forward_is_not_silently_lost() -> None:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)

    chain = assert_same(Frozen(), VECTOR)
    chain(VECTOR).sum().backward()
    assert all(p.grad is None for p in chain.blocks[0].parameters())


def test_randomness_that_would_be_baked_in_is_an_error_or_drawn_anew() -> None:
    model = Module(lambda m, x: m.b(m.a(x) * random.random()), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    with pytest.raises(CannotSplit, match="other operations each time"):
        split(model, VECTOR)
    model.function = lambda m, x: m.b(m.a(x) + torch.rand(6))
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    chain = split(model, VECTOR)
    assert torch.equal(torch.rand(()), expected)
    assert not torch.equal(chain(VECTOR), chain(VECTOR))


def test_parameters_read_from_the_registry_are_seen() -> None:
    model = Module(lambda m, x: m.b(m.a(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    model.function = lambda m, x: m.b(m.a(x)) * m.a._parameters["bias"].exp()
    chain = assert_same(model, VECTOR)
    assert chain.wiring[1].inputs == ("a", "a_bias")


def test_sizes_and_constants_cross_a_cut() -> None:
    class Sized(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dim() == 2, f"{x.dim()} dimensions"
            batch = x.size(0)
            x = self.first(x)
            x = self.second(x) + torch.arange(6, device=x.device) * torch.ones(batch, 1)
            return x.view(batch, 2, 3)

    chain = assert_same(Sized(), VECTOR)
    assert chain.wiring[0].outputs == ("first", "size")
    assert chain.wiring[1].inputs == ("first", "size")
    assert chain(torch.rand(9, 6)).shape == (9, 2, 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.feed = FeedForward()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = self.query(x) @ x.transpose(1, 2) + mask
        x = self.norm(x + weight.softmax(-1) @ self.value(x))
        return x + self.feed(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Text(nn.Module):
    """Tokens make a mask that all layers and the pooling need."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.register_buffer("scale", torch.tensor(-1e4))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        mask = padding.unsqueeze(1).float() * self.scale
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x.masked_fill(padding.unsqueeze(2), 0).sum(1) + self.scale)


def test_padding_mask_is_carried_to_where_it_is_needed() -> None:
    chain = split(Text(), TOKENS)
    assert [wiring.inputs for wiring in chain.wiring] == [
        ("tokens",),
        *((name, "mul") for name in ("embedding", "add_2", "add_5")),
        ("add_8", "eq"),
    ]
    assert chain.wiring[0].outputs == ("embedding", "eq", "mul")
    assert [wiring.outputs for wiring in chain.wiring[1:4]] == [("add_2",), ("add_5",), ("add_8",)]
    model = Text()
    chain = split(copy.deepcopy(model), TOKENS)
    for training in (True, False):
        expected, actual = run(model, (TOKENS,), training), run(chain, (TOKENS,), training)
        assert all(torch.equal(actual[key], value) for key, value in expected.items())


def test_buffer_of_several_blocks_has_one_key_and_is_loaded_everywhere() -> None:
    chain = split(Text(), TOKENS)
    assert list(chain.state_dict()) == list(Text().state_dict())
    assert [i for i in range(5) if "scale" in chain.block_keys(i)] == [0, 4]
    copied = copy.deepcopy(chain)
    before = copied(TOKENS)
    copied.load_state_dict(chain.state_dict() | {"scale": torch.tensor(-5.0)})
    assert [copied.blocks[i].scale.item() for i in (0, 4)] == [-5.0, -5.0]
    assert not torch.equal(copied(TOKENS), before)


def test_further_inputs_are_carried() -> None:
    class Two(Net):
        def forward(self, x: Tensor, index: Tensor, scale: float = 2.0) -> Tensor:
            return self.second(self.first(x))[index] * scale

    chain = assert_same(Two(), VECTOR, torch.tensor([2, 0]))
    assert [w.inputs for w in chain.wiring] == [("x", "index"), ("first", "index")]
    with pytest.raises(InvalidExample, match=r"takes 2 inputs \(x, index\), not 1"):
        chain(VECTOR)


def test_further_float_inputs_cross_cuts_too() -> None:
    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.c(self.a(x) * self.b(y))

    chain = assert_same(Meeting(), VECTOR, VECTOR + 1)
    assert [w.inputs for w in chain.wiring] == [("x", "y"), ("a", "y"), ("mul",)]


class Masked(nn.Sequential):
    """Layers that all read a mask of floats."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(x).relu() * mask
        return x


def test_a_mask_of_floats_crosses_cuts() -> None:
    model, mask = Masked(*(nn.Linear(6, 6) for _ in range(3))), torch.tensor([[1.0, 1, 0, 1, 1, 1]])
    chain = assert_same(model, VECTOR, mask)
    assert [w.inputs for w in chain.wiring] == [("x", "mask"), ("mul", "mask"), ("mul_1", "mask")]


@pytest.mark.parametrize("kind", ["tuple", "dict", "single"])
def test_outputs_keep_their_structure(kind: str) -> None:
    class Outputs(Net):
        def forward(self, x: Tensor) -> Any:
            y = self.second(self.first(x))
            return {"tuple": (y.exp(), y), "dict": {"logits": y}, "single": (y,)}[kind]

    model = Outputs()
    chain = assert_same(model, VECTOR)
    assert len(chain) == 2
    assert type(chain(VECTOR)) is type(model(VECTOR))
    expected = {"tuple": ("exp", "second"), "dict": ("output",), "single": ("output",)}
    assert chain.wiring[1].outputs == expected[kind]


def test_tuples_and_side_results_inside_a_block() -> None:
    class Attending(Net):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.unsqueeze(0))
            y, _ = self.attention(x, x, x)
            return self.second(y)

    assert len(assert_same(Attending(), VECTOR)) == 3


def test_pytorch_encoder_is_cut_between_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(10, 8), encoder, nn.Linear(8, 2))
    assert len(split(model, TOKENS)) == 5
    assert len(assert_same(model[1:], model[0](TOKENS).detach())) == 4


class Encoding(nn.Module):
    """PyTorch's encoder, or one layer of it; samples tell which positions are padding."""

    def __init__(self, body: nn.Module, *masks: str) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(8, 8), body, nn.Linear(8, 2)
        self.masks = masks
        self.register_buffer("causal", torch.ones(5, 5).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        made = {"src_mask": self.causal, "src_key_padding_mask": x[:, :, 0] > 5}
        return self.last(self.body(self.first(x), **{name: made[name] for name in self.masks}))


SEQUENCES = torch.randn(3, 5, 8).index_fill(1, torch.tensor([4]), 6.0)


@pytest.mark.parametrize(
    ("masks", "options"),
    [
        ((), {"batch_first": False}),
        ((), {"activation": F.gelu}),
        (("src_mask",), {}),
        (("src_mask",), {"norm_first": True}),
        (("src_mask", "src_key_padding_mask"), {"norm_first": True}),
    ],
    ids=["time-first", "gelu", "causal", "norm-first", "padded"],
)
@pytest.mark.parametrize("by_running", [False, True])
def test_an_encoder_layer_of_pytorch_is_traced_layer_by_layer(
    masks: tuple[str, ...], options: dict[str, Any], by_running: bool
) -> None:
    sizes: dict[str, Any] = {"dropout": 0.3, "batch_first": True} | options
    model = Encoding(nn.TransformerEncoderLayer(8, 2, 16, **sizes), *masks)
    chain = assert_same(model, SEQUENCES, by_running=by_running)
    called = {str(n.target) for block in chain.blocks for n in block.graph.nodes}
    assert {"body.self_attn", "body.linear1", "body.linear2", "body.norm2"} <= called


def test_an_encoder_of_pytorch_with_padding_is_cut_between_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert len(assert_same(Encoding(encoder, "src_key_padding_mask"), SEQUENCES)) == 5


def test_weights_used_twice_stay_in_one_block() -> None:
    shared = nn.Linear(6, 6)
    layers = [nn.Linear(6, 6), shared, nn.Linear(6, 6), shared, nn.Linear(6, 6)]
    chain = assert_same(nn.Sequential(*layers), VECTOR)
    assert [chain.block_keys(i)[0] for i in range(3)] == ["0.weight", "1.weight", "4.weight"]


def test_statistics_used_twice_stay_in_one_block() -> None:
    norm = nn.BatchNorm1d(6, affine=False)
    layers = [nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 6)]
    assert len(assert_same(nn.Sequential(*layers), VECTOR)) == 2


def test_layer_without_effect_is_no_block_of_its_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.ignored(y)
        return m.b(y)

    model = Module(forward, a=nn.Linear(6, 6), ignored=nn.Linear(6, 6), b=nn.Linear(6, 6))
    chain = assert_same(model, VECTOR)
    assert [wiring.inputs for wiring in chain.wiring] == [("x",), ("a",)]
    assert len(chain.block_keys(1)) == 4


def test_parameters_of_the_model_itself() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.second(self.first(x))
            return (x * self.scale if self.scale.dim() == 1 else x), self.scale

    chain = assert_same(Scaled(), VECTOR)
    assert chain.block_keys(1)[-2:] == ("second.weight", "second.bias")
    assert "scale" in chain.block_keys(1)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_tied_weight_belongs_to_its_first_reader_and_is_handed_on() -> None:
    chain = assert_same(Tied(), VECTOR)
    assert chain.block_keys(0) == ("first.weight", "first.bias")
    assert chain.block_keys(1) == ("second.bias",)
    assert chain.wiring[1].inputs == ("first", "first_weight")
    state = chain.state_dict()
    assert state["second.weight"].data_ptr() == state["first.weight"].data_ptr()


def test_layer_that_is_called_twice_stays_in_one_block() -> None:
    with pytest.raises(CannotSplit, match=r"uses the parameter 'a.weight'.* in several places"):
        split(Module(lambda m, x: m.a(m.b(m.a(x))), a=conv(), b=conv()), IMAGE)


def test_tied_weights_of_one_block_keep_both_keys() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Tied())
    chain = assert_same(model, VECTOR, cuts=["0"])
    assert chain.block_keys(1) == tuple(key for key in model.state_dict() if key.startswith("1"))


def test_model_that_is_one_block_is_an_error() -> None:
    def in_two_ways(m: Any, x: Tensor) -> Tensor:
        out, (last, _) = m.a(x)
        return out + m.b(last)

    with pytest.raises(CannotSplit, match=r"exactly one tensor alive.*cocofl.BlockChain\("):
        split(Module(in_two_ways, a=nn.LSTM(6, 6), b=nn.Linear(6, 6)), VECTOR)


class Odd(nn.Module):
    """Unused parameters, an alias, a constant, buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.alias = self.body[0]
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("kept", torch.arange(6.0))
        self.register_buffer("left_out", torch.ones(6), persistent=False)
        self.register_buffer("unused_buffer", torch.zeros(2))
        self.plain = torch.full((6,), 3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x) * self.weight + self.kept + self.left_out * self.plain
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_state_dict_has_the_keys_of_the_model_and_loads_both_ways() -> None:
    one, other = Odd(), Odd()
    chain = copy.deepcopy(split(copy.deepcopy(one), VECTOR))
    assert list(chain.state_dict()) == list(one.state_dict())
    assert len(list(chain.parameters())) == len(list(one.parameters()))
    with torch.no_grad():
        other.unused.weight.fill_(9)
        other.kept.fill_(4)
    chain.load_state_dict(other.state_dict())
    one.load_state_dict(chain.state_dict())
    assert one.unused.weight[0, 0] == 9
    for module in (chain, one, other):
        module.eval()
    assert torch.equal(chain(VECTOR), other(VECTOR))
    assert torch.equal(one(VECTOR), other(VECTOR))


def test_blocks_hold_the_keys_of_what_they_use() -> None:
    chain = split(Odd(), VECTOR)
    assert chain.block_keys(0)[:3] == ("body.0.weight", "body.0.bias", "body.1.weight")
    assert set(chain.block_keys(1)) == {"kept", "weight", "body.2.weight", "body.2.bias"}
    assert set(copy.deepcopy(chain).block_keys(1)) == set(chain.block_keys(1))
    assert set(chain.rest.state_dict()) == {"unused.weight", "unused.bias", "unused_buffer"}


def test_strict_loading_reports_the_models_own_keys() -> None:
    chain = split(Odd(), VECTOR)
    state = chain.state_dict()
    del state["body.0.weight"], state["unused.bias"]
    state["blocks.0.body.0.weight"] = torch.zeros(6, 6)
    with pytest.raises(RuntimeError) as caught:
        chain.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "unused.bias", "body.0.weight"' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "blocks.0.body.0.weight"' in str(caught.value)
    result = chain.load_state_dict(state, strict=False)
    assert result.missing_keys == ["unused.bias", "body.0.weight"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        chain.load_state_dict(chain.state_dict() | {"kept": torch.zeros(7)})


def test_chain_inside_another_module_keeps_its_keys() -> None:
    outer = nn.Sequential(split(Odd(), VECTOR), nn.Linear(6, 1))
    assert [key for key in outer.state_dict() if key.startswith("0.")] == [
        f"0.{key}" for key in Odd().state_dict()
    ]
    twin = nn.Sequential(split(Odd(), VECTOR), nn.Linear(6, 1))
    twin.load_state_dict(outer.state_dict())
    assert torch.equal(twin.eval()(VECTOR), outer.eval()(VECTOR))


def test_chain_shares_the_weights_of_the_model() -> None:
    model = net(residual)
    chain = split(model, IMAGE)
    assert set(chain.parameters()) == set(model.parameters())
    assert chain.blocks[1].get_submodule("1.norm") is model[1].norm


def test_splitting_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(Odd(), in_place_counter := Counter(), nn.Linear(6, 6))
    model[0].body[1].eval()
    model[2].eval()
    flags = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="Counter"):
        chain = split(model, VECTOR)
    assert [module.training for module in model.modules()] == flags
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert chain.training
    assert in_place_counter.calls == 0


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return x * self.weight


def test_example_of_one_image_is_enough_and_is_copied() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).train()
    example = torch.ones(1, 6)
    chain = split(model, example)
    example.zero_()
    assert chain.example is not None
    assert torch.equal(chain.example[0], torch.ones(1, 6))


def test_chain_is_in_the_mode_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(6, 6), DropPath(), nn.Linear(6, 6)).eval()
    chain = split(model, VECTOR)
    assert not any(module.training for module in chain.modules())


def test_values_are_dropped_after_their_last_use() -> None:
    taken: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            taken.append(weakref.ref(x))
            alive.append(sum(ref() is not None for ref in taken))
            return x + 1

    BlockChain([Watch() for _ in range(4)])(torch.zeros(2))
    assert alive == [1, 2, 2, 2]  # the input, which the caller holds, and that of the block


def test_blocks_by_hand_have_the_keys_of_a_sequential() -> None:
    layers = [nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2))]
    chain, model = BlockChain(layers, example=VECTOR), nn.Sequential(*layers)
    assert list(chain.state_dict()) == list(model.state_dict())
    assert chain.block_keys(1) == ("1.1.weight", "1.1.bias")
    assert tuple(chain.blocks[1].state_dict()) == chain.block_keys(1)
    assert torch.equal(chain(VECTOR), model(VECTOR))
    assert [(w.inputs, w.outputs) for w in chain.wiring] == [(("x0",), ("x1",)), (("x1",), ("x2",))]
    assert chain.example is not None
    assert torch.equal(chain.example[0], VECTOR)
    chain.load_state_dict(nn.Sequential(nn.Linear(6, 6), layers[1]).state_dict())


@pytest.mark.parametrize("as_mapping", [True, False])
def test_blocks_by_hand_can_have_the_keys_of_a_model(as_mapping: bool) -> None:
    model = Clipped()
    pairs = [("linear", model.linear), ("head.0", nn.Linear(6, 2))]
    chain = BlockChain(dict(pairs) if as_mapping else pairs)
    assert chain.block_keys(0) == tuple(model.state_dict())
    assert chain.block_keys(1) == ("head.0.weight", "head.0.bias")
    assert torch.equal(chain(VECTOR), pairs[1][1](model.linear(VECTOR)))


def test_wrong_blocks_by_hand_are_refused() -> None:
    shared = nn.Linear(6, 6)
    with pytest.raises(CannotSplit, match=r"blocks 0 and 2 share the parameter '2.weight'"):
        BlockChain([shared, nn.ReLU(), shared])
    with pytest.raises(CannotSplit, match="at least one block"):
        BlockChain([])
    with pytest.raises(CannotSplit, match=r"block 1 is a function; expected an nn.Module"):
        BlockChain([shared, F.relu])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(2, 3, 6, 6), r"on the example of shape \(2, 3, 6, 6\) torch.float32: .* '0'"),
        (torch.zeros(2, 8, 6, 6, dtype=torch.int64), r"\(2, 8, 6, 6\) torch.int64"),
        ((IMAGE, IMAGE), r"has 2 inputs, but Sequential.forward takes \(input\)"),
        ([], "expected a tensor"),
        ("image", "the example is a str; expected a tensor"),
        ((IMAGE, 3), "input 1 of the example is a int; expected a tensor"),
    ],
)
def test_wrong_examples_are_refused(example: Any, message: str) -> None:
    with pytest.raises(InvalidExample, match=message) as caught:
        split(net(residual), example)
    assert isinstance(caught.value, CocoflError)


def test_failing_module_is_named_deep_inside() -> None:
    model = nn.Sequential(conv(), nn.ReLU(), Stage(2))
    model[2].units[1].conv = conv(5)
    with pytest.raises(
        InvalidExample, match=r"it fails in '2.units.1.conv' with: .*8 channels instead$"
    ):
        split(model, IMAGE)


def test_what_is_no_model_or_asked_for_twice_is_refused() -> None:
    with pytest.raises(CannotSplit, match=r"the model is a function; expected an nn.Module"):
        split(F.relu, VECTOR)  # type: ignore[arg-type]
    with pytest.raises(CannotSplit, match="give one of them"):
        split(net(residual), IMAGE, fine=True, cuts=["1"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("module", "name", "size", "blocks"),
    [
        ("resnet_cifar", "resnet20_cifar10", 32, 11),
        ("densenet_cifar", "densenet40_k12_cifar10", 32, 40),
        ("mobilenetv2", "mobilenetv2_wd4", 224, 20),
    ],
)
def test_models_of_pytorchcv(module: str, name: str, size: int, blocks: int) -> None:
    make = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)
    torch.manual_seed(0)
    chain = assert_same(make(), torch.rand(2, 3, size, size))
    assert len(chain) == blocks


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_no_ordinary_model_is_refused_with_the_way_out() -> None:
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 4)
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    for model, complaint in (
        (torch.jit.script(plain), "the model is TorchScript, .* the nn.Module that it was made"),
        (nn.Sequential(torch.jit.script(plain), nn.ReLU()), "the module '0' is TorchScript"),
        (torch.compile(plain, backend="eager"), r"the model is compiled .*model\._orig_mod"),
        (lazy, r"the module '1', a LazyLinear, has no sizes .* call model\(example\) once"),
    ):
        with pytest.raises(CannotSplit, match=complaint):
            split(model, x)
    lazy(x)
    assert len(split(lazy, x)) == 2


def test_a_recurrent_layer_has_its_own_weights_again_after_it_was_lent_others() -> None:
    """PyTorch's ``functional_call`` leaves it with those that were lent, and their graph."""
    layer, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    others = {key: 2 * weight for key, weight in layer.named_parameters()}
    alike = copy.deepcopy(layer)
    alike.load_state_dict({key: weight.detach() for key, weight in others.items()})
    before = layer(x)[0]
    torch.testing.assert_close(called_with(layer, others, (x,))[0], alike(x)[0])
    torch.testing.assert_close(layer(x)[0], before, rtol=0, atol=0)
    copy.deepcopy(layer)
