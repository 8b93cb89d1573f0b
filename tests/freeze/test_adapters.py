"""Low-rank adapters: what learns, that it learns what LoRA learns, and that int8 is near it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import BlockChain, Span, chain_state, freeze, split
from cocofl.errors import InvalidSetting, InvalidSpan
from cocofl.freeze import AdaptedChain, Network, adapt, upload_sizes
from cocofl.freeze.adapters import PREFIX

RANK, ALPHA = 2, 6.0
X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6) % 4


class Transposed(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2 has it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.bias, self.out = nn.Parameter(torch.randn(out)), out

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.out,)  # noqa: RUF005 - as GPT-2 has it, and can be traced
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Signal(nn.Module):
    """From images to rows, and a convolution along them."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(8, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.along(x.flatten(2)).flatten(1)


def network() -> nn.Sequential:
    """Of every kind of map one; the second convolution is grouped, so it has no adapter."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU()),
        Signal(),
        nn.Sequential(nn.Linear(48, 12), nn.GELU()),
        nn.Sequential(Transposed(12, 10), nn.ReLU()),
        nn.Linear(10, 4),
    )


@pytest.fixture
def chain() -> AdaptedChain:
    model = network()
    cuts = [str(i) for i in range(5)]
    return adapt(split(model, X, cuts=cuts, by_running=True), RANK, ALPHA)


def grown(chain: AdaptedChain) -> dict[str, Tensor]:
    """A state whose adapters have learnt something."""
    rng = torch.Generator().manual_seed(2)
    return {
        key: 0.3 * torch.randn(t.shape, generator=rng) if key.endswith(".up") else t
        for key, t in chain_state(chain).items()
    }


def step(net: nn.Module, lr: float = 0.1) -> float:
    loss = F.cross_entropy(net(X), Y)
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)
                parameter.grad = None
    return loss.item()


def test_adapters_and_the_head_are_all_that_learns(chain: AdaptedChain) -> None:
    assert chain.learned == (
        ("lora.0.0.down", "lora.0.0.up"),
        (),
        ("lora.2.along.down", "lora.2.along.up"),
        ("lora.3.0.down", "lora.3.0.up"),
        ("lora.4.0.down", "lora.4.0.up"),
        ("5.weight", "5.bias"),
    )
    assert chain.learning_blocks == (0, 2, 3, 4, 5)
    net = freeze(chain, Span(0, 4), variant="f")
    assert str(net.blocks) == "0:1+2:4", "a block without anything to learn is frozen"
    assert sorted(net.update().tensors) == sorted(
        chain.learned[0] + chain.learned[2] + chain.learned[3]
    )
    sizes = upload_sizes(chain, scales=False)
    assert sum(sizes[:4]) == net.update().nbytes
    assert sizes[1] == 0


def test_at_first_nothing_changes(chain: AdaptedChain) -> None:
    assert torch.equal(chain(X), chain.plain(X))
    one, same, other = (chain.fresh_adapters(seed) for seed in (7, 7, 8))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["lora.3.0.down"], other["lora.3.0.down"])
    assert all(not t.any() for key, t in one.items() if key.endswith(".up"))


class BruteForce(nn.Module):
    """LoRA as one writes it down: weights are computed anew each time, from factors that learn."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = network().requires_grad_(False)
        self.model[5].requires_grad_(True)
        self.factors = {
            key: nn.Parameter(t.clone()) for key, t in state.items() if key.startswith(PREFIX)
        }
        for key, parameter in self.factors.items():
            self.register_parameter(key.replace(".", "/"), parameter)

    def forward(self, x: Tensor) -> Tensor:
        changed = {}
        for layer in ("0.0", "2.along", "3.0", "4.0"):
            down, up = (self.factors[f"lora.{layer}.{name}"] for name in ("down", "up"))
            change = ALPHA / RANK * torch.einsum("or,r...->o...", up, down)
            own = self.model.get_parameter(f"{layer}.weight")
            changed[f"{layer}.weight"] = own + (change.t() if layer == "4.0" else change)
        found: Tensor = torch.func.functional_call(self.model, changed, (x,))
        return found


