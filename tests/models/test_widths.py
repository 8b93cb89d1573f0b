from __future__ import annotations

import pytest
import torch
from torch import nn

from cocofl.errors import InvalidModel
from cocofl.models import MODELS
from cocofl.models.widths import places


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [0.25, 0.5, 1.0])
def test_a_narrower_network_is_a_slice_of_the_full_one(name: str, width: float) -> None:
    full, narrow = (MODELS[name](7, width=w, tiny=True) for w in (1.0, width))
    state, own = full.state_dict(), narrow.state_dict()
    for key, place in places(full, narrow).items():
        assert state[key][place].shape == own[key].shape, key


@pytest.mark.parametrize("name", ["densenet40", "mobilenet", "resnet18", "transformer"])
def test_full_channels_that_are_zero_outside_the_slice_compute_the_same(name: str) -> None:
    """What a slice means: the full network with everything else at zero is the narrow one."""
    torch.manual_seed(0)
    full, narrow = (MODELS[name](7, width=w, tiny=True).eval() for w in (1.0, 0.5))
    state = {key: torch.zeros_like(t) for key, t in full.state_dict().items()}
    for key, place in places(full, narrow).items():
        state[key][place] = narrow.state_dict()[key]
    full.load_state_dict(state)
    x = full.example_input(3)
    if name == "transformer":
        # Its LayerNorms and softmax see the zeros, so only what attention takes in is compared.
        inside = narrow.layers[0].attention.query(narrow.embedding(x))
        wide = full.layers[0].attention.query(full.embedding(x) * _kept(full, narrow))
        pieces = places(full, narrow)["layers.0.attention.query.bias"][0]
        torch.testing.assert_close(wide[..., pieces], inside)
        return
    torch.testing.assert_close(full(x), narrow(x))


def _kept(full: nn.Module, narrow: nn.Module) -> torch.Tensor:
    """Ones at the embedding channels that the narrower network has."""
    channels = torch.zeros(full.embedding.tokens.embedding_dim)
    channels[: narrow.embedding.tokens.embedding_dim] = 1
    return channels


def test_heads_are_sliced_one_by_one() -> None:
    full, narrow = (MODELS["transformer"](2, width=w, tiny=True) for w in (1.0, 0.5))
    (rows,) = places(full, narrow)["layers.0.attention.key.bias"]
    assert rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]  # 2 heads of 8


def test_dense_layers_are_sliced_piece_by_piece() -> None:
    full, narrow = (MODELS["densenet40"](2, width=w, tiny=True) for w in (1.0, 0.5))
    (rows,) = places(full, narrow)["dense.1.norm1.weight"]
    assert rows.tolist() == [0, 1, 2, 3, 8, 9]  # stem 8, growth 4


def test_a_width_that_changes_layers_is_refused() -> None:
    with pytest.raises(InvalidModel, match="must change sizes, not layers"):
        places(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InvalidModel, match="must shrink axes"):
        places(nn.Linear(2, 2), nn.Linear(2, 3))
