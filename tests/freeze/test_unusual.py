"""What torch.fx cannot trace, blocks given by hand, and what must not pass silently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import (
    BlockChain,
    CannotLower,
    InvalidExample,
    InvalidSetting,
    Role,
    Span,
    Wiring,
    chain_state,
    freeze,
    split,
)
from tests.freeze.networks import IMAGE, SEQUENCE, Residual, conv


def gradients(net: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Outputs and parameter gradients of one step, under a fixed seed."""
    torch.manual_seed(5)
    net.zero_grad()
    y = net(*inputs)
    y = y if isinstance(y, Tensor) else sum(part.sum() for part in y)
    y.square().sum().backward()
    found = {"output": y.detach()}
    # The chain and the net put different prefixes before the keys of the model.
    for i, p in enumerate(p for p in net.parameters() if p.grad is not None):
        found[f"gradient {i}"] = p.grad.clone()
    return found


def plain(chain: BlockChain, span: Span) -> BlockChain:
    """The chain with its blocks outside the span in eval mode, and without gradients."""
    chain = copy.deepcopy(chain)
    for index, block in enumerate(chain.blocks):
        trained = span.role(index) is Role.TRAINED
        block.train(trained).requires_grad_(trained)
    return chain


def check(chain: BlockChain, *inputs: Tensor, tolerance: float = 0.05) -> None:
    """Every span computes what the chain computes, in float exactly and in int8 nearly."""
    for start in range(len(chain)):
        span = Span(start, start + 1)
        expected = gradients(plain(chain, span), *inputs)
        assert len(expected) > 1
        nets = [
            (freeze(chain, span, variant="ff"), 1e-4),
            (freeze(chain, span, backend="reference"), tolerance),
        ]
        for net, limit in nets:
            found = gradients(net, *inputs)
            assert found.keys() == expected.keys()
            # A bias before a norm has no gradient but rounding: measure by the largest.
            largest = max(value.norm() for key, value in expected.items() if key != "output")
            for key, value in expected.items():
                least = 1e-3 if key == "output" else 0.1 * largest
                error = (found[key] - value).norm() / max(value.norm(), least)
                assert error <= limit, f"{key} of {span}: {float(error)}"


def kernels(net: Any) -> dict[str, str]:
    return {row.operation: row.kernel for row in net.describe()}


def stem() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU())


def head() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_blocks_given_by_hand_are_quantized_too():
    chain = BlockChain([stem(), Residual(), head()], example=IMAGE)
    check(chain, IMAGE, tolerance=0.25)
    rows = kernels(freeze(chain, Span(2, 3), backend="reference"))
    assert rows["conv 3×3 3→8 + relu"] == "reference"
    assert rows["conv 3×3 8→8 + norm + relu"] == "reference"
    assert rows["conv 3×3 8→8 + add + relu"] == "reference"


def test_a_single_layer_is_a_block():
    chain = BlockChain({"a": conv(3, 8), "b.c": conv(8, 8), "d": conv(8, 2)}, example=IMAGE)
    check(chain, IMAGE)
    assert kernels(freeze(chain, Span(2, 3), backend="reference"))["conv 3×3 8→8"] == "reference"


