"""What a round of a deployment costs beside training: old and new SuperNodes, interleaved.

    python bench/flower_round.py --repeats 3 --rounds 8

"Old" are Flower's own SuperNodes, which start a process for every message; "new" are ours, which
keep it. Each deployment is a SuperLink and three SuperNodes on loopback with the quick start, as
`cocofl flower up` has it. Old and new take turns. The first round of a deployment prepares devices
and is told by itself; the others are all counted. Training is the time of the round's slowest
device. Memory is that of all processes of one device, at the moment in which training begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client_memory import measured_app
from cocofl.config import Experiment
from cocofl.flower.loopback import Loopback
from cocofl.flower.settings import Deployment
from cocofl.flower.trial import BUDGETS

TRAINED = re.compile(r"round (\d+): trained ([\d.]+) s")


def deploy(folder: Path, rounds: int, supernodes: int, stock: bool) -> dict[str, list[float]]:
    """Seconds of every round and of its training, and the memory of devices, from one run."""
    settings = Deployment(nodes=supernodes, folder=str(folder / "run"), round_s=300)
    app = measured_app(folder, Experiment(rounds=rounds), settings)
    with Loopback(folder / "network") as network:
        for number in range(supernodes):
            limits = dict.fromkeys(("time", "memory", "upload"), BUDGETS[number % len(BUDGETS)])
            node: dict[str, Any] = {"partition-id": number, "num-partitions": supernodes, **limits}
            node["trust"] = "measured"
            start = start_stock_node if stock else Loopback.start_node
            start(network, f"supernode{number}", node)
        network.submit(app)
        ends = round_ends(folder / "run" / "metrics.jsonl", rounds)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert all(record["merged"] == supernodes for record in records), records
    trained: defaultdict[int, float] = defaultdict(float)
    for log in (folder / "network").glob("supernode*.log"):
        for number, seconds in TRAINED.findall(log.read_text()):
            trained[int(number)] = max(trained[int(number)], float(seconds))
    memory = [json.loads(line) for line in (folder / "memory.jsonl").open()]
    return {
        "round_s": [after - before for before, after in itertools.pairwise(ends)],
        "training_s": [trained[number] for number in range(2, rounds + 1)],
        "memory_mb": [megabytes(one, 0) for one in memory if one["round"] == 1],
        "pss_mb": [megabytes(one, 1) for one in memory if one["round"] == 1],
        "later_mb": [megabytes(one, 0) for one in memory if one["round"] > 1],
        "processes": [len(one["processes"]) for one in memory],
    }


def megabytes(one: dict[str, Any], column: int) -> float:
    """Of all processes of a device: resident (0) or proportional (1)."""
    return float(sum(values[column] for values in one["processes"].values()))


def start_stock_node(network: Loopback, name: str, config: Mapping[str, Any]) -> None:
    """A SuperNode as Flower has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["flower-supernode", "--host", "127.0.0.1", "--port", str(port), "--insecure"]
    words += ["--superlink", f"127.0.0.1:{network.port}"]
    words += [
        "--node-config",
        " ".join(f"{key}={json.dumps(value)}" for key, value in config.items()),
    ]
    network.spawn(name, words)


def round_ends(metrics: Path, rounds: int) -> list[float]:
    """When each line of the metrics was written."""
    ends: list[float] = []
    give_up = time.monotonic() + 120 * rounds
    while len(ends) < rounds:
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        ends += [time.monotonic()] * (written - len(ends))
        assert time.monotonic() < give_up, "the deployment does not get on; see its logs"
        time.sleep(0.02)
    return ends


def main() -> None:
    """Take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8, help="of each deployment")
    parser.add_argument("--supernodes", type=int, default=3)
    parser.add_argument("--only", choices=("old", "new"))
    options = parser.parse_args()
    found: dict[str, defaultdict[str, list[float]]] = {}
    for _ in range(options.repeats):
        for way in ("old", "new") if options.only is None else (options.only,):
            with tempfile.TemporaryDirectory() as folder:
                measured = deploy(Path(folder), options.rounds, options.supernodes, way == "old")
            pairs = zip(measured["round_s"], measured["training_s"], strict=True)
            measured["beside_s"] = [whole - training for whole, training in pairs]
            for name, values in measured.items():
                found.setdefault(way, defaultdict(list))[name] += values
            spent = ", ".join(f"{s:.2f}" for s in measured["beside_s"])
            print(f"{way}: beside training {spent} s; load {os.getloadavg()[0]:.1f}", flush=True)
    for way, lists in found.items():
        middle = {name: statistics.median(numbers) for name, numbers in lists.items()}
        print(
            f"{way}: round {middle['round_s']:.2f} s, training {middle['training_s']:.2f} s, "
            f"beside it {middle['beside_s']:.2f} s (medians of {len(lists['round_s'])} rounds); "
            f"one device before training: {middle['processes']:.0f} processes, "
            f"{middle['memory_mb']:.0f} MB resident ({middle['pss_mb']:.0f} MB proportional), "
            f"{middle['later_mb']:.0f} MB before a later round"
        )
    if len(found) == 2:
        for name in ("round_s", "beside_s"):
            old, new = (statistics.median(found[way][name]) for way in ("old", "new"))
            print(f"old / new, {name}: {old / new:.1f}")


if __name__ == "__main__":
    main()
