"""Tensor memory of any configuration, replayed from what each block keeps and needs in passing.

A step is a sequence of stretches: frozen blocks forward, trained blocks forward one by one,
passing blocks forward and the loss, gradients to zero, passing blocks backward, trained blocks
backward one by one, the optimizer. For each stretch we know from a recorded step how far above
its beginning it rises and what it leaves. Strung together they give the peak of a configuration
that never ran: a maximum over the stretches, not a sum.

Recorded are the N spans of one block and full training; that is exact for every contiguous span
up to what the allocator's rounding and the order of releases do at the seams.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from cocofl.freeze import FrozenNet
from cocofl.profiling.subject import Inputs
from cocofl.profiling.timeline import held_bytes, mark, recorded_step
from cocofl.span import Span

Build = Callable[[Span], FrozenNet]


class Stretch(NamedTuple):
    """How far a stretch rises above the bytes at its beginning, and what it leaves of them."""

    rise: int
    left: int


NOTHING = Stretch(0, 0)


@dataclass(frozen=True)
class MemoryModel:
    """Stretches by the first trained block, by the first passing block, and by trained block.

    Lists by position: ``frozen[i]`` are blocks 0…i-1 frozen, ``passing_…[j]`` are blocks j… passing
    (the last, nothing but the loss).
    """

    constant: int
    frozen_static: Sequence[int]
    passing_static: Sequence[int]
    trained_static: Sequence[int]
    gradients: Sequence[int]
    frozen: Sequence[Stretch]
    passing_forward: Sequence[Stretch]
    passing_backward: Sequence[Stretch]
    first_forward: Sequence[Stretch]
    first_backward: Sequence[Stretch]
    forward: Sequence[Stretch]
    backward: Sequence[Stretch]
    optimizer: Stretch

    def peak_bytes(self, trained: Collection[int]) -> int:
        """The peak when these blocks are trained, contiguous or not.

        Passing blocks between trained ones were never recorded alone: they are taken to rise as
        far as all passing blocks from there on do, so the answer errs on the high side.
        """
        runs = _runs(trained)
        first = runs[0].start
        alive = self.constant + self.frozen_static[first]
        alive += sum(self.trained_static[block] for block in trained)
        gaps = [range(a.stop, b.start) for a, b in pairwise(runs)]
        alive += self.passing_static[runs[-1].stop]
        alive += sum(self.passing_static[g.start] - self.passing_static[g.stop] for g in gaps)
        replay = _Replay(alive)
        replay.go(self.frozen[first])
        for run, gap in zip(runs, [*gaps, range(0)], strict=True):
            for block in run:
                table = self.first_forward if block == first else self.forward
                replay.go(table[block])
            if gap:
                replay.go(_part(self.passing_forward, gap))
        end = runs[-1].stop
        replay.go(self.passing_forward[end])
        replay.go(Stretch(0, -sum(self.gradients[block] for block in trained)))
        replay.go(self.passing_backward[end])
        for run, gap in zip(reversed(runs), [*reversed(gaps), range(0)], strict=True):
            for block in reversed(run):
                table = self.first_backward if block == first else self.backward
                replay.go(table[block])
            if gap:
                replay.go(_part(self.passing_backward, gap))
        replay.go(self.optimizer)
        return replay.peak


def record_memory(build: Build, inputs: Inputs, n_blocks: int) -> MemoryModel:
    """Record the steps the model needs: every span of one block, and full training."""
    gc.collect()
    gc.freeze()  # what is there already need not be searched for garbage each time
    try:
        whole = _Step(build, inputs, Span(0, n_blocks))
        singles = (
            [whole]
            if n_blocks == 1
            else [_Step(build, inputs, Span(i, i + 1)) for i in range(n_blocks)]
        )
        built = [held_bytes(partial(build, Span(i, n_blocks))) for i in range(n_blocks)]
        static = _trained_static(build(Span(0, n_blocks)))
    finally:
        gc.unfreeze()
    constant = whole.static - sum(total for total, _ in static)
    frozen_static = [
        built[i] - sum(total - gradients for total, gradients in static[i:])
        for i in range(n_blocks)
    ]
    passing_static = [0] * (n_blocks + 1)
    for i, step in enumerate(singles[:-1]):
        passing_static[i + 1] = step.static - constant - static[i][0] - frozen_static[i]
    last = n_blocks - 1
    return MemoryModel(
        constant=constant,
        frozen_static=frozen_static,
        passing_static=passing_static,
        trained_static=[total for total, _ in static],
        gradients=[gradients for _, gradients in static],
        frozen=[singles[i].stretch("step", "in") for i in range(n_blocks)],
        passing_forward=[
            NOTHING,
            *(singles[i].stretch(f"out {i}", "zero") for i in range(last)),
            whole.stretch(f"out {last}", "zero"),
        ],
        passing_backward=[
            NOTHING,
            *(singles[i].stretch("backward", f"grad {i}") for i in range(last)),
            whole.stretch("backward", f"grad {last}"),
        ],
        first_forward=[singles[i].stretch("in", f"out {i}") for i in range(n_blocks)],
        first_backward=[singles[i].stretch(f"grad {i}", "optimizer") for i in range(n_blocks)],
        forward=[
            whole.stretch("in" if i == 0 else f"out {i - 1}", f"out {i}") for i in range(n_blocks)
        ],
        backward=[
            whole.stretch(f"grad {i}", f"grad {i - 1}" if i else "optimizer")
            for i in range(n_blocks)
        ],
        optimizer=whole.stretch("optimizer", "end"),
    )


class _Replay:
    """Bytes alive, and the most there ever were."""

    def __init__(self, alive: int) -> None:
        self.alive = self.peak = alive

    def go(self, stretch: Stretch) -> None:
        self.peak = max(self.peak, self.alive + stretch.rise)
        self.alive += stretch.left


class _Step:
    """The recorded second step of one span."""

    def __init__(self, build: Build, inputs: Inputs, span: Span) -> None:
        self._timeline = recorded_step(lambda: _marking_blocks(build(span)), inputs)
        self._begin = self._timeline.find("second")
        self.static = self._timeline.at(self._begin)

    def stretch(self, begin: str, end: str) -> Stretch:
        """What happens between two marks of this step."""
        a, b = (self._timeline.find(mark, self._begin) for mark in (begin, end))
        level = self._timeline.at(a)
        return Stretch(self._timeline.peak(a, b) - level, self._timeline.at(b) - level)


def _marking_blocks(net: FrozenNet) -> FrozenNet:
    """Let trained blocks leave marks: entering the first, leaving each, gradients arriving."""
    blocks = list(zip(net.blocks, net.trained, strict=True))
    blocks[0][1].register_forward_pre_hook(lambda _module, _inputs: mark("in"))
    for index, block in blocks:
        block.register_forward_hook(_leaving(index))
    return net


def _leaving(index: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        mark(f"out {index}")
        outputs = output if isinstance(output, tuple) else (output,)
        main = next(o for o in outputs if isinstance(o, Tensor) and o.requires_grad)
        main.register_hook(lambda _gradient: mark(f"grad {index}"))

    return hook


def _trained_static(net: FrozenNet) -> list[tuple[int, int]]:
    """Per trained block all bytes that stay from step to step, and those of its gradients."""
    found = []
    for block in net.trained:
        gradients = sum(p.nbytes for p in block.parameters() if p.requires_grad)
        own: Mapping[str, Tensor] = dict(block.named_parameters()) | dict(block.named_buffers())
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own.values()
        }
        found.append((sum(storages.values()) + gradients, gradients))
    return found


def _part(stretches: Sequence[Stretch], gap: range) -> Stretch:
    """Passing blocks that end before the last block."""
    here, after = stretches[gap.start], stretches[gap.stop]
    return Stretch(here.rise, here.left - after.left)


def _runs(trained: Collection[int]) -> list[range]:
    """Consecutive blocks, in order.

    >>> _runs({1, 2, 5})
    [range(1, 3), range(5, 6)]
    """
    runs: list[range] = []
    for block in sorted(set(trained)):
        if runs and runs[-1].stop == block:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs
