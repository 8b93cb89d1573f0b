"""``--fast``: measure O(N) configurations, predict every other one, and say how well.

Time is additive over blocks by role: a block costs so much frozen, trained, or passing; the first
trained block needs no input gradient and saves that; where float32 meets frozen blocks there is a
cost per byte of the tensor that crosses. Spans of one and two blocks and a few long ones are
measured, interleaved in one process, and the costs fitted to them in relative error, drawn a
little towards the analytic ones, which decides what the measurements leave open. Memory is
replayed (:mod:`cocofl.profiling.memory`). Both answer for any set of blocks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cocofl.allocator import keep_freed_memory
from cocofl.freeze import AdaptedChain, freeze, upload_sizes
from cocofl.profiling.analytic import BlockWork, block_seconds, block_work
from cocofl.profiling.configurations import Configuration, Cost, joined
from cocofl.profiling.device_rates import DEVICES
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.memory import Build, MemoryModel, peak_tensor_bytes
from cocofl.profiling.resident import settled_bytes
from cocofl.profiling.subject import (
    LEVELS,
    WIDTHS,
    Inputs,
    Settings,
    interpolated,
    kernel_plan,
    measured_state,
    training_step,
)
from cocofl.profiling.sweep import Progress
from cocofl.profiling.table import ProfileTable
from cocofl.rng import stream
from cocofl.span import Blocks, Role, Span

ROUNDS = 6
WARM_UP = 1
TOGETHER = 24
CHECKS = 6
LONG = 5
MEASURED_WIDTHS = 10

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Configuration)
# Taken as the noise of one measured median, and as how far a cost may be from its analytic value.
_NOISE, _TRUST = 0.02, 1.0
_ROLES = (Role.FROZEN, Role.TRAINED, Role.PASSING)


@dataclass(frozen=True)
class TimeModel:
    """Seconds as :func:`_features` counts them, and the bytes that leave each block."""

    costs: Floats
    output_bytes: Floats

    def step_s(self, trained: Blocks) -> float:
        """The time of one step when these blocks are trained."""
        return float(_features(trained, self.output_bytes) @ self.costs)


def fast_table(
    settings: Settings, *, every_width: bool = False
) -> Iterator[Progress | ProfileTable]:
    """Measure what the model needs, showing progress; the table comes last.

    With ``every_width`` nothing of a table of widths is interpolated.
    """
    # Dozens of networks take turns here, more than oneDNN's cache of compiled primitives holds by
    # default. It is read when oneDNN computes for the first time in the process.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    if settings.method == "width":
        yield from _fast_widths(settings, len(WIDTHS) if every_width else MEASURED_WIDTHS)
        return
    chain, inputs = settings.chain()
    n, learning = len(chain), chain.learning_blocks
    state = measured_state(chain, inputs)
    plan = kernel_plan(settings, chain, state)
    process_bytes = settled_bytes()
    how = partial(freeze, chain, variant=settings.variant, backend=settings.backend)
    how = partial(how, checkpoint=settings.checkpoint, precision=settings.precision)
    build: Build = partial(how, state=state, plan=plan)
    wanted = settings.spans(learning)
    peaks = _peaks(wanted, build, inputs, n, each=settings.is_compared)
    fitted, checks = design(learning, wanted)
    alone = (len(learning) // 4, len(learning) // 2, -1)
    links = sorted({joined(learning), *(joined([learning[i]]) for i in alone)})
    plain = chain.plain if isinstance(chain, AdaptedChain) else chain
    whole = partial(freeze, plain, Span(0, n), variant="f")

    def step_of(key: Configuration) -> Callable[[], None]:
        return training_step(build(key) if isinstance(key, Blocks) else whole(), inputs)

    full = [1.0] if settings.is_compared else []
    timed: list[Configuration] = [*fitted, *checks, *full]
    seconds = yield from interleaved(timed, step_of, [*links])
    times = fit(block_work(chain, inputs), settings.variant, {key: seconds[key] for key in fitted})
    error = _error([times.step_s(key) / seconds[key] - 1 for key in checks], len(fitted))
    sizes = upload_sizes(chain, scales=settings.integers)
    costs: dict[Configuration, Cost] = {}
    for blocks in wanted:
        # What was measured is better than what is predicted from it.
        step_s = seconds.get(blocks) or times.step_s(blocks)
        upload = sum(sizes[block] for block in blocks)
        costs[blocks] = Cost(step_s, None, peaks[blocks], upload)
    for key in full:
        upload = sum(upload_sizes(plain, scales=settings.integers))
        costs[key] = Cost(seconds[key], None, peak_tensor_bytes(whole, inputs), upload)
    facts = {"process_bytes": process_bytes, "error": error}
    hardware = Hardware.here(settings.threads, plan.choices)
    yield settings.table(costs, n, source="fast", hardware=hardware, **facts)


def _peaks(
    wanted: Sequence[Blocks], build: Build, inputs: Inputs, n_blocks: int, *, each: bool
) -> dict[Blocks, int]:
    """The peak of each configuration: recorded itself, or replayed from few."""
    if each:
        return {blocks: peak_tensor_bytes(partial(build, blocks), inputs) for blocks in wanted}
    memory = MemoryModel(build, inputs, n_blocks)
    return {blocks: memory.peak_bytes(blocks) for blocks in wanted}


def _fast_widths(settings: Settings, number: int) -> Iterator[Progress | ProfileTable]:
    """So many widths measured and a few more, the times and peaks of the others interpolated.

    Those that the baselines use are measured: time does not grow steadily with width, for some
    numbers of channels suit the kernels better than their neighbours.
    """
    picked = np.linspace(0, len(WIDTHS) - 1, number).round().astype(int).tolist()
    between = {(left + right) // 2 for left, right in pairwise(picked)} - set(picked)
    fitted, checks = ([WIDTHS[i] for i in sorted(some)] for some in (picked, between))
    measured = sorted({*LEVELS, *fitted, *checks})
    process_bytes = _process_bytes(settings)
    peaks: dict[float, int] = {}
    steps: dict[float, Callable[[], None]] = {}
    uploads: dict[float, int] = {}
    for width in WIDTHS:
        chain, inputs = settings.chain(width)
        uploads[width] = sum(upload_sizes(chain, scales=False))
        if width in measured:
            build = partial(freeze, chain, Span(0, len(chain)), variant="f")
            peaks[width] = peak_tensor_bytes(build, inputs)
            steps[width] = training_step(build(), inputs)
    links = [measured[0], measured[len(measured) // 2], measured[-1]]
    seconds = yield from interleaved(measured, steps.__getitem__, links)
    costs = {key: Cost(seconds[key], None, peaks[key], uploads[key]) for key in measured}
    guesses = interpolated({key: costs[key] for key in fitted})
    error = _error([guesses[key].step_s / seconds[key] - 1 for key in checks], len(measured))
    everything = interpolated(costs)
    for width in WIDTHS:
        everything[width] = everything[width]._replace(upload_bytes=uploads[width])
    facts = {"process_bytes": process_bytes, "error": error}
    source = "fast" if len(measured) < len(WIDTHS) else "measured"
    hardware = Hardware.here(settings.threads)
    yield settings.table(everything, len(chain), source=source, hardware=hardware, **facts)


def _process_bytes(settings: Settings) -> int | None:
    """What this process holds with the whole network and a mini-batch, after a step."""
    chain, inputs = settings.chain(1.0)
    training_step(freeze(chain, Span(0, len(chain)), variant="f"), inputs)()
    return settled_bytes()


def design(learning: Sequence[int], wanted: Sequence[Blocks]) -> tuple[list[Blocks], list[Blocks]]:
    """What is measured to fit the model, and which of those wanted to see how good it is.

    Spans of one and two blocks see each block in each role at a small total, so that their
    relative error is small; a few long ones keep the sum right.
    """
    n = len(learning)
    cuts = sorted({round(n * k / LONG) for k in range(1, LONG + 1)} - {0})
    fitted = {joined(learning[i : i + k]) for k in (1, 2) for i in range(n - k + 1)}
    fitted |= {joined(learning[:cut]) for cut in cuts}
    fitted |= {joined(learning[cut:]) for cut in cuts if cut < n}
    others = [blocks for blocks in wanted if blocks not in fitted]
    order = stream(0, "profiling.checks").permutation(len(others))[:CHECKS]
    return sorted(fitted), sorted(others[i] for i in order)


def interleaved(
    wanted: Sequence[Key], make_step: Callable[[Key], Callable[[], None]], links: Sequence[Key]
) -> Generator[Progress, None, dict[Key, float]]:
    """Seconds per step of each configuration, taken in turns.

    One step of each in shuffled order, round after round: a round's pace is the median of its
    steps against their own medians, and is divided out. When there are too many networks to be
    alive at once, the groups are brought to one pace by what both have, the links.
    """
    rest = [key for key in wanted if key not in links]
    n_groups = max(1, -(-len(rest) // TOGETHER))
    total = n_groups * (ROUNDS + WARM_UP)
    begin, done = time.monotonic(), 0
    groups = []
    for group in range(n_groups):
        keys = [*links, *rest[group::n_groups]]
        steps = {key: make_step(key) for key in keys}
        rng = stream(group, "profiling.interleaved")
        table = np.zeros((ROUNDS, len(keys)))
        for round_ in range(-WARM_UP, ROUNDS):
            for i in rng.permutation(len(keys)).tolist():
                start = time.perf_counter()
                steps[keys[i]]()
                if round_ >= 0:
                    table[round_, i] = time.perf_counter() - start
            done += 1
            yield Progress(done, total, (total - done) * (time.monotonic() - begin) / done)
        groups.append(dict(zip(keys, _medians(table).tolist(), strict=True)))
    return _same_pace(groups, links)


def _medians(table: Floats) -> Floats:
    """Column medians of (rounds, configurations), freed of each round's pace."""
    medians: Floats = np.median(table, axis=0)
    for _ in range(3):
        pace = np.median(table / medians, axis=1, keepdims=True)
        medians = np.median(table / pace, axis=0)
    return medians