class Untraceable(nn.Module):
    """Looks at its input, and says of itself that it works in place, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inplace = conv(8, 8), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        factor = 0.5 if bool(y.isfinite().all()) else 0.0
        return y.view(y.shape[0], -1).view(y.shape) * factor + x


def test_an_untraceable_block_stays_whole_and_in_float():
    chain = BlockChain([stem(), Untraceable(), Untraceable(), head()], example=IMAGE)
    check(chain, IMAGE)
    rows = [row for row in freeze(chain, Span(0, 1)).describe() if row.block == 1]
    assert [row.kernel for row in rows] == ["float32"]


class AroundUntraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv = Untraceable(), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * x + self.conv(x)


def test_an_untraceable_layer_stays_whole_and_its_neighbours_do_not():
    model = nn.Sequential(stem(), AroundUntraceable(), AroundUntraceable(), head())
    with pytest.warns(UserWarning, match="keeps Untraceable"):
        chain = split(model, IMAGE)
    check(chain, IMAGE)
    rows = kernels(freeze(chain, Span(0, 1), backend="reference"))
    assert (rows["Untraceable"], rows["conv 3×3 8→8 + add"]) == ("float32", "reference")


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Record:
    logits: Tensor
    hidden: tuple[Tensor, ...]


BUNDLES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda y: (y, y.cos()), lambda r: r[0] + r[1]),
    "nested tuple": (lambda y: ((y, y + 1), None), lambda r: r[0][0] * r[0][1]),
    "list": (lambda y: [y, y.tanh()], lambda r: r[0] + r[1]),
    "dict": (lambda y: {"a": y, "b": y.sin()}, lambda r: r["a"] * r["b"]),
    "named tuple": (lambda y: Pair(y, y.exp()), lambda r: r.left + r.right),
    "dataclass": (lambda y: Record(y, (y * 3,)), lambda r: r.logits + r.hidden[0]),
}


class Bundling(nn.Module):
    def __init__(self, bundle: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.bundle = conv(8, 8), bundle

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bundle(y if bool(y.isfinite().all()) else x)


class TakingApart(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        bundle, self.take = BUNDLES[kind]
        self.inner, self.last = Bundling(bundle), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.take(self.inner(x))))


@pytest.mark.filterwarnings("ignore:cocofl.split keeps")
@pytest.mark.parametrize("kind", BUNDLES)
def test_gradients_pass_through_whatever_a_layer_returns(kind):
    model = nn.Sequential(stem(), TakingApart(kind), TakingApart(kind), head())
    check(split(model, IMAGE), IMAGE, tolerance=0.1)


class Opaque(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.result = conv(3, 8), result

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.result(y if bool(y.isfinite().all()) else x)


def test_an_untraceable_block_may_return_several_values():
    chain = BlockChain(
        [Opaque(lambda y: (y.relu(), y.tanh())), Join(), head()],
        wiring=[Wiring(("x",), ("a", "b")), Wiring(("a", "b"), ("c",)), Wiring(("c",), ("d",))],
        example=IMAGE,
    )
    check(chain, IMAGE)


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(8, 8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + 3 * skip)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 8), conv(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(self.one(x)), self.two(x)


def test_a_gradient_flows_through_every_value_between_blocks():
    chain = BlockChain(
        [Fork(), conv(8, 8), Join(), head()],
        wiring=[
            Wiring(("x",), ("a", "b")),
            Wiring(("a",), ("c",)),
            Wiring(("c", "b"), ("d",)),  # b comes from two blocks before
            Wiring(("d",), ("e",)),
        ],
        example=IMAGE,
    )
    check(chain, IMAGE, tolerance=0.15)


class Drops(Fork):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(x)
        return y, F.dropout(y, 0.5, self.training)


def test_two_values_that_are_one_when_frozen_are_refused():
    chain = BlockChain(
        [Drops(), Join(), head()],
        wiring=[Wiring(("x",), ("a", "b")), Wiring(("a", "b"), ("c",)), Wiring(("c",), ("d",))],
        example=IMAGE,
    )
    with pytest.raises(CannotLower, match="'a' and 'b' are one value once dropout is gone"):
        freeze(chain, Span(0, 1))


def test_a_tuple_between_blocks_is_refused():
    chain = BlockChain([Fork(), TakesPair(), head()], example=IMAGE)
    with pytest.raises(
        CannotLower, match="block 0 hands on 'x1', a tuple, as one value; give each"
    ):
        freeze(chain, Span(2, 3))


class TakesPair(Join):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(*pair)


@pytest.mark.parametrize("kind", ["named tuple", "dataclass"])
def test_a_model_may_return_a_class_with_fields(kind: str) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = conv(3, 8), conv(8, 8)

        def forward(self, x: Tensor) -> Any:
            return BUNDLES[kind][0](self.last(self.first(x)))

    model = Returning()
    chain, (bundle, take) = split(model, IMAGE), BUNDLES[kind]
    expected = model(IMAGE)
    assert type(expected) is type(bundle(IMAGE))
    for variant, tolerance in (("f", 1e-5), ("qff", 0.05)):
        for start in range(len(chain)):
            result = freeze(chain, Span(start, start + 1), variant=variant)(IMAGE)
            assert type(result) is type(expected)
            error = (take(result) - take(expected)).abs().max()
            assert error < tolerance * take(expected).abs().max()


def test_an_object_of_the_users_own_is_refused_as_a_result():
    chain = BlockChain([stem(), Opaque(lambda y: Record(y, (y,)))], example=IMAGE)
    chain.blocks[1].get_submodule("1").conv = conv(8, 8)
    with pytest.raises(CannotLower, match="returns a Record; expected tensors, or tuples"):
        freeze(chain, Span(0, 1))


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask += 1.0
        return self.linear(x) * mask


def test_overwriting_what_another_block_reads_is_refused():
    chain = BlockChain(
        [Masks(), Masks()],
        wiring=[Wiring(("x", "mask"), ("y",)), Wiring(("y", "mask"), ("z",))],
        example=(SEQUENCE, torch.ones(1)),
    )
    with pytest.raises(CannotLower, match=r"block 0 overwrites its input 'mask'.*a clone"):
        freeze(chain, Span(0, 1))


def test_the_example_is_not_overwritten():
    chain = split(nn.Sequential(nn.ReLU(inplace=True), conv(3, 4), conv(4, 4)), IMAGE)
    freeze(chain, Span(0, 1))
    assert torch.equal(chain.example[0], IMAGE)
    assert float(IMAGE.min()) < 0


class BoundMethods(nn.Module):
    """Attributes that refer to the module itself or to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(8, 8)
        self.path = self._path
        self.order = [self.conv, torch.relu]
        self.by_name = {"conv": self.conv.forward}

    def _path(self, x: Tensor) -> Tensor:
        return self.by_name["conv"](self.conv(x))

    def forward(self, x: Tensor) -> Tensor:
        y = self.path(x) if bool(x.isfinite().all()) else x
        for layer in self.order:
            y = layer(y)
        return y


