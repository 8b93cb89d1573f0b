from __future__ import annotations

import copy
import gc
import json
import logging
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import (
    BlockChain,
    Blocks,
    CocoflError,
    InvalidSetting,
    InvalidSpan,
    InvalidState,
    KernelMissing,
    KernelPlan,
    Span,
    all_spans,
    chain_state,
    freeze,
    split,
)
from cocofl.freeze import VARIANTS, Network, kernel_plan, patience, steps
from cocofl.freeze.region import IntegerRegion
from cocofl.models import MODELS

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def unit(inside: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def network() -> nn.Module:
    """Four blocks of three convolutions and a head; every layer has a shape of its own."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 2))
    return nn.Sequential(unit(3, 5), nn.Sequential(unit(5, 6), nn.Dropout(0.5)), unit(6, 7), head)


@pytest.fixture
def chain() -> BlockChain:
    return split(network(), IMAGES)


def train(net: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(IMAGES).square().sum().backward()
        optimizer.step()


# What a user can get wrong


def test_a_span_that_is_empty_or_does_not_fit(chain):
    with pytest.raises(InvalidSpan, match="1:1 trains no block"):
        Span(1, 1)
    with pytest.raises(InvalidSpan, match="the chain has 4 blocks, so the largest span is 0:4"):
        freeze(chain, Span(2, 5))
    with pytest.raises(InvalidSpan, match=r"the span is \(0, 1\); expected one such as"):
        freeze(chain, (0, 1))


def test_a_model_instead_of_a_chain():
    with pytest.raises(InvalidSetting, match=r"BlockChain, not a Sequential.*cocofl.split"):
        freeze(network(), Span(0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "q"}, "unknown variant 'q'; expected one of f, ff, qff"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; expected one of auto, reference, onednn"),
        ({"headroom": 0.5}, "headroom is 0.5"),
        ({"headroom": float("nan")}, "headroom is nan"),
        ({"headroom": float("inf")}, "headroom is inf"),
        ({"weight_bits": 4}, "weight_bits is 4; expected 7 or 8"),
    ],
)
def test_a_setting_that_does_not_exist(options, message, chain):
    with pytest.raises(InvalidSetting, match=message):
        freeze(chain, Span(0, 1), **options)


SITE = "scales.0._0_2.output"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.0.weight"), r"lacks '0.0.weight'; expected .* shape \[5, 3, 3, 3\]"),
        (lambda s: s.pop("2.1.running_var"), "lacks '2.1.running_var'"),
        (
            lambda s: s.update({"0.0.wieght": torch.zeros(1)}),
            "has '0.0.wieght', which .* \\(did you mean 0.0.weight\\?\\)",
        ),
        (lambda s: s.update(zebra=torch.zeros(1)), "has 'zebra', which this chain does not know$"),
        (
            lambda s: s.update({"3.2.bias": torch.zeros(3)}),
            r"'3.2.bias' has shape \[3\]; the chain expects \[2\]",
        ),
        (
            lambda s: s.update({"3.2.bias": torch.zeros(2, dtype=torch.float64)}),
            "'3.2.bias' is torch.float64; the chain expects torch.float32",
        ),
        (lambda s: s["1.0.0.weight"].view(-1)[3:4].fill_(float("nan")), "'1.0.0.weight' holds NaN"),
        (lambda s: s["0.1.running_mean"][:1].fill_(float("inf")), "'0.1.running_mean' holds NaN"),
        (lambda s: s.update({"3.2.bias": [0.0, 0.0]}), "'3.2.bias' is a list; expected a tensor"),
        (lambda s: s.update({SITE: torch.tensor(-1.0)}), "is -1.0; a scale is a positive, finite"),
        (lambda s: s.update({SITE: torch.tensor(0.0)}), "is 0.0; a scale is a positive"),
        (lambda s: s.update({SITE: torch.tensor(float("nan"))}), "is nan; a scale is a positive"),
        (lambda s: s.update({SITE: torch.ones(2)}), "must be a tensor of one element"),
        (lambda s: s.update({SITE: 0.5}), "must be a tensor of one element"),
        (
            lambda s: s.update({"scales.0.conv.output": torch.tensor(1.0)}),
            "has 'scales.0.conv.output', which this chain does not know",
        ),
    ],
)
def test_a_state_that_does_not_fit(change, message, variant, chain):
    state = chain_state(chain)
    change(state)
    with pytest.raises(InvalidState, match=message):
        freeze(chain, Span(0, 1), variant=variant, state=state)


def test_a_known_scale_is_taken(chain):
    freeze(chain, Span(3, 4), state=chain_state(chain) | {SITE: torch.tensor(0.1)})


def test_numbers_may_be_so_large_that_their_sum_is_not_finite(chain):
    state = chain_state(chain)
    state["0.0.weight"].fill_(3e38)
    freeze(chain, Span(0, 1), variant="f", state=state)


def test_what_nobody_merges_may_be_in_a_state(chain):
    freeze(chain, Span(0, 1), state=chain.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_number_of_inputs(variant, chain):
    net = freeze(chain, Span(1, 2), variant=variant)
    with pytest.raises(CocoflError, match=r"takes 1 inputs \(input.*\), not 2"):
        net(IMAGES, IMAGES)
    with pytest.raises(CocoflError, match="not 0"):
        net()


# What goes back to the server


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_has_the_trained_blocks_and_nothing_else(variant, chain):
    for span in all_spans(4):
        net = freeze(chain, span, variant=variant, backend="reference")
        own = {key for i in range(span.start, span.stop) for key in chain.block_keys(i)}
        wanted = {key for key in own if not key.endswith("num_batches_tracked")}
        assert net.update().tensors.keys() == wanted
        assert net.update().blocks == span
        net.measure_scales()
        train(net, 1)
        scales = net.update().tensors.keys() - wanted
        assert {int(key.split(".")[1]) for key in scales} == set(range(span.start, span.stop))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("text", ["1:2+3:4", "0:1+2:3", "0:1+3:4", "0:1+2:4"])
def test_blocks_apart_learn_what_they_learn_in_the_whole(variant, text):
    """Without norms, freezing in float changes no gradient, and int8 turns it by little."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 5))
    x = torch.randn(16, 3, 8, 8)
    chain = split(model, x)
    assert len(chain) == 4
    found = {}
    for blocks in (Span(0, 4), Blocks(text)):
        net = freeze(chain, blocks, variant=variant, backend="reference")
        net(x).square().sum().backward()
        trained = [pair for block in net.trained for pair in block.named_parameters()]
        found[blocks] = {key: parameter.grad for key, parameter in trained}
        assert net.blocks == net.update().blocks == blocks
        assert {row.block for row in net.describe() if row.role == "trained"} == set(blocks)
    whole, own = found.values()
    for key, gradient in own.items():
        if variant == "qff":
            assert F.cosine_similarity(gradient.flatten(), whole[key].flatten(), dim=0) > 0.95
        else:
            torch.testing.assert_close(gradient, whole[key], rtol=1e-4, atol=1e-4)


def test_an_update_is_a_copy_and_knows_its_size(chain):
    net = freeze(chain, Span(3, 4))
    update = net.update()
    assert update.nbytes == 4 * (7 * 2 + 2)
    before = {key: tensor.clone() for key, tensor in update.tensors.items()}
    train(net)
    assert all(torch.equal(update.tensors[key], tensor) for key, tensor in before.items())
    assert not torch.equal(net.update().tensors["3.2.weight"], before["3.2.weight"])


def test_an_update_has_what_training_made_of_the_state(chain):
    state = {key: tensor * 0.5 for key, tensor in chain_state(chain).items()}
    net = freeze(chain, Span(1, 2), state=state)
    for key, tensor in net.update().tensors.items():
        assert torch.equal(tensor, state[key])
        assert tensor.is_contiguous()
    train(net)
    for key, tensor in net.update().tensors.items():
        assert not torch.equal(tensor, state[key])
        assert torch.equal(tensor, net.trained[0].state_dict()[key])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_trained_blocks_learn(variant, chain):
    net = freeze(chain, Span(1, 2), variant=variant, backend="reference")
    train(net, 1)
    assert all(p.grad is not None for p in net.trained.parameters())
    assert not any(p.requires_grad for p in net.frozen.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("training", [True, False])
def test_the_chain_is_left_untouched(variant, training, chain):
    chain.train(training)
    chain.blocks[1].train(not training)
    chain.blocks[2].get_parameter("2.0.weight").requires_grad_(False)
    before = copy.deepcopy(chain.state_dict())
    flags = [(m.training, *[p.requires_grad for p in m.parameters()]) for m in chain.modules()]
    for span in (Span(0, 1), Span(1, 3), Span(3, 4)):
        net = freeze(chain, span, variant=variant, backend="reference")
        net.measure_scales()
        train(net)
        net.eval()(IMAGES)
    assert [
        (m.training, *[p.requires_grad for p in m.parameters()]) for m in chain.modules()
    ] == flags
    assert all(torch.equal(tensor, before[key]) for key, tensor in chain.state_dict().items())
    assert all(p.grad is None for p in chain.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_state_is_left_untouched(variant, chain):
    state = chain_state(chain)
    before = copy.deepcopy(state)
    train(freeze(chain, Span(1, 3), variant=variant, state=state, backend="reference"))
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())


def test_random_numbers_do_not_depend_on_what_is_measured(chain):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    freeze(chain, Span(1, 2), backend="auto", plan=KernelPlan())
    assert torch.equal(torch.rand(1), expected)


# What is kept in memory


def reachable(root: object) -> Iterator[object]:
    """Everything an object keeps alive, but for modules, classes and global names."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, types.ModuleType | type):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, types.FunctionType):
            todo += [item.__closure__, item.__defaults__, item.__kwdefaults__]
        else:
            todo += gc.get_referents(item)


@pytest.mark.parametrize("backend", ["reference", "onednn", "legacy"])
def test_no_float_copy_of_a_quantized_weight_is_alive(backend, chain):
    shapes = [(5, 3, 3, 3), (6, 5, 3, 3), (7, 6, 3, 3)]

    def floats(net: nn.Module) -> set[tuple[int, ...]]:
        found = [x for x in reachable(net) if isinstance(x, Tensor) and x.is_floating_point()]
        return {tuple(x.shape) for x in found if not x.is_mkldnn}

    fused = floats(freeze(chain, Span(3, 4), variant="ff"))
    assert fused.issuperset(shapes), "the walk should find the weights where they are float"
    try:
        net = freeze(chain, Span(3, 4), backend=backend)
        other = freeze(chain, Span(1, 2), backend=backend)
    except KernelMissing as missing:
        pytest.skip(str(missing))
    net(IMAGES)
    train(other)
    assert not floats(net) & set(shapes)
    assert floats(other) & set(shapes) == {shapes[1]}
    assert (7, 6, 3, 3) not in floats(other)
    turned = {(3, 5, 3, 3), (5, 6, 3, 3), (6, 7, 3, 3)}  # as the gradient needs them
    assert not floats(other) & turned


def tensors_of(tape: Any) -> Iterator[Tensor]:
    return (x for x in reachable(tape) if isinstance(x, Tensor))


def test_a_passing_region_keeps_one_byte_an_element(chain):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), unit(4, 5), unit(5, 6), unit(6, 7))
    chain = split(model, IMAGES)
    net = freeze(chain, Span(0, 1), backend="reference")
    region = net._parts[-1].run
    assert isinstance(region, IntegerRegion)
    with torch.no_grad():
        _, tape = region.forward([torch.randn(4, 4, 8, 8)], keep=True)
    kept = list(tensors_of(tape))
    assert {x.dtype for x in kept} == {torch.uint8}
    assert sorted(x.numel() for x in kept) == [4 * 5 * 64, 4 * 6 * 64, 4 * 7 * 64]


def test_a_frozen_region_keeps_nothing(chain):
    net = freeze(chain, Span(3, 4), backend="reference")
    y = net._parts[0].run(IMAGES)
    assert not y.requires_grad
    assert y.grad_fn is None


# Statistics and dropout


@pytest.mark.parametrize(
    ("variant", "batch_statistics"), [("f", True), ("ff", False), ("qff", False)]
)
def test_whose_statistics_a_frozen_norm_uses(variant, batch_statistics, chain):
    state = chain_state(chain)
    state["0.1.running_mean"] += 10.0
    kept = freeze(chain, Span(3, 4), variant=variant, backend="reference")
    moved = freeze(chain, Span(3, 4), variant=variant, backend="reference", state=state)
    torch.manual_seed(0)
    expected = kept(IMAGES)
    torch.manual_seed(0)
    assert torch.equal(moved(IMAGES), expected) == batch_statistics


def buffers(net: nn.Module, key: str) -> list[Tensor]:
    return [t for name, t in net.named_buffers() if name.endswith(key)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_move_in_trained_blocks_only(variant, chain):
    state = chain_state(chain)
    net = freeze(chain, Span(1, 2), variant=variant, backend="reference")
    train(net)
    (trained,) = (t for t in buffers(net.trained, "running_mean"))
    assert not torch.equal(trained, state["1.0.1.running_mean"])
    frozen = buffers(net.frozen, "running_mean")
    assert len(frozen) == (2 if variant == "f" else 0)
    for key, tensor in zip(("0.1.running_mean", "2.1.running_mean"), frozen, strict=False):
        assert torch.equal(tensor, state[key])


@pytest.mark.parametrize(("variant", "random"), [("f", True), ("ff", False), ("qff", False)])
@pytest.mark.parametrize("span", [Span(2, 3), Span(0, 1)])
def test_dropout_in_frozen_blocks(variant, random, span, chain):
    net = freeze(chain, span, variant=variant, backend="reference", calibrate=False)
    assert torch.equal(net(IMAGES), net(IMAGES)) != random


@pytest.mark.parametrize(
    ("layer", "is_lowered_twice"),
    [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.Identity(), False)],
)
def test_a_chain_is_lowered_once_more_only_where_something_drops(layer, is_lowered_twice):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Conv2d(4, 2, 3))
    network = Network(split(model, IMAGES))
    assert (network.with_dropout is not network.lowered) == is_lowered_twice
    drops = [op for block in network.with_dropout.blocks for op in block.operations]
    assert any(getattr(op, "drops", 0) for op in drops) == is_lowered_twice


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_in_trained_blocks(variant, chain):
    net = freeze(chain, Span(1, 2), variant=variant, backend="reference")
    assert not torch.equal(net(IMAGES), net(IMAGES))
    assert net.eval() is net
    assert torch.equal(net(IMAGES), net(IMAGES))


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_is_that_of_the_chain(variant, chain):
    train(chain)
    expected = chain.eval()(IMAGES)
    net = freeze(chain, Span(1, 2), variant=variant, backend="reference").eval()
    found = net(IMAGES)
    assert (found - expected).norm() <= (0.05 if variant == "qff" else 1e-5) * expected.norm()
    net.train()
    assert net.trained.training
    assert net.frozen.training or variant != "f"
    for block in net.frozen:
        assert block.training == (variant == "f")


# Scales


def scales(net: Any) -> dict[str, float]:
    tensors = net.update().tensors
    return {key: float(t) for key, t in tensors.items() if key.startswith("scales.")}


def test_scales_are_those_of_the_next_step_only(chain):
    net = freeze(chain, Span(1, 2), variant="ff")
    train(net)
    assert not scales(net)
    net.measure_scales()
    train(net, 1)
    first = scales(net)
    assert first
    train(net, 2)
    assert scales(net) == first
    net.measure_scales()
    train(net, 1)
    assert scales(net).keys() == first.keys()
    assert scales(net) != first


@pytest.mark.parametrize("variant", VARIANTS)
def test_measuring_changes_no_number(variant, chain):
    def step(*, measure: bool) -> list[Tensor]:
        net = freeze(chain, Span(0, 3), variant=variant, backend="reference")
        if measure:
            net.measure_scales()
        torch.manual_seed(4)
        y = net(IMAGES)
        y.square().sum().backward()
        return [y, *(p.grad for p in net.trained.parameters())]

    for a, b in zip(step(measure=True), step(measure=False), strict=True):
        assert torch.equal(a, b)


def test_a_scale_is_the_range_of_a_value_and_of_its_gradient():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 2.0)
    nn.init.constant_(model[0].bias, 0.0)
    nn.init.constant_(model[2].weight, 3.0)
    net = freeze(split(model, torch.ones(2, 1)), Span(0, 1), variant="ff")
    net.measure_scales()
    net(torch.tensor([[-1.0], [127.0]])).sum().backward()
    found = scales(net)
    assert found == {"scales.0._1.output": 2.0, "scales.0._1.gradient": pytest.approx(3 / 127)}


def test_zeros_and_broken_numbers_are_no_scale(chain):
    net = freeze(chain, Span(0, 1), variant="ff")
    net.measure_scales()
    (net(IMAGES) * float("nan")).sum().backward()
    assert {key.rpartition(".")[2] for key in scales(net)} == {"output"}


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.down = nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1), nn.Conv2d(9, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 3, c // 3, h, w).transpose(1, 2).reshape(n, c, h, w)
        x = F.gelu(self.down(x))
        return F.max_pool2d(x, 3, 1, 1) * torch.sigmoid(x)


def dense_chain() -> BlockChain:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 2))
    return split(nn.Sequential(unit(3, 6), *[Dense() for _ in range(3)], head), IMAGES)


@pytest.mark.parametrize("build", [dense_chain, lambda: split(network(), IMAGES)])
def test_frozen_blocks_ask_for_the_scales_that_trained_ones_measure(build, monkeypatch):
    """With all scales known, only what enters a region is scaled on the fly."""
    chain = build()
    state = chain_state(chain)
    for index in range(len(chain)):  # every block is trained by a device of its own
        net = freeze(chain, Span(index, index + 1), backend="reference")
        net.measure_scales()
        net(IMAGES.clone().requires_grad_()).square().sum().backward()
        known = set(Network.of(chain).lowered.blocks[index].sites)
        found = scales(net)
        assert {key.split(".", 1)[1].rpartition(".")[0] for key in found} <= known
        state |= net.update().tensors
    asked: list[tuple[int, ...]] = []
    on_the_fly = steps.quantize_on_the_fly

    def noted(x: Tensor, **options: Any) -> Any:
        asked.append(tuple(x.shape))
        return on_the_fly(x, **options)

    monkeypatch.setattr(steps, "quantize_on_the_fly", noted)
    last = Span(len(chain) - 1, len(chain))
    freeze(chain, last, backend="reference", state=state)(IMAGES)
    assert asked == [(4, 3, 8, 8)]
    asked.clear()
    net = freeze(chain, Span(0, 1), backend="reference", state=state)
    y = net(IMAGES)
    assert len(asked) <= 1  # what block 0 hands over
    asked.clear()
    y.square().sum().backward()
    assert not asked  # the head is float32, so the first gradient in codes has a known scale


def test_what_crosses_the_border_of_a_region_is_scaled_on_the_fly():
    """A trained block changes: what it hands over, and the loss's gradient, are measured."""
    model = nn.Sequential(unit(3, 5), unit(5, 6), nn.Conv2d(6, 2, 1))
    chain, results = split(model, IMAGES), []
    for scale in (1.0, 1e-6):
        known = {SITE: torch.tensor(scale), "scales.2._2.gradient": torch.tensor(scale)}
        state = chain_state(chain) | known
        net = freeze(chain, Span(0, 1), backend="reference", state=state)
        y = net(IMAGES)
        y.sum().backward()
        results.append([y, *(p.grad for p in net.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_every_scale_is_used(chain):
    """Each scale that a device uploads changes what a frozen block computes somewhere."""
    state = chain_state(chain)
    net = freeze(chain, Span(0, 4), variant="ff")
    net.measure_scales()
    train(net, 1)
    found = {k: t for k, t in net.update().tensors.items() if k.startswith("scales.")}
    used = {
        key
        for key in found
        for span in (Span(3, 4), Span(0, 1))
        if differs(chain, span, state | found, key)
    }
    # No map reads what the network returns and what pooling reads, nor the gradient of block 0.
    unused = {key for key in found if key not in used}
    assert {key.split(".")[1] for key in unused} <= {"0", "2", "3"}
    assert any(key.startswith("scales.1.") and key.endswith("gradient") for key in used)


def differs(chain: BlockChain, span: Span, state: dict[str, Tensor], key: str) -> bool:
    results = []
    for known in (state, state | {key: state[key] * 4}):
        net = freeze(chain, span, backend="reference", state=known).eval()
        y = net(IMAGES)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in net.trained.parameters())])
    return any(not torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_headroom_keeps_larger_values_from_saturating(chain):
    net = freeze(chain, Span(0, 4), variant="ff").eval()
    net.measure_scales()
    net(IMAGES).sum().backward()
    state = chain_state(chain) | net.update().tensors
    exact = freeze(chain, Span(3, 4), variant="ff").eval()

    def error(headroom: float, factor: float) -> float:
        net = freeze(chain, Span(3, 4), backend="reference", state=state, headroom=headroom)
        expected = exact(factor * IMAGES)
        return float(((net.eval()(factor * IMAGES) - expected).norm() / expected.norm()).detach())

    assert error(1.0, 1.0) < 0.02  # the range that was measured
    assert error(4.0, 3.0) < 0.1 < error(1.0, 3.0)  # three times that range


# What it says of itself


def test_describe_lists_block_role_operation_and_kernel(chain):
    rows = freeze(chain, Span(1, 2), backend="reference").describe()
    assert [tuple(row) for row in rows] == [
        (0, "frozen", "conv 3×3 3→5 + norm + relu", "reference"),
        (1, "trained", "conv 3×3 5→6 + norm + relu", "float32"),
        (2, "passing", "conv 3×3 6→7 + norm + relu", "reference"),
        (2, "passing", "AdaptiveAvgPool2d", "float32"),
        (2, "passing", "Flatten", "float32"),
        (3, "passing", "Linear", "float32"),
    ]


@pytest.mark.parametrize("variant", ["f", "ff"])
def test_describe_without_int8(variant, chain):
    rows = freeze(chain, Span(3, 4), variant=variant).describe()
    assert {row.kernel for row in rows} == {"float32"}
    assert [row.role for row in rows] == ["frozen"] * 5 + ["trained"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_describe_of_blocks_that_are_rewritten_to_train_faster(variant):
    pooled = nn.Sequential(unit(5, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    chain = split(nn.Sequential(unit(3, 5), pooled), IMAGES, cuts=["0"])
    rows = freeze(chain, Span(1, 2), variant=variant, backend="reference").describe()
    operations = [row.operation for row in rows if row.role == "trained"]
    assert operations == ["conv 3×3 5→6 + norm + relu", "AdaptiveAvgPool2d", "Flatten", "Linear"]


# Kernel plans


def test_a_second_run_obeys_the_plan_of_the_first(chain, tmp_path):
    plan = KernelPlan()
    first = freeze(chain, Span(1, 2), backend="auto", plan=plan)
    plan.save(tmp_path / "plan.json")
    again = KernelPlan.load(tmp_path / "plan.json")
    assert again.choices == plan.choices
    assert len(plan.choices) == 3  # two convolutions, and the gradient of the second
    second = freeze(chain, Span(1, 2), backend="auto", plan=again)
    assert second.describe() == first.describe()
    assert torch.equal(first.eval()(IMAGES), second.eval()(IMAGES))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_is_obeyed_even_where_another_kernel_is_faster(chain, tmp_path):
    plan = KernelPlan()
    freeze(chain, Span(1, 2), backend="auto", plan=plan)
    for name in ("reference", "bfloat16"):
        forced = KernelPlan(dict.fromkeys(plan.choices, name), fixed=True)
        try:
            rows = freeze(chain, Span(1, 2), backend="auto", plan=forced).describe()
        except KernelMissing:
            continue
        assert [row.kernel for row in rows if row.operation.startswith("conv")] == [
            name, "float32", name,
        ]  # fmt: skip


def test_a_fixed_plan_refuses_what_it_does_not_know(chain):
    with pytest.raises(KernelMissing, match="says nothing about 'conv 3>5 k3x3"):
        freeze(chain, Span(3, 4), backend="auto", plan=KernelPlan(fixed=True))


def test_a_plan_that_grows(chain):
    plan = KernelPlan()
    freeze(chain, Span(3, 4), backend="auto", plan=plan)
    assert len(plan.choices) == 3
    freeze(chain, Span(0, 1), backend="auto", plan=plan)
    assert len(plan.choices) == 5  # and two gradients
    plan.choices.clear()
    assert len(plan.choices) == 5


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": "cocofl kernel plan 1"}',
        '{"format": "cocofl kernel plan 0", "choices": {}}',
        '{"format": "cocofl kernel plan 1", "choices": ["onednn"]}',
        '{"format": "cocofl kernel plan 1", "choices": {"conv": 3}}',
    ],
)
def test_a_file_that_is_no_plan(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InvalidSetting, match=r"plan\.json is not a kernel plan"):
        KernelPlan.load(path)


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(InvalidSetting, match=r"nowhere\.json is not a kernel plan"):
        KernelPlan.load(tmp_path / "nowhere.json")


def test_a_plan_with_a_kernel_nobody_knows(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "cocofl kernel plan 1", "choices": {"conv": "magic"}}))
    with pytest.raises(KernelMissing, match="asks for 'magic' at 'conv'; known are reference"):
        KernelPlan.load(path)


@pytest.mark.parametrize(("backend", "kinds"), [("reference", {"trained", "int8"})])
def test_shares_of_time_are_of_what_there_is_and_leave_no_trace(backend, kinds):
    model = MODELS["mobilenet"](10, tiny=True)
    x = model.example_input(4)
    chain = split(model, x)
    for variant, there in (("qff", kinds), ("f", {"trained", "float32"})):
        net = freeze(chain, Span(2, 3), variant=variant, backend=backend)
        net(x).sum().backward()
        before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        shares = net.time_shares(x)
        assert sum(shares.values()) == pytest.approx(1.0)
        assert {kind for kind, share in shares.items() if share > 0} == there
        assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
        after = [p.grad for p in net.parameters() if p.grad is not None]
        assert all(torch.equal(one, two) for one, two in zip(gradients, after, strict=True))


def test_what_takes_long_is_said_while_it_does_and_once(monkeypatch, caplog):
    monkeypatch.setattr(patience, "LONG_S", 0.05)
    monkeypatch.setattr(kernel_plan, "LONG_S", 0.05)
    heard = []

    def slow():
        time.sleep(0.1)
        heard.append(len(caplog.messages))
        return {"int8": lambda: None, "float32": lambda: time.sleep(0.01)}

    plan = KernelPlan(regions=True)
    with caplog.at_level(logging.WARNING, "cocofl"):
        assert [plan.choose_for_region(name, slow) for name in ("one", "two")] == ["int8"] * 2
    assert heard == [1, 1]
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "measuring which int8 kernels are fastest for this network on this machine"
    ]