def test_training_is_that_of_lora_written_down(chain: AdaptedChain) -> None:
    state = chain_state(chain)
    net, brute = freeze(chain, Span(0, 6), variant="f", state=state), BruteForce(state)
    losses = [(step(net), step(brute)) for _ in range(5)]
    assert losses[-1][0] < losses[0][0]
    assert all(one == pytest.approx(other, rel=1e-5) for one, other in losses)
    sent = net.update().tensors
    for key, factor in brute.factors.items():
        torch.testing.assert_close(sent[key], factor.detach(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(sent[key], state[key])
    torch.testing.assert_close(sent["5.weight"], brute.model[5].weight.detach())


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("span", [Span(0, 6), Span(2, 4), Span(5, 6)])
def test_gradients_through_int8_are_near(chain: AdaptedChain, span: Span, backend: str) -> None:
    gradients = []
    for variant in ("f", "qff"):
        net = freeze(chain, span, variant=variant, backend=backend, state=grown(chain))
        F.cross_entropy(net(X), Y).backward()
        learnt = {k: p for block in net.trained for k, p in block.named_parameters()}
        gradients.append({k: p.grad for k, p in learnt.items() if p.requires_grad})
    exact, found = gradients
    assert exact.keys() == found.keys()
    for key, gradient in exact.items():
        assert F.cosine_similarity(found[key].ravel(), gradient.ravel(), dim=0) > 0.97, key
        assert found[key].norm() == pytest.approx(float(gradient.norm()), rel=0.1), key


def test_the_merged_model_is_the_one_with_adapters(chain: AdaptedChain) -> None:
    state = grown(chain)
    with_adapters = freeze(chain, Span(0, 6), variant="f", state=state)(X).detach()
    model = network()
    assert not torch.allclose(model(X), with_adapters, atol=0.01)
    merged = chain.merged(state)
    assert merged.keys() == model.state_dict().keys()
    model.load_state_dict(merged)
    torch.testing.assert_close(model(X), with_adapters)
    assert all(torch.equal(t, merged[key]) for key, t in chain.merged(merged).items())
    # Frozen blocks have their adapters in them.
    for span in (Span(0, 1), Span(3, 4)):
        torch.testing.assert_close(freeze(chain, span, variant="f", state=state)(X), with_adapters)


def test_what_is_int8_and_what_carries_an_adapter_can_be_seen(chain: AdaptedChain) -> None:
    rows = freeze(chain, Span(2, 4), backend="reference").describe()
    shown = [(row.role, row.operation, row.kernel) for row in rows if row.block in (2, 3, 4)]
    assert shown == [
        ("trained", "flatten", "float32"),
        ("trained", "conv1d 3 8→6", "reference"),
        ("trained", "adapter of rank 2", "float32"),
        ("trained", "flatten", "float32"),
        ("trained", "linear 48→12", "reference"),
        ("trained", "adapter of rank 2", "float32"),
        ("trained", "GELU", "float32"),
        ("passing", "linear 12→10 + relu", "reference"),
    ]


def test_scales_are_those_of_the_plain_network(chain: AdaptedChain) -> None:
    state, found = grown(chain), []
    for variant in ("f", "qff"):
        net = freeze(chain, Span(2, 5), variant=variant, backend="reference", state=state)
        net.measure_scales()
        F.cross_entropy(net(X), Y).backward()
        found.append({k: t for k, t in net.update().tensors.items() if k.startswith("scales.")})
    plain = Network.of(chain.plain).block_scale_keys
    assert set(found[1]) <= {key for index in (2, 3, 4) for key in plain[index]}
    assert set(found[0]) <= set(found[1])
    for key, scale in found[0].items():
        assert found[1][key] == pytest.approx(float(scale), rel=0.1), key
    again = freeze(chain, Span(2, 5), backend="reference", state=state | found[1])
    exact = freeze(chain, Span(2, 5), variant="f", state=state)(X)
    assert (again(X) - exact).norm() < 0.05 * exact.norm()


def test_norms_stay_as_they_are() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(288, 4)),
    )
    chain = adapt(split(model, X, cuts=["0"]), 2)
    state = chain_state(chain)
    for variant in ("f", "ff", "qff"):
        net = freeze(chain, Span(0, 2), variant=variant, backend="reference", state=state).train()
        step(net)
        assert set(net.update().tensors) - {"1.1.weight", "1.1.bias"} == set(chain.learned[0])
        buffers = {k: b for block in net.trained for k, b in block.named_buffers()}
        assert all(torch.equal(b, state[k]) for k, b in buffers.items() if k in state)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.middle(self.table(x)))
        return found


def test_a_weight_that_is_shared_does_not_learn() -> None:
    ids = torch.arange(6).view(2, 3)
    chain = adapt(split(Tied(), ids, cuts=["table", "middle.1"]), 2)
    assert chain.learned == (
        (),
        ("lora.middle.0.down", "lora.middle.0.up"),
        ("middle.2.weight", "middle.2.bias"),
    )
    with pytest.raises(InvalidSpan, match="0:1 has nothing to learn"):
        freeze(chain, Span(0, 1))


def test_a_layer_that_is_called_twice_has_one_adapter() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(F.gelu(self.layer(x)))
            return found

    torch.manual_seed(0)
    chain = adapt(BlockChain([Twice(), nn.Linear(8, 4)], example=torch.randn(2, 8)), 2)
    assert chain.learned[0] == ("lora.0.layer.down", "lora.0.layer.up")
    state, x = grown(chain), torch.randn(4, 8)
    net = freeze(chain, Span(0, 2), variant="f", state=state)
    merged = freeze(chain.plain, Span(0, 2), variant="f", state=chain.merged(state))
    torch.testing.assert_close(net(x), merged(x))
    rounded = freeze(chain, Span(0, 2), backend="reference", state=state)
    assert (rounded(x) - net(x)).norm() < 0.05 * net(x).norm()


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (network, {"rank": 0}, "the rank is 0; an adapter needs at least 1"),
        (network, {"alpha": 0.0}, "alpha is 0; expected a number above 0"),
        (network, {"rank": 9}, r"'0\.0' \(conv 3×3 3→8\) has a rank of at most 8"),
        (lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.Linear(8, 4)), {}, "has no linear map"),
    ],
)
def test_bad_input(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        adapt(split(make(), X), **options)