def test_a_copied_block_does_not_reach_back_to_the_chain():
    chain = BlockChain([stem(), BoundMethods(), BoundMethods(), head()], example=IMAGE)
    state = {key: tensor * 1.5 for key, tensor in chain_state(chain).items()}
    moved = copy.deepcopy(chain)
    moved.load_state_dict(state)
    for span in (Span(1, 2), Span(0, 1), Span(3, 4)):
        for variant in ("f", "ff", "qff"):
            net = freeze(chain, span, variant=variant, backend="reference", state=state)
            expected = gradients(freeze(moved, span, variant="ff"), IMAGE)
            found = gradients(net, IMAGE)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert (found[key] - value).norm() <= 0.1 * value.norm() + 1e-6
    assert all(p.grad is None for p in chain.parameters())


def test_weights_made_by_hooks_come_from_the_state():
    def build() -> BlockChain:
        torch.manual_seed(0)
        with pytest.warns(FutureWarning, match="weight_norm"):
            layers = [nn.utils.weight_norm(conv(8, 8)) for _ in range(2)]
        blocks = [nn.Sequential(layer, nn.BatchNorm2d(8), nn.ReLU()) for layer in layers]
        return BlockChain([stem(), *blocks, head()], example=IMAGE)

    chain, moved = build(), build()
    chain(IMAGE).sum().backward()  # leaves weights behind that are part of an autograd graph
    chain.zero_grad()
    state = {key: tensor * 1.5 for key, tensor in chain_state(moved).items()}
    moved.load_state_dict(moved.state_dict() | state)
    for span in (Span(0, 1), Span(3, 4)):
        expected = gradients(freeze(moved, span, variant="ff"), IMAGE)
        for variant in ("ff", "qff"):
            net = freeze(chain, span, variant=variant, backend="reference", state=state)
            for key, value in gradients(net, IMAGE).items():
                assert (value - expected[key]).norm() <= 0.25 * expected[key].norm()


