"""Models that people fine-tune are split, frozen and trained as they are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cocofl import BlockChain, Span, freeze, split
from tests.hugging_face import ALL, make

QUICK = ("gpt2", "t5", "vit")
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in ALL
]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def floats(result: Any) -> list[Tensor]:
    """The float tensors that a model returns, but for its cache of keys and values."""
    return [
        x
        for key, x in result.items()
        if key != "past_key_values" and isinstance(x, Tensor) and x.is_floating_point()
    ]


def run(model: nn.Module, inputs: dict[str, Tensor], training: bool) -> list[Tensor]:
    """Outputs and gradients, from a fixed state of the random numbers."""
    model.train(training).zero_grad()
    torch.manual_seed(1)
    outputs = floats(model(**inputs))
    torch.stack([x.square().mean() for x in outputs]).sum().backward()
    state = model.state_dict(keep_vars=True)
    return [*outputs, *(p.grad for p in state.values() if getattr(p, "grad", None) is not None)]


def assert_same(model: nn.Module, chain: BlockChain, inputs: dict[str, Tensor]) -> None:
    """The chain computes and learns what the model does, also with another batch size."""
    more = {key: torch.cat([x, x[:3]]) for key, x in inputs.items()}
    for training in (True, False):
        for given in (inputs, more):
            expected, actual = (run(copy.deepcopy(m), given, training) for m in (model, chain))
            assert len(expected) == len(actual) > 1
            for one, other in zip(expected, actual, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_models_split_freeze_and_train(name: str) -> None:
    model, inputs = make(name)
    chain = split(model, inputs)
    n = len(chain)
    assert n == ALL[name][-1]
    assert set(chain.state_dict()) == set(model.state_dict())
    assert_same(model, chain, inputs)

    expected = model.eval()(**inputs)
    for backend in ("reference", "auto"):
        for start in sorted({0, n // 2, n - 1}):
            net = freeze(chain, Span(start, start + 1), backend=backend).train()
            before = {key: x.clone() for key, x in net.state_dict().items()}
            net.measure_scales()
            result = net(**inputs)
            assert list(result) == [key for key in expected if key != "past_key_values"]
            assert all(x.isfinite().all() for x in floats(result))
            torch.stack([(x * torch.randn_like(x)).sum() for x in floats(result)]).sum().backward()
            torch.optim.SGD(net.trained.parameters(), lr=0.1).step()
            moved = {key for key, x in net.state_dict().items() if not torch.equal(x, before[key])}
            assert moved
            assert all(key.startswith("trained.") for key in moved)
            assert set(chain.block_keys(start)) >= {
                key for key in net.update().tensors if not key.startswith("scales.")
            }


def test_int8_stays_close_and_gradients_reach_a_tied_weight() -> None:
    model, inputs = make("qwen2")
    chain = split(model.eval(), inputs)
    expected = model(**inputs)
    expected.logits.square().mean().backward()
    tied = model.lm_head.weight
    assert tied is model.model.embed_tokens.weight
    net = freeze(chain, Span(0, 1), backend="reference")
    result = net(**inputs)
    assert type(result) is type(expected)
    assert (result.logits - expected.logits).std() < 0.05 * expected.logits.std()
    result.logits.square().mean().backward()
    (own,) = net.trained.parameters()
    assert (own.grad - tied.grad).norm() < 0.1 * tied.grad.norm()
    frozen_head = freeze(chain, Span(1, 2), backend="reference")
    frozen_head(**inputs).logits.square().mean().backward()
    assert "model.embed_tokens.weight" not in frozen_head.update().tensors


def test_padding_is_masked_for_any_mask_and_not_only_the_example_s() -> None:
    model, inputs = make("gpt2")
    everything = inputs | {"attention_mask": torch.ones(4, 7, dtype=torch.long)}
    chain = split(model.eval(), everything)
    for given in (inputs, everything):
        torch.testing.assert_close(chain(**given).logits, model(**given).logits)
