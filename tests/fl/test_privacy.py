from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cocofl.errors import InvalidExperiment
from cocofl.fl.merge import Accumulator, Mean, Merge, ServerOptimizer
from cocofl.fl.privacy import (
    Bounds,
    Normal,
    Privacy,
    PrivateMean,
    SystemNormal,
    clipped,
    privately,
    seeded_noise,
    shareable,
)
from cocofl.fl.state import Contribution, KeyLayout, ServerState, Tensors

LEARNED, TRACKED = ("a", "b"), ("n.running_mean", "n.running_var")
SHAPES = dict.fromkeys((*LEARNED, *TRACKED), (2,))
PRIVACY = Privacy(clip=1.0, statistics_clip=0.5, noise=1.0)
BOUNDS = Bounds(PRIVACY, SHAPES, frozenset(LEARNED))


class Silence:
    """No noise, to see what is beneath it."""

    def standard_normal(self, size: tuple[int, ...], /) -> np.ndarray:
        return np.zeros(size)


def silent(_round: int) -> Normal:
    return Silence()


def start(**tensors: Tensor) -> ServerState:
    own = {key: torch.ones(2) for key in SHAPES} | tensors
    return ServerState(own, KeyLayout(learned=frozenset(LEARNED)))


VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2).map(torch.tensor)


@st.composite
def contributions(draw: st.DrawFn) -> Contribution:
    keys = draw(st.sets(st.sampled_from([*SHAPES, "scales.0.relu.output", "unknown"])))
    return Contribution({key: draw(VALUES) for key in keys}, draw(st.integers(1, 10**6)))


@given(st.lists(contributions(), max_size=4), contributions())
def test_one_device_moves_the_sum_by_at_most_its_clip(
    others: list[Contribution], one: Contribution
) -> None:
    merge = PrivateMean(BOUNDS, devices=1, noise=silent)
    # A wide start, so that no variance is bounded.
    state = start(**{"n.running_var": torch.full((2,), 3e6)})
    wide = ServerState({k: t.double() for k, t in state.parts.items()}, state.layout)
    without = merge(wide, others).tensors
    with_it = merge(wide, [*others, one]).tensors
    for keys, clip in ((LEARNED, 1.0), (TRACKED, 0.5)):
        moved = math.hypot(*(float((with_it[k] - without[k]).norm()) for k in keys))
        assert moved <= clip * (1 + 1e-6) + 1e-6
    assert with_it.keys() == wide.tensors.keys()  # neither scales nor anything unknown


def test_a_short_change_counts_as_it_is_and_samples_do_not_weigh() -> None:
    merge = PrivateMean(BOUNDS, devices=4, noise=silent)
    sent = [
        Contribution({"a": torch.tensor([1.4, 1.0])}, 1),
        Contribution({"a": torch.tensor([1.0, 1.4]), "b": torch.tensor([1.0, 1.0])}, 1000),
    ]
    merged = merge(start(), sent).tensors
    torch.testing.assert_close(merged["a"], torch.tensor([1.1, 1.1]))
    assert torch.equal(merged["b"], torch.ones(2))


def test_noise_is_as_wide_as_it_should_be_and_also_where_nobody_came() -> None:
    bounds = Bounds(PRIVACY, {"a": (200, 100), "n.running_mean": (200, 100)}, frozenset("a"))
    state = ServerState(
        {key: torch.zeros(200, 100) for key in bounds.shapes}, KeyLayout(learned=frozenset("a"))
    )
    merged = PrivateMean(bounds, devices=10, noise=seeded_noise(3))(state, []).tensors
    # noise · √2 (two kinds) · clip / devices; 20 000 draws are 0.5 % off at most by 1σ
    assert float(merged["a"].std()) == pytest.approx(math.sqrt(2) * 1.0 / 10, rel=0.03)
    assert float(merged["n.running_mean"].std()) == pytest.approx(math.sqrt(2) * 0.5 / 10, rel=0.03)
    assert abs(float(merged["a"].mean())) < 5 * 0.1414 / math.sqrt(20_000)


def test_without_statistics_there_is_less_noise() -> None:
    only = Bounds(PRIVACY, {"a": (2,)}, frozenset("a"))
    assert only.spread("a") == 1.0
    assert BOUNDS.spread("a") == pytest.approx(math.sqrt(2))