def test_a_dropout_that_never_rests_is_active_in_f_and_identity_in_ff_and_qff():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.dropout(x, 0.5))

    chain = split(nn.Sequential(stem(), Noisy(), Noisy(), head()), IMAGE)

    def differ(variant: str) -> bool:
        net = freeze(chain, Span(3, 4), variant=variant, backend="reference", calibrate=False)
        return not torch.equal(net(IMAGE), net(IMAGE))

    assert (differ("f"), differ("ff"), differ("qff")) == (True, False, False)


def test_relu6_cuts_the_gradient_where_it_cuts_the_value():
    """On the fly, 6 is the largest code: nothing above it tells that a value was cut."""
    first, last = nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(first.weight)
    nn.init.ones_(last.weight)
    chain = split(nn.Sequential(nn.Conv2d(1, 1, 1), first, nn.ReLU6(), last), IMAGE[:, :1])
    nn.init.ones_(chain.blocks[0].get_parameter("0.weight").data)
    nn.init.zeros_(chain.blocks[0].get_parameter("0.bias").data)
    net = freeze(chain, Span(0, 1), backend="reference")
    x = torch.tensor([-1.0, 3.0, 7.0, 9.0]).view(1, 1, 1, 4).requires_grad_()
    with pytest.raises(InvalidExample, match="1×1×4 reach"):
        net(x)
    chain = BlockChain(list(chain.blocks), example=x.detach())
    net = freeze(chain, Span(0, 1), backend="reference")
    net(x).sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0], abs=0.02)


def test_a_parameter_that_does_not_learn_does_not_learn():
    model = nn.Sequential(conv(3, 8), conv(8, 8), conv(8, 8))
    model[1].weight.requires_grad_(False)
    net = freeze(split(model, IMAGE), Span(0, 2))
    net(IMAGE).sum().backward()
    learned = {name for name, p in net.named_parameters() if p.grad is not None}
    assert learned == {"trained.0.0.weight", "trained.0.0.bias", "trained.1.1.bias"}


@pytest.mark.parametrize("size", [1, (1, 1), [1, 1], (None, 1), (1, None)])
def test_a_global_average_in_every_spelling(size):
    model = nn.Sequential(conv(3, 8), nn.AdaptiveAvgPool2d(size), conv(8, 8), conv(8, 4))
    check(split(model, IMAGE), IMAGE, tolerance=0.1)


def test_images_without_a_batch():
    model = nn.Sequential(conv(3, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), conv(8, 8), conv(8, 4))
    check(split(model, IMAGE[0]), IMAGE[0])


def test_a_vector_without_a_batch():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    check(split(model, SEQUENCE[0, 0]), SEQUENCE[0, 0])


def test_smaller_and_larger_batches_than_the_example():
    chain = split(nn.Sequential(stem(), Residual(), Residual(), head()), IMAGE)
    for batch in (IMAGE[:1], IMAGE[:3], torch.cat([IMAGE, IMAGE])):
        for block in chain.blocks:
            block.eval()
        net = freeze(chain, Span(1, 2), backend="reference").eval()
        expected = gradients(freeze(chain, Span(1, 2), variant="ff").eval(), batch)
        found = gradients(net, batch)
        for key, value in expected.items():
            assert (found[key] - value).norm() <= 0.15 * value.norm()


def test_sequences_of_another_length_than_the_example():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    chain = split(nn.Sequential(*layers, nn.Linear(8, 2)), SEQUENCE)
    check(chain, SEQUENCE[:, :4])
    check(chain, torch.cat([SEQUENCE, SEQUENCE], 1))


def test_images_of_another_size_are_refused_where_the_gradient_depends_on_it():
    chain = split(nn.Sequential(conv(3, 8), conv(8, 8, stride=2), conv(8, 4)), IMAGE)
    other = F.pad(IMAGE, (1, 1, 1, 1))
    with pytest.raises(InvalidExample, match=r"images of 8×10×10 reach .* for 8×8×8"):
        freeze(chain, Span(0, 1))(other)
    assert freeze(chain, Span(2, 3))(other).shape == (5, 4, 5, 5)  # forward only: any size


