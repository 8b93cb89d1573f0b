"""The mean of the model over rounds, for evaluation: what devices are sent is not changed.

Parameters and norm statistics are averaged, on one copy that lies where the state lies. Over the
first ``rounds`` rounds it is their plain mean, then an exponential one that forgets: a round weighs
``1 / rounds``, and what was before ``1 − 1 / rounds``. So a mean "over 50 rounds" has half of its
weight in the last 35.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cocofl.fl.state import ServerState, Tensors

AVERAGE = "evaluation average"
"""The memory of the server that holds the mean."""


def with_average(state: ServerState, rounds: int, round_index: int) -> ServerState:
    """The state after a round, with what it comes to on average; 0 rounds for none.

    >>> state = ServerState({"w": torch.tensor([4.0])})
    >>> state = with_average(state, 2, 0)
    >>> state = with_average(replace(state, parts={"w": torch.tensor([0.0])}), 2, 1)
    >>> with_average(state, 2, 2).memory[AVERAGE]
    {'w': tensor([1.])}
    """
    if not rounds:
        return state
    before, weight = state.memory.get(AVERAGE, {}), 1 / min(rounds, round_index + 1)
    mean = Tensors()
    for name, part in state.parts.items():
        is_scale = state.layout.pieces(name)[0].kind == "scales"
        if is_scale or not part.is_floating_point():
            continue
        # Statistics of a width that nobody trained before begin with what they are.
        mean[name] = torch.lerp(before[name], part, weight) if name in before else part.clone()
    return replace(state, memory={**state.memory, AVERAGE: mean})


def averaged(state: ServerState) -> ServerState:
    """The mean as a state; scales and whole numbers are those of the last round."""
    return replace(state, parts={**state.parts, **state.memory.get(AVERAGE, {})})


def with_mean(state: ServerState, mean: ServerState) -> ServerState:
    """The state with another mean, whose statistics were measured, say."""
    kept = {name: mean.parts[name] for name in state.memory[AVERAGE]}
    return replace(state, memory={**state.memory, AVERAGE: kept})