def test_each_round_has_noise_of_its_own_and_the_same_again() -> None:
    merge = PrivateMean(BOUNDS, devices=1, noise=seeded_noise(0))
    first, second, again = (merge(start(), [], index).tensors["a"] for index in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_numbers_of_the_system_are_normal_and_never_the_same() -> None:
    found = SystemNormal().standard_normal((100, 200))
    assert found.shape == (100, 200)
    assert abs(found.mean()) < 0.04
    assert found.std() == pytest.approx(1, abs=0.03)
    assert (np.abs(found) > 1.96).mean() == pytest.approx(0.05, abs=0.01)
    assert not np.array_equal(found, SystemNormal().standard_normal((100, 200)))


def test_noise_never_makes_a_variance_negative() -> None:
    loud = Bounds(Privacy(clip=1.0, noise=100.0), SHAPES, frozenset(LEARNED))
    merged = PrivateMean(loud, devices=1, noise=seeded_noise(0))(start(), []).tensors
    assert merged["n.running_var"].tolist() in ([0.5, 0.5], [0.5, 2.0], [2.0, 0.5], [2.0, 2.0])
    assert float(merged["n.running_mean"].abs().max()) > 2


def test_a_tied_weight_is_one_tensor() -> None:
    ends = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    ends[1].weight = ends[0].weight
    bounds = Bounds.of(ends, PRIVACY)
    assert list(bounds.shapes) == ["0.weight"]
    state = ServerState({"0.weight": torch.zeros(2, 2), "1.weight": torch.zeros(2, 2)})
    sent = [Contribution({"0.weight": torch.ones(2, 2), "1.weight": torch.full((2, 2), 9e9)}, 1)]
    merged = PrivateMean(bounds, devices=1, noise=silent)(state, sent).tensors
    torch.testing.assert_close(merged["0.weight"], torch.full((2, 2), 0.5))
    assert torch.equal(merged["1.weight"], merged["0.weight"])
    noisy = PrivateMean(bounds, devices=1, noise=seeded_noise(0))(state, []).tensors
    assert torch.equal(noisy["1.weight"], noisy["0.weight"])


def test_bounds_know_what_training_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    model.register_buffer("positions", torch.zeros(5))
    bounds = Bounds.of(model, PRIVACY)
    assert set(bounds.shapes) - bounds.learned == {"1.running_mean", "1.running_var"}
    assert bounds.learned == {f"{i}.{name}" for i in range(3) for name in ("weight", "bias")}


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    remembers: ClassVar[tuple[str, ...]] = ("speed",)
    beta: float = 0.5

    def move(self, old: Tensor, agreed: Tensor, memory: Tensors, round_index: int) -> Tensor:
        memory["speed"] = self.beta * memory["speed"] + (agreed - old)
        return old + memory["speed"]


class Peeking(Merge):
    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        raise AssertionError


def test_a_server_may_do_what_it_likes_with_the_private_mean() -> None:
    mean = PrivateMean(BOUNDS, devices=1, noise=silent)
    plain, private = Momentum(), privately(Momentum(), mean)
    sent = [Contribution({"a": torch.tensor([1.0, 9.0])}, 1)]
    merged = private(start(), sent)
    torch.testing.assert_close(merged.tensors["a"], torch.tensor([1.0, 2.0]))
    assert isinstance(plain.merge, Mean)  # the strategy's own is left alone
    assert privately(Mean("senders"), mean) is mean


def test_a_merge_that_nobody_can_bound_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match=r"merges by Peeking.*expected Mean"):
        privately(Peeking(), PrivateMean(BOUNDS, devices=1, noise=silent))


def test_a_device_keeps_to_itself_what_nothing_hides() -> None:
    sent = Contribution({"a": torch.ones(2), "scales.0.relu.output": torch.ones(())}, 77, 0.25)
    told = shareable(sent)
    assert list(told.tensors) == ["a"]
    assert (told.samples, told.loss) == (1, 0.0)


@pytest.mark.parametrize(
    ("key", "value"), [("clip", -1.0), ("noise", 0.0), ("delta", 1.0), ("sampling", "none")]
)
def test_settings_are_checked(key: str, value: object) -> None:
    with pytest.raises(InvalidExperiment, match=f"privacy.{key}"):
        Privacy(**{key: value})  # type: ignore[arg-type]


def test_a_sum_of_clipped_changes_is_as_good_as_each_of_them() -> None:
    sent = [
        Contribution({"a": torch.tensor([5.0, 1.0])}, 1),
        Contribution({"a": torch.tensor([1.0, 1.5]), "b": torch.tensor([1.0, 2.0])}, 1),
    ]
    by_server = PrivateMean(BOUNDS, devices=4, noise=silent)(start(), sent).tensors
    clipped_ = [clipped(one, start(), BOUNDS) for one in sent]
    mean = {
        key: torch.stack([one.tensors.get(key, torch.ones(2)) for one in clipped_]).mean(0)
        for key in LEARNED
    }
    by_devices = PrivateMean(BOUNDS, devices=4, noise=silent, clips=False)
    merged = by_devices(start(), [Contribution(mean, samples=2)]).tensors
    for key in SHAPES:
        torch.testing.assert_close(merged[key], by_server[key])