@pytest.mark.parametrize("measured", [False, True])
def test_gradients_of_a_few_tensors_are_those_of_all(measured):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3)]
    chain, x = split(nn.Sequential(*layers, nn.Linear(8, 3)), torch.randn(6, 8)), torch.randn(6, 8)
    net = freeze(chain, Span(0, 1), backend="reference", calibrate=measured)
    parameters = list(net.trained.parameters())
    net(x).square().sum().backward()  # measures scales, where it does
    net.zero_grad()
    net(x).square().sum().backward()
    expected = [p.grad.clone() for p in parameters]
    for own, all_of_them in zip(
        torch.autograd.grad(net(x).square().sum(), parameters), expected, strict=True
    ):
        assert torch.equal(own, all_of_them)


class SwitchedOff(nn.Module):
    """A norm that is no norm here, of a context that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.context_norm = nn.Linear(8, 8), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.context_norm(None)
        return self.layer(x).relu()


class Rotated(nn.Module):
    """As position embeddings do it: a part of the features is turned, here all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        turned, rest = x[..., :8], x[..., 8:]
        return self.layer(torch.cat([turned.flip(-1), rest], -1)).relu()


@pytest.mark.parametrize("block", [SwitchedOff, Rotated])
def test_what_is_not_there_is_frozen_too(block):
    torch.manual_seed(0)
    model, x = nn.Sequential(block(), block(), block(), nn.Linear(8, 3)), torch.randn(6, 8)
    expected = model(x)
    for trained in (0, 1, 3):
        net = freeze(split(model, x), Span(trained, trained + 1), backend="reference")
        net.measure_scales()
        for _ in range(2):
            result = net(x)
            assert (result - expected).abs().max() < 0.05 * expected.abs().max()
            result.sum().backward()
        assert all(scale > 0 for key, scale in net.update().tensors.items() if "scales" in key)


def test_going_backward_twice_is_refused():
    chain = split(nn.Sequential(conv(3, 8), conv(8, 8), conv(8, 4)), IMAGE)
    loss = freeze(chain, Span(0, 1), backend="reference")(IMAGE).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidSetting, match="backward once per forward pass"):
        loss.backward()


