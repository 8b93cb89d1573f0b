"""What privacy costs: accuracy against noise, and bytes and seconds of secure aggregation.

    python bench/privacy.py noise --seeds 3
    python bench/privacy.py masks --rounds 5 --supernodes 4
    python bench/privacy.py stages

``noise`` simulates digits on many devices: a small network without norms that all devices train
as a whole, and CoCoFL on one with BatchNorm. ``masks`` plays the quick start on a SuperLink and
SuperNodes on loopback, plainly and with secure aggregation, and leaves out the first round, in
which devices prepare. ``stages`` plays the protocol alone, without a network, and tells processor
time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cocofl.config import Experiment
from cocofl.experiment import Run, simulate
from cocofl.flower import secure_sum
from cocofl.flower.loopback import Loopback
from cocofl.flower.secure_sum import Numbers, SecureSum, Terms
from cocofl.flower.settings import Deployment, run_config, write_app
from cocofl.flower.trial import await_run

NOISES = (0.0, 0.01, 4.0, 8.0)
"""0 is without privacy, 0.01 clips and hardly adds noise."""
MANY: dict[str, Any] = {
    "rounds": 30,
    "devices": {"count": 350, "per_round": 175},
    "training": {"batch": 4, "lr": 0.3, "epochs": 2},
    "privacy": {"clip": 0.5, "statistics_clip": 0.5},
}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "FedAvg without limits, no norms": {
        "model": {"name": "privacy:network"},
        "strategy": {"name": "fedavg-full"},
    },
    "CoCoFL, with BatchNorm": {
        "model": {"name": "privacy:network_with_norms"},
        "strategy": {"name": "cocofl"},
    },
}
COMMON: dict[str, Any] = {
    "data": {"split": "iid"},
    "evaluation": {"every": 30},
    "tables": {"spans": "analytic"},
    "engine": {"kind": "cohort", "device": "cpu", "precision": "fp32"},
}


def network(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """Two layers."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
    return nn.Sequential(body, nn.Linear(32, num_classes)), torch.rand(4, 1, 8, 8)


def network_with_norms(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """Three layers, two of them followed by BatchNorm."""
    sizes = ((64, 32), (32, 32))
    hidden = (nn.Sequential(nn.Linear(*size), nn.BatchNorm1d(32), nn.ReLU()) for size in sizes)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, num_classes)), torch.rand(4, 1, 8, 8)


def noise(seeds: int) -> None:
    """Accuracy against noise, a line for each."""
    for name, settings in EXPERIMENTS.items():
        print(f"\n{name}\n\n| noise | ε at δ = 1e-5 | accuracy / % |\n| --: | --: | --: |")
        for level in NOISES:
            runs = [accuracy(settings, level, seed) for seed in range(seeds)]
            scores = [100 * score for score, _ in runs]
            spread = statistics.stdev(scores) if seeds > 1 else 0.0
            epsilon = runs[0][1]
            told = "no bound" if epsilon is None else f"{epsilon:.3g}"
            shown = f"{level:g}" if level else "off"
            print(
                f"| {shown} | {told} | {statistics.mean(scores):.1f} ± {spread:.1f} |", flush=True
            )


def accuracy(settings: Mapping[str, Any], level: float, seed: int) -> tuple[float, float | None]:
    experiment = Experiment.parse({**COMMON, **MANY, **settings, "seed": seed})
    changes = {"privacy.noise": level} if level else {"privacy.clip": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(experiment.changed(changes), out=Path(folder) / "run")
        return float(run.final.scores["accuracy"]), run.rounds[-1].epsilon


def masks(rounds: int, supernodes: int) -> None:
    """Bytes and seconds of a round, plain and secure."""
    print(
        "| | uploaded per round and device / kB | seconds per round, median |\n| --- | --: | --: |"
    )
    for secure in (False, True):
        run = deployed(rounds, supernodes, secure=secure)
        sizes = [one.bytes_up / one.count("merged") / 1000 for one in run.rounds[1:]]
        seconds = [one["train_s"] for one in run.folder.timing()[1:]]
        name = "secure aggregation" if secure else "plain"
        print(f"| {name} | {statistics.mean(sizes):.0f} | {statistics.median(seconds):.1f} |")


def deployed(rounds: int, supernodes: int, *, secure: bool) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Deployment(
            nodes=supernodes,
            folder=tempfile.mkdtemp() + "/run",
            round_s=300.0,
            secure_aggregation=secure,
        )
        config = run_config(Experiment(rounds=rounds).changed({"merge.rules": []}), settings)
        app = write_app(folder / "app", config)
        with Loopback(folder / "network") as network_:
            for number in range(supernodes):
                node = {"partition-id": number, "num-partitions": supernodes}
                network_.start_node(f"supernode{number}", node)
            await_run(network_, network_.submit(app), Path(settings.folder))
    return Run.open(settings.folder)


def stages() -> None:
    """What the protocol takes beside training, by devices and numbers."""
    print("| devices | numbers | a device's seconds | the server's | besides the numbers, kB up |")
    print("| --: | --: | --: | --: | --: |")
    for devices, size in itertools.product((4, 10, 30), (100_000, 1_000_000)):
        terms = Terms((size // 8,) * 8 + (2,))
        numbers = {block: np.ones(n, np.uint64) for block, n in enumerate(terms.sizes)}
        of_devices, of_server, size_up = play_protocol(terms, devices, numbers)
        print(
            f"| {devices} | {size} | {of_devices:.2f} | {of_server:.2f} | {size_up / 1000:.1f} |",
            flush=True,
        )


def play_protocol(
    terms: Terms, devices: int, numbers: Mapping[int, Numbers]
) -> tuple[float, float, float]:
    """A device's and the server's processor time, and the bytes that masks cost; one leaves."""
    server, begin = SecureSum(terms), time.process_time()
    kept, offers = {}, {}
    for node in range(devices):
        kept[node], offers[node] = secure_sum.offer(terms, range(len(terms.sizes)))
    offered = time.process_time()
    roster = server.enrol(offers)
    enrolled, shares = time.process_time(), {}
    for node in range(devices):
        kept[node], shares[node] = secure_sum.share(terms, kept[node], roster)
    shared = time.process_time()
    parcels = server.route(shares)
    routed, masked = time.process_time(), {}
    for node in range(1, devices):
        kept[node], masked[node] = secure_sum.mask(terms, kept[node], parcels[node], numbers)
    hidden = time.process_time()
    for node, content in masked.items():
        server.add(node, content)
    survivors = server.survivors()
    added, reveals = time.process_time(), {}
    for node in masked:
        kept[node], reveals[node] = secure_sum.reveal(terms, kept[node], survivors)
    revealed = time.process_time()
    server.open(reveals)
    opened = time.process_time()
    by_devices = (offered - begin) + (shared - enrolled) + (hidden - routed) + (revealed - added)
    by_server = (enrolled - offered) + (routed - shared) + (added - hidden) + (opened - revealed)
    besides = len(offers[1]) + len(shares[1]) + len(reveals[1])
    return by_devices / devices, by_server, besides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["noise", "masks", "stages"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--supernodes", type=int, default=4)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.what == "noise":
        noise(options.seeds)
    elif options.what == "stages":
        stages()
    else:
        masks(options.rounds, options.supernodes)


if __name__ == "__main__":
    main()
