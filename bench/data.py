"""Measures what the data issue promises, each in a fresh process where memory or imports count.

    python bench/data.py --data-dir FOLDER     # FOLDER/uoft-cs/cifar10 in the Hub's layout

Without CIFAR-10 at hand the first two figures are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from cocofl.data import listing
from cocofl.data import partition as pt

LOAD = """
import json, resource, time
started = time.perf_counter()
from cocofl.data import load
data = load("cifar10")
first_batch = data.train.batch(range(32))
ready_s = time.perf_counter() - started
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cpu_s = time.process_time()
print(json.dumps({"ready_s": ready_s, "cpu_s": cpu_s, "peak_bytes": peak_kib * 1024}))
"""

SPLIT = """
import zlib, numpy as np
from cocofl.data.partition import dirichlet
split = dirichlet(np.arange(640_000) % 62, 3500, 1, alpha=0.1, equal=False)
print(f"{zlib.crc32(split.indices.astype('<i8').tobytes()):08x}")
"""

# Names of both older and newer NumPy; unknown ones are ignored.
NARROW_CPU = "X86_V3 X86_V4 AVX2 FMA3 AVX512F AVX512_SKX AVX512_ICL AVX512_SPR"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=os.environ.get("COCOFL_DATA"))
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}")
    if arguments.data_dir and listing("cifar10", data_dir=arguments.data_dir).state != "missing":
        loading(arguments.data_dir)
    else:
        print("CIFAR-10 is not here (--data-dir): loading is not measured")
    splitting()
    same_everywhere()
    densities()


def loading(data_dir: str, repeats: int = 5) -> None:
    """CIFAR-10 from parquet to the first batch, without and with the cache, imports included.

    Every repetition is printed, and beside it the CPU time: on a shared machine the two part when
    a process is held up, and one lucky or unlucky run would tell nothing.
    """
    environment = {**os.environ, "COCOFL_DATA": data_dir}
    runs: dict[str, list[dict[str, float]]] = {"first time": [], "second time": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for measured in runs.values():
                measured.append(json.loads(_run(LOAD, {**environment, "COCOFL_CACHE": cache})))
    for (what, measured), limit_s in zip(runs.items(), (25, 2), strict=True):
        wall = " ".join(f"{run['ready_s']:.2f}" for run in measured)
        cpu = " ".join(f"{run['cpu_s']:.2f}" for run in measured)
        within = sum(run["ready_s"] <= limit_s for run in measured)
        peak_bytes = max(run["peak_bytes"] for run in measured)
        print(
            f"CIFAR-10 ready, {what}: wall {wall} s, CPU {cpu} s; {within} of {repeats} within "
            f"{limit_s} s; peak memory {peak_bytes / 1e6:.0f} MB (at most 1000 MB)"
        )


def splitting() -> None:
    labels = np.random.default_rng(0).integers(0, 62, 640_000)
    writers = np.random.default_rng(1).integers(0, 3550, 640_000)
    groups = pt.equal_groups(3500, 3, 0)
    splits: dict[str, Callable[[], object]] = {
        "iid": lambda: pt.iid(labels, 3500, 0),
        "dirichlet": lambda: pt.dirichlet(labels, 3500, 0, alpha=0.1),
        "dirichlet, drawn sizes": lambda: pt.dirichlet(labels, 3500, 0, alpha=0.1, equal=False),
        "rc": lambda: pt.resource_correlated(labels, 3500, 0, alpha=0.1, groups=groups),
        "by_play": lambda: pt.by_play(writers, 3500, 0, groups=groups),
        "natural": lambda: pt.natural(writers, 3500, 0),
    }
    for name, split in splits.items():
        started = time.perf_counter()
        split()
        took_s = time.perf_counter() - started
        print(f"640 000 labels over 3500 devices, {name}: {took_s:.2f} s (at most 1 s)")


def same_everywhere() -> None:
    """The same draw with NumPy's wide-vector code and without: as on another CPU."""
    wide = _run(SPLIT, {**os.environ})
    narrow = _run(SPLIT, {**os.environ, "NPY_DISABLE_CPU_FEATURES": NARROW_CPU})
    verdict = "the same" if wide == narrow else "NOT THE SAME"
    print(f"split checksum {wide} with wide vectors, {narrow} without: {verdict}")


def densities() -> None:
    """rc at alpha 0.1 on labels like CIFAR-10's: where the classes live, for one seed and many."""
    labels = np.repeat(np.arange(10), 5000)
    for equal in (True, False):
        top_shares = []
        for seed in range(50):
            groups = pt.equal_groups(99, 3, seed)
            split = pt.resource_correlated(labels, 99, seed, alpha=0.1, groups=groups, equal=equal)
            per_group = pt.class_counts(split, labels, 10, groups)
            top_shares.append(per_group.max(axis=0) / per_group.sum(axis=0))
            if equal and seed == 0:
                print("rc, alpha 0.1, seed 0: share of each class on each group, and densities")
                shares = per_group / per_group.sum(axis=0)
                for group in range(3):
                    row = " ".join(f"{share:4.0%}" for share in shares[group])
                    print(f"  group {group}, share of the class:  {row}")
                for group, densities_of in enumerate(pt.class_densities(per_group)):
                    row = " ".join(f"{density:4.0%}" for density in densities_of)
                    print(f"  group {group}, density of the class: {row}")
        found = np.array(top_shares)
        print(
            f"rc, alpha 0.1, 3 groups, 50 seeds, {'equal shares' if equal else 'drawn sizes'}: "
            f"a class has {found.mean():.0%} of its samples in its main group (median "
            f"{np.median(found):.0%}); more than half in {(found > 0.5).mean():.1%} of the cases"
        )


def _run(code: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