def _same_pace(groups: Sequence[dict[Key, float]], links: Sequence[Key]) -> dict[Key, float]:
    typical = {key: statistics.median(group[key] for group in groups) for key in links}
    seconds: dict[Key, float] = {}
    for group in groups:
        pace = statistics.median(group[key] / typical[key] for key in links)
        seconds |= {key: value / pace for key, value in group.items()}
    return seconds | typical


def fit(work: Sequence[BlockWork], variant: str, seconds: Mapping[Blocks, float]) -> TimeModel:
    """The costs that explain what was measured, nearest to the analytic ones."""
    device = DEVICES["x64"]
    output_bytes = np.array([block.output_bytes for block in work])
    by_role = [
        np.array([block_seconds(block, role, variant, device) for block in work]) for role in _ROLES
    ]
    macs = np.array([block.macs for block in work])
    gradient = macs / device.float32_macs_per_s + by_role[1] * 0.05
    measured = np.array(list(seconds.values()))
    rows = np.stack([_features(blocks, output_bytes) for blocks in seconds])
    per_byte = 2 / device.bytes_per_s  # read and written
    prior = np.concatenate([[1e-4], *by_role, gradient, [per_byte, per_byte]])
    prior *= _scales(rows, prior, measured, len(work))
    floor = 0.2 * max(float(prior[1:-2].mean()), 1e-9)
    spread = _TRUST * np.maximum(prior, np.where(np.arange(len(prior)) < len(prior) - 2, floor, 0))
    weights = np.ones(len(measured))
    costs = prior
    for _ in range(4):  # what lies far off counts less: somebody else was at work just then
        costs = _solve(rows, measured, weights, prior, spread)
        off = np.abs(rows @ costs / measured - 1)
        weights = 1 / (1 + (off / (3 * _NOISE)) ** 2)
    return TimeModel(costs, output_bytes)


