"""Live tensor bytes over time, from the allocator's own events: the same numbers every time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cocofl.profiling.subject import Inputs, training_step

_PREFIX = "cocofl:"


class Timeline(NamedTuple):
    """Bytes alive after each allocation or release, and where the marks lie between these."""

    alive: list[int]
    marks: list[tuple[str, int]]

    def find(self, name: str, begin: int = 0) -> int:
        """The place of the first mark ``name`` at or after the place ``begin``."""
        return next(place for mark, place in self.marks if mark == name and place >= begin)


def mark(name: str) -> None:
    """Leave a mark in the timeline that is being recorded."""
    with torch.profiler.record_function(_PREFIX + name):
        pass


def recorded(run: Callable[[], object]) -> Timeline:
    """The timeline of what ``run`` does, beginning with 0 bytes.

    Only what is allocated in it is seen to be released. Keep it short: every operation costs the
    profiler some kilobytes of its own.
    """
    # Else the profiler reports its start and stop on stderr, every time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    alive, marks = [0], []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive.append(alive[-1] + event.nbytes())
        elif event.name().startswith(_PREFIX):
            marks.append((event.name().removeprefix(_PREFIX), len(alive) - 1))
    return Timeline(alive, marks)


def recorded_step(
    build: Callable[[], nn.Module], inputs: Inputs, target: Tensor | None = None
) -> Timeline:
    """Build a network, let it train a step, and record another one, from the mark "second" on.

    So what this step finds is there: gradients of the step before, the mini-batch, the network.
    """

    def run() -> None:
        own = tuple(x.clone() for x in inputs)
        step = training_step(build(), own, None if target is None else target.clone(), mark)
        step()
        gc.collect()
        mark("second")
        step()

    return recorded(run)


def peak_tensor_bytes(
    build: Callable[[], nn.Module], inputs: Inputs, target: Tensor | None = None
) -> int:
    """The most bytes of tensors alive at once during a step, everything counted.

    That is the network, its mini-batch and target, gradients, activations and all in between.
    """
    timeline = recorded_step(build, inputs, target)
    return max(timeline.alive[timeline.find("second") :])


def held_bytes(build: Callable[[], nn.Module]) -> int:
    """The bytes of tensors that a network holds."""

    def run() -> None:
        net = build()
        gc.collect()
        mark("built")
        del net

    timeline = recorded(run)
    return timeline.alive[timeline.find("built")]
