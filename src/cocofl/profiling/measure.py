"""One configuration, measured in a process of its own.

``python -m cocofl.profiling.measure WORKSPACE CONFIGURATION`` prints one line of JSON. The fresh
process makes the peak of resident memory that of this configuration and nothing else. The peak is
the kernel's high-water mark (what ``getrusage`` calls ``ru_maxrss``), read from ``VmHWM`` where
there is one: after an ``exec`` Linux lets ``ru_maxrss`` begin with the *parent's* peak.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cocofl.allocator import keep_freed_memory
from cocofl.errors import CocoflError, ProfilingFailed
from cocofl.freeze import freeze, upload_sizes
from cocofl.named import search_path
from cocofl.profiling.memory import peak_tensor_bytes
from cocofl.profiling.subject import (
    Settings,
    load_plan,
    load_settings,
    load_state,
    prepare,
    training_step,
)
from cocofl.profiling.table import Configuration, Cost
from cocofl.span import Blocks, Span

STEPS = 16
WARM_UP = 2
PREPARE = "prepare"
_USERS_MISTAKE = 2


def prepare_apart(folder: Path, settings: Settings) -> None:
    """Prepare the workspace in a process of its own."""
    _in_fresh_process(folder, PREPARE, json.dumps(asdict(settings)))


def measure(folder: Path, configuration: Configuration) -> Cost:
    """What a configuration costs, measured in a fresh process."""
    return Cost(*_in_fresh_process(folder, str(configuration)))


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


def measure_here(folder: Path, configuration: Configuration) -> Cost:
    """What a configuration costs; to be called once in the life of a process."""
    before = _status_bytes("VmRSS") or _peak_resident_bytes()
    settings = load_settings(folder)
    torch.set_num_threads(settings.threads)
    width = configuration if isinstance(configuration, float) else None
    chain, inputs = settings.chain(width)
    blocks = Span(0, len(chain)) if isinstance(configuration, float) else configuration
    _forget_peak()
    state = load_state(folder) if width is None else None
    variant = settings.variant if width is None else "f"
    how = partial(freeze, chain, blocks, variant=variant, backend=settings.backend)
    build = partial(how, state=state, plan=load_plan(folder))
    step = training_step(build(), tuple(x.clone() for x in inputs))
    seconds = timed(step, STEPS)
    rss = max(1, _peak_resident_bytes() - before)
    del step
    gc.collect()
    sizes = upload_sizes(chain, scales=settings.integers)
    upload = sum(sizes[block] for block in blocks)
    return Cost(statistics.median(seconds), rss, peak_tensor_bytes(build, inputs), upload)


def timed(step: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of some steps, after warming up."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UP:]


def _forget_peak() -> None:
    """Let the high-water mark begin anew: building and tracing are not training."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # not allowed here: the peak then counts the tracing, too
            Path("/proc/self/clear_refs").write_text("5")


def _peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


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
