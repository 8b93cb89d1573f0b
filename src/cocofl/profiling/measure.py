"""One configuration, measured in a process of its own.

``python -m cocofl.profiling.measure WORKSPACE CONFIGURATION`` prints one line of JSON. In a fresh
process what is resident before training is the same for every configuration, and what comes on top
is that of this configuration and nothing else.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cocofl.allocator import keep_freed_memory
from cocofl.errors import CocoflError, ProfilingFailed
from cocofl.freeze import FLOAT32, freeze, upload_sizes
from cocofl.named import search_path
from cocofl.profiling.configurations import Configuration, Cost
from cocofl.profiling.memory import peak_tensor_bytes
from cocofl.profiling.resident import resident_peak
from cocofl.profiling.subject import (
    Settings,
    load_plan,
    load_settings,
    load_state,
    prepare,
    training_step,
)
from cocofl.span import Blocks, Span

STEPS = 16
WARM_UP = 2
PREPARE = "prepare"
_USERS_MISTAKE = 2


def prepare_apart(folder: Path, settings: Settings) -> None:
    """Prepare the workspace in a process of its own."""
    _in_fresh_process(folder, PREPARE, json.dumps(asdict(settings)))


class Measurement(NamedTuple):
    """What a configuration costs, and what the process holds before; None where nobody says."""

    cost: Cost
    process_bytes: int | None


def measure(folder: Path, configuration: Configuration) -> Measurement:
    """Measure a configuration in a fresh process."""
    cost, process_bytes = _in_fresh_process(folder, str(configuration))
    return Measurement(Cost(*cost), process_bytes)


def _in_fresh_process(folder: Path, what: str, *more: str) -> Any:
    command = [sys.executable, "-P", "-m", "cocofl.profiling.measure", str(folder), what, *more]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            out, problems = child.communicate()
        except BaseException:
            child.kill()
            raise
    last = problems.strip().splitlines()[-1:] or ["it said nothing"]
    if child.returncode == _USERS_MISTAKE:
        raise ProfilingFailed(last[0])
    if child.returncode != 0:
        killed = " (killed: out of memory?)" if child.returncode < 0 else ""
        raise ProfilingFailed(
            f"{what} could not be measured: the process ended with {child.returncode}{killed}: "
            f"{last[0]}"
        )
    return json.loads(out.splitlines()[-1])


def measure_here(folder: Path, configuration: Configuration) -> Measurement:
    """Measure a configuration; to be called once in the life of a process."""
    settings = load_settings(folder)
    torch.set_num_threads(settings.threads)
    blocks, width, subject = configuration, None, settings
    if whole := isinstance(configuration, float):
        width = configuration if settings.method == "width" else None
        # What the costs of all else are compared with.
        subject = replace(settings, rank=0, checkpoint=False, precision=FLOAT32)
    chain, inputs = subject.chain(width)
    if not isinstance(blocks, Blocks):
        blocks = Span(0, len(chain))
    state = None if whole else load_state(folder)
    variant = "f" if whole else settings.variant
    how = partial(freeze, chain, blocks, variant=variant, backend=settings.backend)
    how = partial(how, checkpoint=subject.checkpoint, precision=subject.precision)
    build = partial(how, state=state, plan=load_plan(folder))

    def train(steps: int) -> list[float]:
        return timed(training_step(build(), tuple(x.clone() for x in inputs)), steps)

    seconds = train(STEPS)
    resident = resident_peak(partial(train, 1))
    gc.collect()
    sizes = upload_sizes(chain, scales=settings.integers)
    upload = sum(sizes[block] for block in blocks)
    peak = peak_tensor_bytes(build, inputs)
    # Tensors that fit into pages which the process has already are needed all the same.
    added = None if resident is None else max(peak, resident.added)
    cost = Cost(statistics.median(seconds), added, peak, upload)
    return Measurement(cost, None if resident is None else resident.before)


def timed(step: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of some steps, after warming up."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UP:]


def main() -> None:
    """Measure one configuration, or prepare the workspace."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    keep_freed_memory()
    try:
        if what == PREPARE:
            settings = Settings(**json.loads(sys.argv[3]))
            torch.set_num_threads(settings.threads)
            prepare(folder, settings)
            print("[]")
        else:
            configuration = Blocks.parse(what) if ":" in what else float(what)
            print(json.dumps(measure_here(folder, configuration)))
    except CocoflError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        sys.exit(_USERS_MISTAKE)


if __name__ == "__main__":
    main()
