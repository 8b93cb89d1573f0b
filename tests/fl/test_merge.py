from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocofl.fl.merge import Mean, ServerOptimizer
from cocofl.fl.state import Contribution, KeyLayout, ServerState, Tensors

merge = Mean("everyone")
merge_nested = Mean("senders")

KEYS = ["a", "b", "c"]
FINITE = st.floats(-100, 100, width=32)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[Contribution]]:
    state = {key: torch.tensor(draw(st.lists(FINITE, min_size=3, max_size=3))) for key in KEYS}
    contributions = []
    for _ in range(draw(st.integers(0, 6))):
        trained = draw(st.sets(st.sampled_from(KEYS)))
        tensors = {
            key: torch.tensor(draw(st.lists(FINITE, min_size=3, max_size=3))) for key in trained
        }
        contributions.append(Contribution(tensors, draw(st.integers(1, 500))))
    return state, contributions


@given(rounds())
def test_a_device_that_froze_a_tensor_votes_for_its_present_value(
    round_: tuple[dict[str, torch.Tensor], list[Contribution]],
) -> None:
    state, contributions = round_
    samples = sum(c.samples for c in contributions)
    merged = merge(ServerState(state), iter(contributions)).tensors
    for key, old in state.items():
        votes = [c.tensors.get(key, old).double() * c.samples for c in contributions]
        expected = sum(votes) / samples if votes else old
        torch.testing.assert_close(merged[key].double(), expected.double(), rtol=1e-5, atol=1e-4)


def test_with_equal_samples_it_is_algorithm_2() -> None:
    state = {"w": torch.tensor([1.0])}
    trained = [Contribution({"w": torch.tensor([v])}, 100) for v in (2.0, 4.0)]
    frozen = [Contribution({}, 100)] * 2
    # (1 - 2/4) · 1 + (2 + 4) / 4
    assert merge(ServerState(state), trained + frozen).tensors["w"].item() == 2.0


def test_a_tensor_that_everyone_froze_keeps_its_bits() -> None:
    state = {"w": torch.tensor([0.1]), "v": torch.tensor([0.3])}
    sent = [Contribution({"v": torch.tensor([0.4])}, 7)]
    merged = merge(ServerState(state), sent).tensors
    assert torch.equal(merged["w"], state["w"])
    assert merged["v"].item() == torch.tensor([0.4]).item()


def test_scales_average_over_those_who_measured_them() -> None:
    state = {"w": torch.zeros(1), "scales.0.relu.output": torch.tensor(9.0)}
    sent = [
        Contribution({"scales.1.relu.output": torch.tensor(1.0)}, 1),
        Contribution({"scales.1.relu.output": torch.tensor(3.0)}, 3),
        Contribution({"w": torch.ones(1)}, 4),
    ]
    merged = merge(ServerState(state), sent).tensors
    assert merged["scales.1.relu.output"].item() == 2.5
    assert merged["scales.0.relu.output"].item() == 9.0
    assert merged["w"].item() == 0.5


def test_the_old_state_is_left_alone() -> None:
    state = {"w": torch.zeros(2)}
    merge(ServerState(state), [Contribution({"w": torch.ones(2)}, 1)])
    assert torch.equal(state["w"], torch.zeros(2))


def test_nobody_accepted_moves_nothing() -> None:
    state = {"w": torch.ones(2)}
    assert torch.equal(merge(ServerState(state), []).tensors["w"], state["w"])


WIDTHS = [1, 2, 3, 4]  # of 4 rows and 4 columns


def places(width: float, _roll: int = 0) -> dict[str, tuple[slice, slice]]:
    rows = round(4 * width)
    return {key: (slice(0, rows), slice(0, rows)) for key in KEYS}


@st.composite
def nested_rounds(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[Contribution]]:
    def matrix(rows: int) -> torch.Tensor:
        values = draw(st.lists(FINITE, min_size=rows * rows, max_size=rows * rows))
        return torch.tensor(values).reshape(rows, rows)

    state = {key: matrix(4) for key in KEYS}
    contributions = []
    for _ in range(draw(st.integers(0, 5))):
        rows = draw(st.sampled_from(WIDTHS))
        known = draw(st.sets(st.integers(0, rows - 1), min_size=1))
        only = {"c": np.array(sorted(known))} if draw(st.booleans()) else {}
        contributions.append(
            Contribution(
                {key: matrix(rows) for key in KEYS},
                draw(st.integers(1, 500)),
                width=rows / 4,
                rows=only,
            )
        )
    return state, contributions


@given(nested_rounds())
def test_nested_merging_is_the_average_per_coordinate(
    round_: tuple[dict[str, torch.Tensor], list[Contribution]],
) -> None:
    state, contributions = round_
    merged = merge_nested(ServerState(state, KeyLayout(places)), iter(contributions)).tensors
    for key in KEYS:
        for i in range(4):
            for j in range(4):
                voters = [
                    c
                    for c in contributions
                    if max(i, j) < len(c.tensors[key]) and i in c.rows.get(key, range(4))
                ]
                samples = sum(c.samples for c in voters)
                votes = sum(float(c.tensors[key][i, j]) * c.samples for c in voters)
                expected = votes / samples if voters else float(state[key][i, j])
                assert float(merged[key][i, j]) == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_nested_merging_averages_what_comes_beside_over_those_who_sent_it() -> None:
    state = {key: torch.zeros(4, 4) for key in KEYS}
    sent = [
        Contribution({"widths.0.5.n.mean": torch.tensor([2.0])}, 1),
        Contribution({"widths.0.5.n.mean": torch.tensor([4.0])}, 3),
    ]
    merged = merge_nested(ServerState(state, KeyLayout(places)), sent)
    assert merged.tensors["widths.0.5.n.mean"].item() == 3.5


class Halfway(ServerOptimizer):
    """Goes half of the way, and counts the rounds."""

    remembers = ("rounds",)

    def move(
        self, old: torch.Tensor, agreed: torch.Tensor, memory: Tensors, round_index: int
    ) -> torch.Tensor:
        memory["rounds"] = memory["rounds"] + 1
        return (old + agreed) / 2


def test_a_server_optimizer_moves_parameters_only_and_remembers() -> None:
    state = ServerState(
        {"w": torch.zeros(2), "n": torch.zeros(1)}, KeyLayout(learned=frozenset("w"))
    )
    sent = [Contribution({"w": torch.ones(2), "n": torch.ones(1)}, 3)]
    for _ in range(2):
        state = Halfway()(state, sent)
    assert state.tensors["w"].tolist() == [0.75, 0.75]
    assert state.tensors["n"].tolist() == [1.0]
    assert state.memory["rounds"]["w"].tolist() == [2.0, 2.0]
    assert "n" not in state.memory["rounds"]


def test_a_state_is_the_same_after_it_was_written_down() -> None:
    sent = Contribution({"w": torch.ones(2)}, 3, device=12, memory={"c.v": {"a/w": torch.ones(1)}})
    state = Halfway()(ServerState({"w": torch.zeros(2)}), [sent])
    again = ServerState.from_flat(state.flat())
    assert again.flat().keys() == state.flat().keys()
    assert again.devices[12]["c.v"]["a/w"].tolist() == [1.0]
    assert torch.equal(again.memory["rounds"]["w"], state.memory["rounds"]["w"])
    assert again.tensors.keys() == {"w"}