def _scales(rows: Floats, prior: Floats, measured: Floats, n: int) -> Floats:
    """One factor per role that brings the analytic costs to the measured pace."""
    roles = np.concatenate([[0], *([r] * n for r in (1, 2, 3)), [2] * n, [0, 0]]).astype(int)
    columns = np.stack([(rows * prior)[:, roles == role].sum(axis=1) for role in range(4)], axis=1)
    relative = columns / measured[:, None]
    factors = np.linalg.lstsq(relative, np.ones(len(measured)), rcond=None)[0]
    typical = float(np.median(measured / columns.sum(axis=1)))
    return np.asarray(np.clip(factors, 0.2 * typical, 5 * typical)[roles])


def _solve(
    rows: Floats, measured: Floats, weights: Floats, prior: Floats, spread: Floats
) -> Floats:
    """Least squares in relative error, drawn to the prior; costs are not negative."""
    free = np.ones(len(prior), dtype=bool)
    costs = prior.copy()
    for _ in range(10):
        scale = np.sqrt(weights) / (_NOISE * measured)
        left = np.concatenate([rows[:, free] * scale[:, None], np.diag(1 / spread)[free][:, free]])
        right = np.concatenate([measured * scale, (prior / spread)[free]])
        costs = np.zeros(len(prior))
        costs[free] = np.linalg.lstsq(left, right, rcond=None)[0]
        if (costs >= 0).all():
            break
        free &= costs > 0
    return costs


def _features(trained: Blocks, output_bytes: Floats) -> Floats:
    """How often each cost occurs: constant, by role, input gradient saved, bytes at boundaries."""
    n = len(output_bytes)
    by_role = {role: np.zeros(n) for role in _ROLES}
    entered = dict.fromkeys(by_role, 0.0)
    for blocks, role in trained.regions(n):
        by_role[role][list(blocks)] = 1
        entered[role] += float(output_bytes[blocks[0] - 1]) if blocks[0] else 0.0
    saved = np.zeros(n)
    saved[min(trained)] = -1
    into_and_out = [entered[Role.TRAINED], entered[Role.PASSING]]
    return np.concatenate([[1], *by_role.values(), saved, into_and_out])


def _error(relative: Sequence[float], n_measured: int) -> dict[str, float]:
    """What the predictions were off where they were checked."""
    off = [abs(value) for value in relative]
    if not off:
        return {"measured_configurations": n_measured}
    return {
        "time_median": round(statistics.median(off), 4),
        "time_max": round(max(off), 4),
        "checked_configurations": len(off),
        "measured_configurations": n_measured,
    }
