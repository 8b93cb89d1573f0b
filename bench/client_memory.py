"""What a client takes of a device: memory of each of its processes, and seconds until it trains.

    python bench/client_memory.py --repeats 3

A SuperLink and one SuperNode on loopback with the quick start, two rounds. Memory is read at the
moment in which the first training begins, and once more in the second round: resident, and
proportional (pages that processes share count in parts). "Training begins" is counted from the
start of the SuperNode, "it joined" until its log has its number. After the first repeat the system
has the files in memory. Flower's own SuperNode is measured by ``bench/flower_round.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from cocofl.config import Experiment
from cocofl.flower.loopback import Loopback
from cocofl.flower.settings import Deployment, run_config, write_app

# An app whose device writes down the processes of its group before it trains.
MEASURED = """
import json, os, sys, time
from pathlib import Path
from cocofl.flower import client

app = client.app
HEAVY = ("torch._dynamo", "sympy", "ray", "pandas", "sklearn", "scipy")


class Measured(client.Device):
    def play(self, request, lr, state):
        found = {"round": request.round_index + 1, "at": time.time(), "processes": {}}
        found["loaded"] = [name for name in HEAVY if name in sys.modules]
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(entry.name)) != os.getpgid(0):
                    continue
                lines = (entry / "smaps_rollup").read_text().splitlines()[1:]
                words = (entry / "cmdline").read_text().split(chr(0))
            except OSError:
                continue
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            known = ("app_process", "node.py", "superexec", "clientapp", "supernode")
            name = next((one for one in known if any(one in word for word in words)), words[0])
            found["processes"][name] = [kilobytes["Rss"] / 1024, kilobytes["Pss"] / 1024]
        with open(os.environ["COCOFL_BENCH_MEMORY"], "a") as out:
            out.write(json.dumps(found) + chr(10))
        return super().play(request, lr, state)


client.Device = Measured
"""


def measured_app(folder: Path, experiment: Experiment, settings: Deployment) -> Path:
    """The app of an experiment whose devices measure themselves, into ``folder/memory.jsonl``."""
    app = write_app(folder / "app", run_config(experiment, settings))
    (app / "measured.py").write_text(MEASURED)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("cocofl.flower.client:app", "measured:app"))
    os.environ["COCOFL_BENCH_MEMORY"] = str(folder / "memory.jsonl")
    return app


def client(folder: Path) -> dict[str, float]:
    """One deployment of one device."""
    settings = Deployment(nodes=1, folder=str(folder / "run"), round_s=300)
    app = measured_app(folder, Experiment(rounds=2), settings)
    node = {"partition-id": 0, "num-partitions": 3, "memory": 0.5, "trust": "measured"}
    with Loopback(folder / "network") as network:
        network.submit(app)
        begin, joined_s = time.time(), 0.0
        network.start_node("device", node)
        written, log = folder / "memory.jsonl", folder / "network" / "device.log"
        while not written.exists() or written.read_text().count("\n") < 2:
            if not joined_s and "SuperNode ID" in log.read_text():
                joined_s = time.time() - begin
            assert time.time() - begin < 300, "the deployment does not get on"
            time.sleep(0.02)
    first, later = (json.loads(line) for line in written.read_text().splitlines())
    found = {"it joined (s)": joined_s, "training begins (s)": first["at"] - begin}
    for name, (resident, proportional) in first["processes"].items():
        found[f"{name} (MB resident)"] = resident
        found[f"{name} (MB proportional)"] = proportional
    for when, one in (("before training", first), ("before the second round", later)):
        columns = zip(*one["processes"].values(), strict=True)
        for what, values in zip(("resident", "proportional"), columns, strict=True):
            found[f"all {when} (MB {what})"] = sum(values)
    print(f"loaded before training: {', '.join(first['loaded']) or 'nothing heavy'}", flush=True)
    return found


def main() -> None:
    """Measure some times, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name, value in client(Path(folder)).items():
                found[name].append(value)
    for name, values in found.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{name:45} {statistics.median(values):7.1f}   ({spread})")
    print(f"load {os.getloadavg()[0]:.1f}, {options.repeats} repeats")


if __name__ == "__main__":
    main()
