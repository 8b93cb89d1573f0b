"""Merging by rules: who counts, and how much what they agree on counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cocofl.errors import InvalidExperiment
from cocofl.fl.merge import Accumulator, Mean, Merge, ServerOptimizer
from cocofl.fl.rules import Merging, Rules
from cocofl.fl.state import Contribution, KeyLayout, ServerState, Tensors

SCALE = "scales.0.relu.output"
LAYOUT = KeyLayout(
    learned=frozenset({"a", "b"}),
    block_of={"a": 0, "n.running_mean": 0, "n.running_var": 0, "b": 1},
)
STATE = ServerState(
    {
        "a": torch.ones(2),
        "b": torch.ones(2),
        "n.running_mean": torch.zeros(2),
        "n.running_var": torch.ones(2),
        SCALE: torch.tensor(1.0),
    },
    LAYOUT,
)


def rules(*names: str, **more: float) -> Rules:
    made = Merging(rules=names, **more).made()
    assert made is not None
    return made


def sent(samples: int = 10, **values: float) -> Contribution:
    tensors = {
        key.replace("__", "."): torch.full((2,), value)
        for key, value in values.items()
        if key != "scale"
    }
    if "scale" in values:
        tensors[SCALE] = torch.tensor(values["scale"])
    return Contribution(tensors, samples)


def test_those_who_froze_a_block_vote_for_what_there_is_but_not_in_the_rule() -> None:
    devices = [sent(a=2.0), sent(a=3.0), sent(a=9e9), sent(b=2.0)]
    merged = Mean("everyone", rules("median"))(STATE, devices).tensors
    assert merged["a"].tolist() == [2.5, 2.5]  # 1 + 3/4 · (3 - 1)
    assert merged["b"].tolist() == [1.25, 1.25]
    merged = Mean("senders", rules("median"))(STATE, devices).tensors
    assert merged["a"].tolist() == [3.0, 3.0]
    assert merged["b"].tolist() == [2.0, 2.0]


def test_a_share_bounds_what_false_sample_counts_do() -> None:
    devices = [sent(10, a=2.0), sent(10, a=2.0), sent(10, a=2.0), sent(10**6, a=6.0)]
    assert Mean("everyone")(STATE, devices).tensors["a"][0].item() > 5.9
    merged = Mean("everyone", rules(share=0.25))(STATE, devices).tensors
    assert merged["a"].tolist() == [3.0, 3.0]


def test_without_a_rule_that_bites_it_is_the_plain_mean() -> None:
    devices = [sent(10, a=2.0, b=3.0), sent(30, b=1.5), sent(5, a=0.5)]
    for over in ("everyone", "senders"):
        plain = Mean(over)(STATE, devices).tensors
        ruled = Mean(over, rules("norm-clip", clip=1e9))(STATE, devices).tensors
        for key in ("a", "b"):
            torch.testing.assert_close(plain[key], ruled[key])


def test_rules_compose() -> None:
    # Clipped to the usual change of 1, the last one is 2 as the others are.
    devices = [sent(a=2.0), sent(a=2.0), sent(a=2.0), sent(10**6, a=1e6)]
    named = rules("norm-clip", "trimmed-mean", share=0.25)
    assert Mean("everyone", named)(STATE, devices).tensors["a"].tolist() == [2.0, 2.0]


def change(*elements: float) -> Contribution:
    return Contribution({"a": STATE.parts["a"] + torch.tensor(elements)}, 10)


HONEST = [change(1.0, 0.1 * i) for i in range(4)]


def test_few_who_go_the_other_way_are_left_out() -> None:
    merge = Mean("everyone", rules(agreement=0.5))
    alone = merge(STATE, HONEST).tensors["a"]
    assert alone.tolist() == pytest.approx([2.0, 1.15])
    with_liar = merge(STATE, [*HONEST, change(-1.0, -0.1)]).tensors["a"]
    torch.testing.assert_close(with_liar, alone)


def test_who_was_honest_before_is_not_left_out_for_one_round() -> None:
    merge, state = Mean("everyone", rules(agreement=0.5)), STATE
    sent = [*HONEST, change(-1.0, -0.1)]
    for _ in range(3):
        merged = merge(state, [replace(one, device=i) for i, one in enumerate(sent)])
        state = replace(STATE, memory=ServerState.from_flat(merged.flat()).memory)
    agreement = {key: round(float(one), 2) for key, one in state.memory["agreement"].items()}
    assert agreement == {"0": 1.0, "1": 1.0, "2": 1.0, "3": 1.0, "4": -1.0}
    swapped = merge(state, [replace(one, device=4 - i) for i, one in enumerate(sent)])
    assert float(swapped.memory["agreement"]["0"]) == pytest.approx(0.4), "0.7 · 1 + 0.3 · -1"
    assert float(swapped.memory["agreement"]["4"]) == pytest.approx(-0.4)


def test_who_has_other_data_than_most_stays() -> None:
    # Two of five are more than may be hostile (trim = 0.2): they know something else.
    others = [change(0.1, -1.0), change(-0.1, -1.0), change(0.0, -1.0)]
    merge = Mean("everyone", rules(agreement=0.5, trim=0.2))
    plain = Mean("everyone")(STATE, [*HONEST, *others]).tensors["a"]
    torch.testing.assert_close(merge(STATE, [*HONEST, *others]).tensors["a"], plain)


def test_a_device_that_shares_blocks_with_liars_only_is_not_taken_for_one() -> None:
    """Whom it disagrees with counts by how well those agree with the rest."""

    def both(*elements: float) -> Contribution:
        return Contribution({k: STATE.parts[k] + torch.tensor(elements) for k in ("a", "b")}, 10)

    only_b = Contribution({"b": STATE.parts["b"] + torch.tensor([1.0, 0.2])}, 10)
    liar = both(-1.0, -0.1)
    merge = Mean("senders", rules(agreement=0.5))
    merged = merge(STATE, [*HONEST, only_b, liar]).tensors
    assert merged["b"].tolist() == pytest.approx([2.0, 1.2]), "the liar alone is left out"


def test_scales_are_the_median_and_move_by_a_bounded_factor() -> None:
    merge = Mean("everyone", rules("median", bound=4.0))
    devices = [sent(scale=1.2), sent(scale=1.1), sent(scale=3e38)]
    assert merge(STATE, devices).tensors[SCALE].item() == pytest.approx(1.2)
    assert merge(STATE, [sent(scale=3e38)]).tensors[SCALE].item() == 4.0
    assert merge(STATE, [sent(scale=1e-30)]).tensors[SCALE].item() == 0.25
    assert merge(STATE, [sent(a=1.0)]).tensors[SCALE].item() == 1.0


def test_a_scale_that_nobody_knows_needs_two_who_agree() -> None:
    unknown = ServerState({"a": torch.ones(2)}, LAYOUT)
    merge = Mean("everyone", rules("median"))
    for hostile in (3e38, 1e-30):
        two = [sent(scale=1.0), sent(scale=hostile)]
        assert SCALE not in merge(unknown, two).tensors
        three = merge(unknown, [*two, sent(scale=1.5)]).tensors
        assert three[SCALE].item() == pytest.approx(1.5 if hostile > 1 else 1.0)
    assert SCALE not in merge(unknown, [sent(scale=1.0), sent(a=1.0)]).tensors
    assert merge(unknown, [sent(scale=1.0)]).tensors[SCALE].item() == 1.0, "nobody else is there"


def test_variances_are_protected() -> None:
    honest = [sent(n__running_var=0.9, n__running_mean=0.1)] * 3
    zeroed = sent(n__running_var=0.0, n__running_mean=0.1)
    merge = Mean("everyone", rules("trimmed-mean"))
    merged = merge(STATE, [*honest, zeroed]).tensors
    assert merged["n.running_var"].tolist() == pytest.approx([0.9, 0.9])
    alone = merge(STATE, [zeroed]).tensors
    assert alone["n.running_var"].tolist() == [0.25, 0.25], "bounded by a factor of 4"


def test_nobody_accepted_moves_nothing() -> None:
    merged = Mean("everyone", rules("median"))(STATE, []).tensors
    assert all(torch.equal(merged[key], tensor) for key, tensor in STATE.tensors.items())


class Twice(ServerOptimizer):
    """Goes twice as far."""

    remembers = ("rounds",)

    def move(
        self, old: torch.Tensor, agreed: torch.Tensor, memory: Tensors, round_index: int
    ) -> torch.Tensor:
        memory["rounds"] = memory["rounds"] + 1
        return old + 2 * (agreed - old)


def test_rules_lie_beneath_a_servers_own_step() -> None:
    devices = [sent(a=2.0), sent(a=2.0), sent(a=1e6)]
    merged = Twice().with_rules(rules("median"))(STATE, devices)
    assert merged.tensors["a"].tolist() == [3.0, 3.0]
    assert merged.memory["rounds"]["a"].tolist() == [1.0, 1.0]


class Own(Merge):
    def begin(self, state: ServerState, round_index: int) -> Accumulator:
        return Mean().begin(state, round_index)


def test_a_merge_that_knows_no_rules_says_so() -> None:
    with pytest.raises(InvalidExperiment, match="Own, by which the strategy merges, has no method"):
        Own().with_rules(rules("median"))
