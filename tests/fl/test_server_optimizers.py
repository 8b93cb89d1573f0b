"""Steps of the server's own, against the formulas written out element by element."""

from __future__ import annotations

import math

import pytest
import torch

from cocofl import Experiment
from cocofl.errors import InvalidExperiment
from cocofl.experiment.setup import Setup
from cocofl.fl.merge import Mean
from cocofl.fl.privacy import Bounds, Privacy, PrivateMean, privately, seeded_noise
from cocofl.fl.server_optimizers import SERVER_OPTIMIZERS, ServerStep
from cocofl.fl.state import Contribution, ServerState
from cocofl.fl.strategies import STRATEGIES
from cocofl.fl.strategies.apf import FreezeStable

ROUNDS: list[list[tuple[int, float]]] = [
    [(30, 0.4), (10, -0.2)],
    [],
    [(10, 0.01)],
    [(20, -0.3), (20, 0.1)],
]
"""By round what devices with so many samples add to `a`; nobody trains it in the second."""


def by_hand(step: ServerStep, lr: float) -> list[float]:
    """The values of one element that devices move by :data:`ROUNDS`."""
    value, momentum, variance, found = 1.0, 0.0, step.tau**2, []
    for sent in ROUNDS:
        if sent:
            change = sum(n * c for n, c in sent) / sum(n for n, _ in sent)
            if step.optimizer == "fedavgm":
                momentum = step.momentum * momentum + change
                value += lr * momentum
            else:
                momentum = step.momentum * momentum + (1 - step.momentum) * change
                if step.optimizer == "fedadam":
                    variance = step.beta2 * variance + (1 - step.beta2) * change**2
                else:
                    sign = math.copysign(1.0, variance - change**2)
                    variance -= (1 - step.beta2) * change**2 * sign
                value += lr * momentum / (math.sqrt(variance) + step.tau)
        found.append(value)
    return found


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS[1:])
@pytest.mark.parametrize("lr", [0.0, 0.5])
def test_the_formulas(name: str, lr: float) -> None:
    step = ServerStep(name, lr=lr, momentum=0.8, beta2=0.9, tau=0.05)
    merge = step.on_top_of(Mean())
    state = ServerState({"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(1)})
    usual = 1.0 if name == "fedavgm" else 0.01
    for number, (sent, wanted) in enumerate(zip(ROUNDS, by_hand(step, lr or usual), strict=True)):
        start = state.parts["a"]
        # In the round in which nobody trains `a`, somebody trains `b`.
        some = [Contribution({"a": start + change}, n) for n, change in sent]
        state = merge(state, some or [Contribution({"b": torch.zeros(1)}, 5)], number)
        assert torch.allclose(state.parts["a"], torch.full((2,), wanted, dtype=torch.float64))


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS[1:])
def test_what_nobody_trained_stays_and_so_does_what_is_remembered_of_it(name: str) -> None:
    merge = ServerStep(name).on_top_of(Mean("senders"))
    state = ServerState({"w": torch.zeros(3), "scales.w": torch.ones(())})
    part = Contribution({"w": torch.tensor([1.0, 2.0, 3.0])}, 1)
    state = merge(state, [part])
    kept = {name: own["w"].clone() for name, own in state.memory.items()}
    before = state.parts["w"].clone()
    rows = {"w": torch.tensor([1]).numpy()}
    state = merge(state, [Contribution({"w": before + 1}, 1, rows=rows)], 1)
    assert (state.parts["w"] != before).tolist() == [False, True, False]
    for memory, own in state.memory.items():
        assert (own["w"] != kept[memory]).tolist() == [False, True, False]


def test_scales_and_statistics_are_merged_as_ever() -> None:
    merge = ServerStep("fedadam", lr=5.0).on_top_of(Mean())
    state = ServerState({"w": torch.zeros(1), "scales.w": torch.ones(())})
    sent = Contribution({"w": torch.ones(1), "scales.w": torch.tensor(3.0)}, 1)
    assert merge(state, [sent]).parts["scales.w"] == 3.0


def test_with_noise_everything_moves_whoever_came() -> None:
    # Who trained what is a secret: a step that asked for it would give it away.
    bounds = Bounds(Privacy(clip=1.0), {"a": (2,), "b": (2,)}, frozenset("ab"))
    private = PrivateMean(bounds, 4, seeded_noise(0))
    merge = privately(ServerStep("fedavgm").on_top_of(Mean()), private)
    state = ServerState({"a": torch.zeros(2), "b": torch.zeros(2)})
    moved = merge(state, [Contribution({"a": torch.ones(2)}, 1)])
    assert all(bool((part != 0).all()) for part in moved.parts.values())
    assert all(bool((part != 0).all()) for part in moved.memory["server momentum"].values())


def test_a_strategy_that_has_a_server_optimizer_takes_no_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    momentum = ServerStep("fedavgm").on_top_of(Mean())
    with pytest.raises(InvalidExperiment, match=r"server\.optimizer is 'fedadam', but the strat"):
        ServerStep("fedadam").on_top_of(momentum)
    monkeypatch.setitem(STRATEGIES, "plain", STRATEGIES["fedavg-full"])
    job = Setup(Experiment().changed({"server.optimizer": "fedyogi"})).job()
    assert type(job.strategy.merge).__name__ == "FedYogi"


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS[1:])
def test_what_a_strategy_holds_back_stays_whatever_step_comes_before(name: str) -> None:
    step = ServerStep(name)
    held, free = step.on_top_of(FreezeStable(0.9, 0.5, 1)), step.on_top_of(Mean())
    one = other = ServerState({"w": torch.zeros(4, dtype=torch.float64)})
    frozen = torch.zeros(4)
    for number in range(6):
        before, frozen = one.parts["w"], one.memory.get("frozen", {}).get("w", frozen) > 0
        # The first two elements get somewhere, the others move to and fro.
        ways = torch.tensor([1.0, 2.0, (-1.0) ** number, 3 * (-1.0) ** number])
        sent = torch.where(frozen, before, before + ways)
        one = held(one, [Contribution({"w": sent}, 1)], number)
        other = free(other, [Contribution({"w": other.parts["w"] + ways}, 1)], number)
        assert torch.equal(one.parts["w"][frozen], before[frozen])
    assert torch.equal(one.parts["w"][:2], other.parts["w"][:2])
    assert not bool((one.parts["w"][2:] == other.parts["w"][2:]).any())


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer", "adam"), ("lr", -1.0), ("momentum", 1.0), ("beta2", 1.0), ("tau", 0.0)],
)
def test_bad_settings_are_named(key: str, value: object) -> None:
    with pytest.raises(InvalidExperiment, match=rf"server\.{key} is"):
        Experiment().changed({f"server.{key}": value})
