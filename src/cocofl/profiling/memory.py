"""Tensor memory: recorded of a configuration that runs, and replayed of one that never ran.

Live bytes come from the allocator's own events: the same numbers every time. A step is a sequence
of stretches: frozen blocks forward, trained blocks forward one by one, passing blocks forward and
the loss, gradients to zero, passing blocks backward, trained blocks backward one by one, the
optimizer. Of each stretch a recorded step tells how far above its beginning it rises and what it
leaves. Strung together they give the peak: a maximum over the stretches, not a sum.

Recorded are the N spans of one block and full training; that is exact for every contiguous span
up to what the allocator's rounding and the order of releases do at the seams.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocofl.freeze import FrozenNet
from cocofl.profiling.subject import Inputs, training_step
from cocofl.span import Blocks, Region, Role, Span

Build = Callable[[Blocks], FrozenNet]

_PREFIX = "cocofl:"


class Stretch(NamedTuple):
    """How far a stretch rises above the bytes at its beginning, and what it leaves of them."""

    rise: int
    left: int


class Timeline(NamedTuple):
    """Bytes alive after each allocation or release, and where the marks lie between these."""

    alive: list[int]
    marks: list[tuple[str, int]]

    def since(self, name: str) -> Timeline:
        """What follows the mark ``name``."""
        at = next(i for i, (mark, _) in enumerate(self.marks) if mark == name)
        begin = self.marks[at][1]
        later = [(mark, place - begin) for mark, place in self.marks[at:]]
        return Timeline(self.alive[begin:], later)

    def stretch(self, begin: str, end: str) -> Stretch:
        """What happens between two marks."""
        start = self.since(begin)
        places = (place for mark, place in start.marks if mark == end)
        alive = start.alive[: next(places) + 1]
        return Stretch(max(alive) - alive[0], alive[-1] - alive[0])


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


def recorded_step(build: Callable[[], nn.Module], inputs: Inputs) -> Timeline:
    """Build a network, let it train a step, and record another one.

    So what this step finds is there: gradients of the step before, the mini-batch, the network.
    """

    def run() -> None:
        step = training_step(build(), tuple(x.clone() for x in inputs), mark=mark)
        step()
        gc.collect()
        mark("second")
        step()

    return recorded(run).since("second")


def peak_tensor_bytes(build: Callable[[], nn.Module], inputs: Inputs) -> int:
    """The most bytes of tensors alive at once during a step, everything counted.

    That is the network, its mini-batch and target, gradients, activations and all in between.
    """
    return max(recorded_step(build, inputs).alive)


def held_bytes(build: Callable[[], nn.Module]) -> int:
    """The bytes of tensors that a network holds."""

    def run() -> None:
        net = build()
        gc.collect()
        mark("built")
        del net

    return recorded(run).since("built").alive[0]


class MemoryModel:
    """Recorded steps: of every span of one block, and of full training."""

    def __init__(self, build: Build, inputs: Inputs, n_blocks: int) -> None:
        blocks = range(n_blocks)
        gc.collect()
        gc.freeze()  # what is there already need not be searched for garbage each time
        try:
            self._whole = _of_span(build, inputs, Span(0, n_blocks))
            self._alone = [self._whole]
            if n_blocks > 1:
                self._alone = [_of_span(build, inputs, Span(i, i + 1)) for i in blocks]
            built = [held_bytes(partial(build, Span(i, n_blocks))) for i in blocks]
            trained = build(Span(0, n_blocks)).trained
        finally:
            gc.unfreeze()
        # Bytes that stay from step to step: of blocks, of the frozen ones before a block, of the
        # passing ones from a block on, and of all else.
        own = [_own_bytes(block) for block in trained]
        learnt = ([p for p in block.parameters() if p.requires_grad] for block in trained)
        self._gradients = [sum(p.nbytes for p in parameters) for parameters in learnt]
        self._trained = [sum(both) for both in zip(own, self._gradients, strict=True)]
        self._frozen = [built[i] - sum(own[i:]) for i in blocks]
        self._constant = self._whole.alive[0] - sum(self._trained)
        self._passing = [0] * (n_blocks + 1)
        for i in blocks[:-1]:
            others = self._constant + self._trained[i] + self._frozen[i]
            self._passing[i + 1] = self._alone[i].alive[0] - others

    def peak_bytes(self, trained: Blocks) -> int:
        """The peak when these blocks are trained.

        Passing blocks between trained ones were never recorded alone: they are taken to rise as
        far as all passing blocks from there on do, so the answer errs on the high side.
        """
        alive = self._constant + self._frozen[min(trained)]
        alive += sum(self._trained[block] for block in trained)
        for blocks, role in trained.regions(len(self._gradients)):
            if role is Role.PASSING:
                alive += self._passing[blocks[0]] - self._passing[blocks[-1] + 1]
        peak = alive
        for stretch in self._stretches(trained):
            peak = max(peak, alive + stretch.rise)
            alive += stretch.left
        return peak

    def _stretches(self, trained: Blocks) -> Iterator[Stretch]:
        """A step; what passes behind the last trained block comes with the loss."""
        first, end = min(trained), max(trained) + 1
        regions = [one for one in trained.regions(end) if one.role is not Role.FROZEN]
        yield self._alone[first].stretch("step", "in")
        for region in regions:
            yield from self._along(region, first, backward=False)
        yield self._rest(end, backward=False)
        yield Stretch(0, -sum(self._gradients[block] for block in trained))
        yield self._rest(end, backward=True)
        for region in reversed(regions):
            yield from self._along(region, first, backward=True)
        yield self._whole.stretch("optimizer", "end")

    def _along(self, region: Region, first: int, *, backward: bool) -> Iterator[Stretch]:
        """Blocks of one role, in the order in which they run."""
        blocks, role = region
        if role is Role.PASSING:
            here, after = (self._rest(i, backward=backward) for i in (blocks[0], blocks[-1] + 1))
            yield Stretch(here.rise, here.left - after.left)
            return
        for i in reversed(blocks) if backward else blocks:
            step = self._alone[i] if i == first else self._whole
            if backward:
                yield step.stretch(f"grad {i}", "optimizer" if i == first else f"grad {i - 1}")
            else:
                yield step.stretch("in" if i == first else f"out {i - 1}", f"out {i}")

    def _rest(self, begin: int, *, backward: bool) -> Stretch:
        """All blocks from ``begin`` on, passing, and the loss."""
        step = self._alone[begin - 1] if begin < len(self._alone) else self._whole
        if backward:
            return step.stretch("backward", f"grad {begin - 1}")
        return step.stretch(f"out {begin - 1}", "zero")


def _of_span(build: Build, inputs: Inputs, span: Span) -> Timeline:
    """A step whose trained blocks leave marks: entering the first, leaving each, and gradients."""

    def marking() -> FrozenNet:
        net = build(span)
        net.trained[0].register_forward_pre_hook(lambda _module, _inputs: mark("in"))
        for index, block in zip(net.blocks, net.trained, strict=True):
            block.register_forward_hook(partial(_leave, index))
        return net

    return recorded_step(marking, inputs)


def _leave(index: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
    mark(f"out {index}")
    outputs = output if isinstance(output, tuple) else (output,)
    main = next(o for o in outputs if isinstance(o, Tensor) and o.requires_grad)
    main.register_hook(lambda _gradient: mark(f"grad {index}"))


def _own_bytes(block: nn.Module) -> int:
    """Of parameters and buffers, each storage once."""
    storages = [t.untyped_storage() for t in (*block.parameters(), *block.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
