"""How good ``cocofl profile --fast`` is: predictions next to full measurement in the same run.

    python bench/profile_fast.py mobilenet

Prints how long the fast profile took, and on held-out spans (none of those that it measured) the
errors of step time and tensor peak, with the repeat error of the full measurement beside them: no
prediction can be seen to be better than that. Each full measurement is as in ``cocofl profile``:
the median of 16 steps; with ``--apart`` each in a process of its own. Anchors between them take
out the machine's drift. All spans are measured ``--rounds`` times, one round after the other, and
a prediction is compared with the median over the rounds: on a machine where one and the same span
differs by 10 % from one minute to the next, a single measurement says little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from cocofl import FrozenNet, KernelPlan, ProfileTable, Span, all_spans, freeze
from cocofl.profiling.configurations import Cost
from cocofl.profiling.cost_model import design, fast_table
from cocofl.profiling.measure import STEPS, measure, prepare_apart, timed
from cocofl.profiling.memory import peak_tensor_bytes
from cocofl.profiling.subject import Settings, measured_state, training_step
from cocofl.profiling.sweep import Entry, drift
from cocofl.rng import stream


class Inside:
    """Full measurements in this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chain, self._inputs = settings.chain()
        self._state = measured_state(self._chain, self._inputs)
        self._plan = KernelPlan()

    def __call__(self, span: Span) -> Cost:
        def build() -> FrozenNet:
            return freeze(
                self._chain,
                span,
                variant=self._settings.variant,
                backend=self._settings.backend,
                state=self._state,
                plan=self._plan,
            )

        seconds = timed(training_step(build(), self._inputs), STEPS)
        peak = peak_tensor_bytes(build, self._inputs)
        return Cost(statistics.median(seconds), None, peak, 1)


def with_anchors(
    spans: list[Span], full: Span, measure_one: Callable[[Span], Cost]
) -> dict[Span, Cost]:
    """Full measurements, an anchor every sixth, times freed of drift."""
    entries = []
    for i, span in enumerate(spans):
        if i % 6 == 0:
            entries.append(Entry(full, True, measure_one(full), None))
        entries.append(Entry(span, False, measure_one(span), None))
    entries.append(Entry(full, True, measure_one(full), None))
    return {
        entry.configuration: entry.cost._replace(step_s=entry.cost.step_s / pace)
        for entry, pace in zip(entries, drift(entries), strict=True)
        if isinstance(entry.configuration, Span)
    }


def summary(name: str, errors: list[float], limit: str) -> None:
    sizes = [abs(error) for error in errors]
    median, largest = statistics.median(sizes), max(sizes)
    print(f"{name:<34} median {median:6.1%}  largest {largest:6.1%}   {limit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="mobilenet")
    parser.add_argument("--variant", default="qff")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=4, help="how often each is measured")
    parser.add_argument("--apart", action="store_true", help="a fresh process per measurement")
    args = parser.parse_args()
    settings = Settings(args.model, variant=args.variant, threads=args.threads)
    begin = time.perf_counter()
    *_, table = fast_table(settings)
    took_s = time.perf_counter() - begin
    assert isinstance(table, ProfileTable)
    n = table.n_blocks
    print(
        f"{args.model} {args.variant}, {args.threads} threads: {len(table)} spans in {took_s:.0f} s"
    )
    print(f"(mobilenet: at most 90 s); stated error {dict(table.error)}", flush=True)
    used = {span for group in design(range(n), list(all_spans(n))) for span in group}
    others = [span for span in all_spans(n) if span not in used]
    order = stream(1, "bench.profile_fast").permutation(len(others))[: args.held_out]
    held_out = [others[i] for i in order]
    full = Span(0, n)
    with tempfile.TemporaryDirectory() as name:
        one: Callable[[Span], Cost] = Inside(settings)
        if args.apart:
            prepare_apart(Path(name), settings)
            one = lambda span: measure(Path(name), span).cost  # noqa: E731
        rounds = [with_anchors(held_out, full, one) for _ in range(args.rounds)]

    costs = dict(zip(table.spans, table.costs, strict=True))
    fractions = {
        span: [measured[span].step_s / measured[full].step_s for measured in rounds]
        for span in held_out
    }
    time_errors, peak_errors = [], []
    for span in sorted(held_out):
        step_s, peak_bytes = rounds[0][span].step_s, rounds[0][span].tensor_bytes
        predicted = costs[span].step_s / costs[full].step_s
        time_errors.append(predicted / statistics.median(fractions[span]) - 1)
        peak_errors.append(costs[span].tensor_bytes / peak_bytes - 1)
        print(f"  {span!s:>6} {step_s * 1e3:7.1f} ms {time_errors[-1]:+7.1%}   "
              f"{peak_bytes / 1e6:6.1f} MB {peak_errors[-1]:+7.1%}")  # fmt: skip
    summary("time (as a fraction of full)", time_errors, "at most 6 % and 20 %")
    summary("tensor peak", peak_errors, "at most 5 % and 20 %")
    repeats = [b / a - 1 for found in fractions.values() for a, b in pairwise(found)]
    if repeats:
        summary("repeat error of full measurement", repeats, "(time, the same span twice)")


if __name__ == "__main__":
    main()