def test_second_derivatives_are_refused():
    chain = split(nn.Sequential(conv(3, 8), nn.Tanh(), conv(8, 8), conv(8, 4)), IMAGE)
    x = IMAGE.clone().requires_grad_()
    loss = freeze(chain, Span(0, 1), backend="reference")(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_several_forward_passes_before_one_backward_pass():
    chain = split(nn.Sequential(conv(3, 8), conv(8, 8), conv(8, 4)), IMAGE)
    net = freeze(chain, Span(0, 1), backend="reference", calibrate=False)
    one = gradients(net, IMAGE)
    two = gradients(net, -2 * IMAGE)
    net.zero_grad()
    (net(IMAGE).square().sum() + net(-2 * IMAGE).square().sum()).backward()
    for i, parameter in enumerate(net.parameters()):
        both = one[f"gradient {i}"] + two[f"gradient {i}"]
        torch.testing.assert_close(parameter.grad, both)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_number_does_not_turn_into_a_sound_one(broken, measured):
    model = nn.Sequential(stem(), nn.Sequential(conv(8, 8), nn.GELU()), Residual(), head())
    chain = split(model, IMAGE)
    state = chain_state(chain)
    if measured:
        full = freeze(chain, Span(0, len(chain)))
        full.measure_scales()
        full(IMAGE).sum().backward()
        state = full.update().tensors | state
    x = IMAGE.clone()
    x[0, 0, 0, 0] = broken
    for span in (Span(len(chain) - 1, len(chain)), Span(0, 1)):
        assert not freeze(chain, span, backend="reference", state=state)(x).isfinite().all()
    net = freeze(chain, Span(0, 1), backend="reference", state=state)
    (net(IMAGE) * broken).sum().backward()
    assert not net.trained[0].get_parameter("0.0.weight").grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_int8_refuses_a_network_that_is_not_float32(dtype):
    chain = split(nn.Sequential(conv(3, 8), conv(8, 8)).to(dtype), IMAGE.to(dtype))
    with pytest.raises(CannotLower, match=f"float32.*{dtype}"):
        freeze(chain, Span(0, 1))
    net = freeze(chain, Span(0, 1), variant="ff")
    assert net(IMAGE.to(dtype)).dtype == dtype


def test_a_chain_without_an_example_says_how_to_give_one():
    with pytest.raises(CannotLower, match=r"BlockChain\(blocks, example=batch\)"):
        freeze(BlockChain([conv(3, 8), conv(8, 8)]), Span(0, 1))


def test_an_example_that_does_not_fit_the_blocks_names_the_block():
    chain = BlockChain([conv(3, 8), conv(4, 8)], example=IMAGE)
    with pytest.raises(InvalidExample, match=r"block 1 does not run .* as \(5, 8, 8, 8\)"):
        freeze(chain, Span(0, 1))


def test_the_last_linear_layer_is_never_quantized():
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate = conv(8, 8), nn.Linear(8, 8)
            self.one, self.two = nn.Linear(8, 3), nn.Linear(8, 2)
            self.norm = nn.LayerNorm(8)  # after the heads in the order of attributes

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.norm(self.gate(self.body(x).mean((2, 3))))
            return self.one(x), self.two(x)

    chain = split(nn.Sequential(stem(), TwoHeads()), IMAGE, cuts=["0"])
    net = freeze(chain, Span(0, 1), backend="reference")
    passing = [row for row in net.describe() if row.role == "passing"]
    assert [row.kernel for row in passing if row.operation == "Linear"] == ["float32"] * 2
    assert "linear 8→8" in [row.operation for row in passing if row.kernel == "reference"]


def test_a_convolution_at_the_end_is_quantized():
    chain = split(nn.Sequential(stem(), conv(8, 8), conv(8, 4)), IMAGE)
    rows = freeze(chain, Span(0, 1), backend="reference").describe()
    assert [row.kernel for row in rows if row.role == "passing"] == ["reference"] * 2


class Masked(nn.Module):
    """Attention to what came before, by scores that a mask of floats is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2) + mask
        return x + self.value(scores.softmax(-1) @ x)


class WithSink(Masked):
    """The same with a position more to look at, as in GPT-OSS; scores and mask are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(1, 1, 1, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.query(x) @ x.transpose(1, 2)).unsqueeze(1) + mask
        sinks = self.sink.expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[:, 0, :, :-1]
        return x + self.value(weights @ x)


class Masking(nn.Module):
    def __init__(self, lowest: float, layer: type[Masked]) -> None:
        super().__init__()
        self.first, self.head, self.lowest = nn.Linear(8, 8), nn.Linear(8, 2), lowest
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), self.lowest).triu(1)
        if isinstance(self.layers[0], WithSink):
            mask = torch.cat((mask[None, None, :2], mask[None, None, 2:]), dim=2)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("layer", [Masked, WithSink])
def test_masks_of_floats_are_no_broken_numbers(
    lowest: float, measured: bool, layer: type[Masked]
) -> None:
    torch.manual_seed(0)
    model, x = Masking(lowest, layer), torch.randn(4, 6, 8)
    chain = split(model, x)
    assert len(chain) == 5
    assert len(chain.wiring[2].inputs) == 2
    expected = model(x)
    for start in range(5):
        net = freeze(chain, Span(start, start + 1), backend="reference")
        for _ in range(1 + measured):
            y = net(x)
            y.square().sum().backward()
        assert (y - expected).abs().max() < 0.1 * expected.abs().max()
        assert all(p.grad.isfinite().all() for p in net.trained.parameters())
        assert net(torch.full_like(x, torch.nan)).isnan().all()


class Routed(nn.Module):
    """Counts, as float and then as whole numbers, which row each sample goes to, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(8, 8), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        chosen = y[:, :4].argmax(-1)
        ends = torch.histc(chosen.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        return y * self.scales[chosen].unsqueeze(1) + 0 * ends.sum()


def test_what_has_no_gradient_gives_none_to_what_is_made_of_it() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8), Routed(), Routed(), nn.Linear(8, 2)),
        torch.randn(4, 8),
    )
    net = freeze(split(model, x), Span(0, 1), backend="reference")
    net(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in net.trained.parameters())
