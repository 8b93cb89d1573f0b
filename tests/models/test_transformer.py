from __future__ import annotations

import math

import pytest
import torch

from cocofl import CocoflError
from cocofl.models import MODELS
from cocofl.models.transformer import Attention, EncoderLayer, Shape, sinusoids

TRANSFORMERS = ["transformer", "transformer-seq2seq"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_position_matters(name: str) -> None:
    model = MODELS[name](10, tiny=True).eval()
    tokens = model.example_input(1)
    swapped = tokens.clone()
    swapped[0, [0, 1]] = torch.tensor([3, 4])
    other = tokens.clone()
    other[0, [0, 1]] = torch.tensor([4, 3])
    assert not model(swapped).allclose(model(other))


def test_nobody_sees_padding() -> None:
    model = MODELS["transformer"](10, tiny=True).eval()
    tokens = model.example_input(1)
    tokens[0, 10:] = 0
    expected = model(tokens)
    with torch.no_grad():
        model.embedding.tokens.weight[0] += 1
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_empty_text_spoils_nothing(name: str) -> None:
    model = MODELS[name](10, tiny=True)
    tokens = model.example_input(2)
    tokens[1] = 0
    scores = model(tokens)
    scores.sum().backward()
    assert scores.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_layer_computes_what_pytorchs_own_encoder_layer_computes() -> None:
    torch.manual_seed(0)
    ours = EncoderLayer(Shape(length=5, head_channels=4, hidden=6), width=1.0).eval()
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 6, batch_first=True).eval()
    attention = ours.attention
    names = ["query", "key", "value"]
    state = {
        "self_attn.in_proj_weight": torch.cat([getattr(attention, n).weight for n in names]),
        "self_attn.in_proj_bias": torch.cat([getattr(attention, n).bias for n in names]),
        "self_attn.out_proj.weight": attention.output.weight,
        "self_attn.out_proj.bias": attention.output.bias,
    }
    rest = {k: v for k, v in ours.state_dict().items() if not k.startswith("attention")}
    theirs.load_state_dict(state | rest)
    x = torch.randn(3, 5, 8)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 0, 0, 0, 0]]).bool()
    mask = ~padding[:, None, None, :]
    expected = theirs(x, src_key_padding_mask=padding)
    torch.testing.assert_close(ours(x, mask)[~padding], expected[~padding])


def test_the_leading_channels_of_each_head_are_a_narrower_attention() -> None:
    """With all other channels zero, the full network computes what the narrow one does."""
    torch.manual_seed(0)
    narrow, full = Attention(4, heads=2), Attention(8, heads=2)
    rows = torch.tensor([0, 1, 4, 5])  # the leading 2 of 4 channels of each head
    stream = torch.arange(4)
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.zero_()
        for name in ["query", "key", "value"]:
            getattr(full, name).weight[rows[:, None], stream] = getattr(narrow, name).weight
            getattr(full, name).bias[rows] = getattr(narrow, name).bias
        # The softmax divides by the root of the head's channels: 4 here, 2 there.
        full.query.weight *= 2**0.5
        full.query.bias *= 2**0.5
        full.output.weight[stream[:, None], rows] = narrow.output.weight
        full.output.bias[stream] = narrow.output.bias
    x = torch.randn(3, 5, 4)
    mask = torch.ones(3, 1, 1, 5, dtype=torch.bool)
    wide_x = torch.cat([x, torch.zeros_like(x)], dim=-1)
    torch.testing.assert_close(full(wide_x, mask)[..., :4], narrow(x, mask))


def test_sinusoids() -> None:
    code = sinusoids(4, 6)
    assert code.shape == (4, 6)
    assert code[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert code[3, :2].tolist() == pytest.approx([math.sin(3), math.cos(3)], abs=1e-6)


def test_the_next_character_network_needs_a_character() -> None:
    with pytest.raises(CocoflError, match="at least 2"):
        MODELS["transformer-seq2seq"](1)
