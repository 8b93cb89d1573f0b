from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cocofl.errors import InvalidModel
from cocofl.models import MODELS
from cocofl.models.widths import check_rolls, places


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


# --- windows that roll ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_network_computes_the_same_with_its_channels_rolled(name: str) -> None:
    """So whatever window a device trains, it holds channels with all that reads them."""
    full, narrow = (MODELS[name](7, width=w, tiny=True) for w in (1.0, 0.25))
    check_rolls(full, narrow, [full.example_input(3)])


@pytest.mark.parametrize("name", ["cnn", "densenet40", "mobilenet", "resnet18"])
@pytest.mark.parametrize("roll", [1, 5, 77])
def test_a_rolled_window_is_a_network_of_its_own(name: str, roll: int) -> None:
    """The full network with zeros outside the window computes what the narrow one does."""
    torch.manual_seed(0)
    full, narrow = (MODELS[name](7, width=w, tiny=True).eval() for w in (1.0, 0.5))
    state = {key: torch.zeros_like(t) for key, t in full.state_dict().items()}
    for key, place in places(full, narrow, roll).items():
        state[key][place] = narrow.state_dict()[key]
    full.load_state_dict(state)
    x = full.example_input(3)
    torch.testing.assert_close(full(x), narrow(x))


def test_a_window_goes_on_with_the_first_channel_where_channels_end() -> None:
    full, narrow = (MODELS["resnet18"](2, width=w, tiny=True) for w in (1.0, 0.5))
    windows = [places(full, narrow, roll)["stem.0.weight"] for roll in range(9)]  # 8 channels
    kept = [
        torch.arange(8)[window[0].flatten() if isinstance(window[0], Tensor) else window[0]]
        for window in windows
    ]
    assert [one.tolist() for one in kept[3:7]] == [
        [3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 0], [6, 7, 0, 1],
    ]  # fmt: skip
    assert kept[8].tolist() == kept[0].tolist()
    assert torch.bincount(torch.cat(kept[:8])).tolist() == [4] * 8  # all channels as often
    assert windows[5][1].flatten().tolist() == [0, 1, 2]  # the image's own channels stay


def test_heads_and_pieces_roll_each_by_itself() -> None:
    full, narrow = (MODELS["transformer"](2, width=w, tiny=True) for w in (1.0, 0.5))
    found = places(full, narrow, 6)
    assert found["layers.0.attention.key.bias"][0].tolist() == [6, 7, 0, 1, 14, 15, 8, 9]
    assert found["layers.0.norm1.weight"] == (slice(0, 8),)  # as the code of positions
    assert found["layers.0.linear1.bias"] == (slice(6, 14),)
    full, narrow = (MODELS["densenet40"](2, width=w, tiny=True) for w in (1.0, 0.5))
    (rows,) = places(full, narrow, 3)["dense.1.norm1.weight"]
    assert rows.tolist() == [3, 4, 5, 6, 11, 8]  # stem 8, growth 4


class Flattened(nn.Module):
    """Its classifier reads 4 features of each channel, and it does not say so."""

    def __init__(self, width: float) -> None:
        super().__init__()
        channels = round(6 * width)
        self.first = nn.Conv2d(1, channels, 3)
        self.last = nn.Linear(4 * channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).flatten(1))


class Declared(Flattened):
    def roll_steps(self) -> dict[str, tuple[int, ...]]:
        return {"last.weight": (1, 4)}


def test_a_network_that_cannot_roll_is_refused_until_it_says_how() -> None:
    inputs = [torch.randn(2, 1, 4, 4)]
    with pytest.raises(InvalidModel, match=r"a window of Flattened's channels cannot roll.*roll_s"):
        check_rolls(Flattened(1.0), Flattened(0.5), inputs)
    check_rolls(Declared(1.0), Declared(0.5), inputs)
