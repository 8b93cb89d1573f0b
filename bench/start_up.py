"""Where the time goes until the first round is merged, in a process of its own.

    python bench/start_up.py                                # on a GPU: a bare machine, then again
    python bench/start_up.py --profile 40                   # with the functions that took longest
    python bench/start_up.py --made-up                      # where the data is not

``bare`` finds an empty folder of compiled kernels, ``again`` what that one has left. Times are
seconds since the process was started. A line is a call: when it was over, how long it took, and
indented what it called; the GPU has done its work by then. The library is not changed: its
functions are wrapped here.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import io
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What the process that is timed imports when it gets there.
# ruff: noqa: PLC0415

BEGUN = "COCOFL_START_UP_BEGUN"
FILE = Path("experiments/paper/mobilenet-cifar10-rc.toml")
ROUNDS = 3
# Where a name is looked up when it is called, and what to call it.
WATCHED = {
    "cocofl.experiment.runs:load_data": "load the data",
    "cocofl.experiment.runs:Setup": "put the experiment together",
    "cocofl.fl.trainer:split": "split the network",
    "cocofl.freeze.network:lower": "lower it",
    "cocofl.experiment.setup:Setup.job": "make the job",
    "cocofl.experiment.setup:Setup.about": "describe it",
    "cocofl.experiment.engines:make_executor": "make the executor",
    "cocofl.engine.rounds:RunInProgress": "open the run",
    "cocofl.engine.cohort:CohortExecutor.prepare": "wait for CUDA, and data to the GPU",
    "cocofl.engine.cohort:GpuSamples": "a split to the GPU",
    "cocofl.engine.cohort:Program": "build the program",
    "cocofl.engine.cohort:CohortExecutor.placed": "the state as rows",
    "cocofl.engine.cohort:devices_that_fit": "try out how many fit",
    "cocofl.vector.training.cohort:Cohort.__init__": "make a cohort",
    "cocofl.vector.training.cohort:Cohort._compile": "compile kernels",
    "cocofl.vector.training.execution:Graphs.run": "a step",
    "cocofl.vector.training.cohort:Cohort.train": "train",
    "cocofl.engine.gpu_evaluation:GpuEvaluator.test": "test",
    "cocofl.engine.rounds:play_round": "A ROUND",
}


class Enough(Exception):
    """All rounds that are wanted are there."""


@dataclass
class Clock:
    """When what was called, and for how long."""

    begun: float
    lines: list[tuple[int, str, float, float]] = field(default_factory=list)
    depth: int = 0

    def mark(self, name: str) -> None:
        """Something is over that began when the last thing was."""
        end = time.monotonic() - self.begun
        self.lines.append((0, name, end, end - (self.lines[-1][2] if self.lines else 0.0)))

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which is written down."""
        import torch

        def watched(*args: Any, **more: Any) -> Any:
            place = len(self.lines)
            self.lines.append((self.depth, name, 0.0, 0.0))
            self.depth += 1
            begin = time.monotonic()
            try:
                return call(*args, **more)
            finally:
                if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
                    torch.cuda.synchronize()
                end = time.monotonic()
                self.depth -= 1
                self.lines[place] = (self.depth, name, end - self.begun, end - begin)

        return watched

    def text(self, least_s: float) -> list[str]:
        """A line for each call that took a while."""
        return [
            f"{end:8.2f} {took:8.2f}  {'   ' * depth}{name}"
            for depth, name, end, took in self.lines
            if took >= least_s
        ]


def wrap(clock: Clock) -> None:
    """Put the clock around all that is watched."""
    for where, name in WATCHED.items():
        module, _, path = where.partition(":")
        owner: Any = importlib.import_module(module)
        *holders, last = path.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        setattr(owner, last, clock.watch(name, getattr(owner, last)))


def play(asked: argparse.Namespace) -> None:
    """In a process of its own: some rounds, and what took how long."""
    clock = Clock(float(os.environ[BEGUN]))
    clock.mark("python")
    import torch  # noqa: F401

    clock.mark("import torch")
    from cocofl.config import Experiment, parse_value
    from cocofl.experiment import simulate

    clock.mark("import cocofl")
    warnings.simplefilter("ignore")
    if asked.made_up:
        from small_gpu import made_up_images

        data = made_up_images()
        runs: Any = importlib.import_module("cocofl.experiment.runs")
        runs.load_data = lambda _: data
    wrap(clock)
    changes = {"evaluation.every": ROUNDS, "engine.device": asked.device, "engine.kind": "cohort"}
    own = {key: parse_value(value) for key, value in (one.split("=", 1) for one in asked.set)}
    experiment = Experiment.load(asked.experiment, own)
    experiment = experiment.changed({**changes, "engine.precision": asked.precision})
    profile = cProfile.Profile()

    class Watcher:
        def on_round(self, record: Any) -> None:
            if record.round == 1:
                profile.disable()
            if record.round == ROUNDS:
                raise Enough

        def on_end(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder:
        if asked.profile:
            profile.enable()
        with contextlib.suppress(Enough):
            simulate(experiment, out=Path(folder) / "run", watchers=[Watcher()])
    print("\n".join(clock.text(asked.least)))
    first = next(end for _, name, end, _ in clock.lines if name == "A ROUND")
    print(f"{first:8.2f} s until the first round was merged")
    if asked.profile:
        for order in ("cumulative", "tottime"):
            text = io.StringIO()
            stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats(order)
            stats.print_stats(asked.profile)
            print(text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", nargs="?", type=Path, default=FILE)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--made-up", action="store_true", help="noise instead of images")
    parser.add_argument("--least", type=float, default=0.05, help="seconds of a line")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    asked = parser.parse_args()
    if BEGUN in os.environ:
        play(asked)
        return
    with tempfile.TemporaryDirectory() as kernels:
        for title in ("bare", "again"):
            print(f"\n{title}: over at, took (s)", flush=True)
            begun = {BEGUN: str(time.monotonic()), "TRITON_CACHE_DIR": kernels}
            subprocess.run([sys.executable, *sys.argv], env=os.environ | begun, check=True)
            print(f"{sum(1 for _ in Path(kernels).glob('*/*.cubin')):8d} kernels compiled so far")
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", "import cocofl.cli"], check=False)
    took = time.monotonic() - begin
    print(f"{took:8.2f} s for `import cocofl.cli`{' (FAILED)' if done.returncode else ''}")


if __name__ == "__main__":
    main()
