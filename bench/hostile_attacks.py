"""Devices that lie, against the plain mean and against what a deployment merges by.

    python bench/hostile_attacks.py --data DIR

1 of 4 and 3 of 10 devices of unequal strength (the paper's groups) attack in every round, with
CoCoFL on digits and on a part of Fashion-MNIST (which lies in DIR, in COCOFL_DATA or on the Hub).
What they send is changed on its way to the server; the limits of the wire contract, which would
refuse the crudest, are not in the way. Exit code 1 if an attack costs more than 3 points of
accuracy against the same run without attackers. Seeds are fixed.

`--honest` compares both ways of merging without attackers, with three seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cocofl import data
from cocofl.config import Experiment
from cocofl.engine.executor import Answer, InProcess, RoundPlan
from cocofl.experiment import simulate
from cocofl.fl.rules import Merging
from cocofl.fl.state import Contribution, ServerState, is_scale
from cocofl.fl.trainer import Trainer
from cocofl.freeze import KernelPlan

MOST_LOST = 0.03
FRACTIONS = {"1 of 4": (1, 4), "3 of 10": (3, 10)}
COMMON: dict[str, Any] = {
    "model.name": "resnet10-digits",
    "training.batch": 16,
    "data.split": "iid",
    "engine.kernels": "reference",
    "engine.checkpoint_every": 1000,
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {
        "data.name": "digits",
        "model.options": {"tiny": True},
        "rounds": 20,
        "training.decay_rounds": [15],
    },
    "Fashion-MNIST": {
        "data.name": "hostile_attacks:fashion",
        "model.options": {"tiny": True, "image_size": 14},
        "training.batch": 32,
        "rounds": 20,
        "training.decay_rounds": [15],
    },
}


def fashion(folder: Path | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The first 3000 images to train on and 1000 to test with, at half of their size."""
    found = data.load("fashion_mnist", data_dir=folder)
    cut = {"train": (found.train, 3000), "test": (found.test, 1000)}
    return {
        name: (halved(np.array(split.inputs[:n])), np.array(split.labels[:n]))
        for name, (split, n) in cut.items()
    }


def halved(images: np.ndarray) -> np.ndarray:
    """Each pixel the mean of four."""
    count, height, width, channels = images.shape
    parts = images.reshape(count, height // 2, 2, width // 2, 2, channels)
    means: np.ndarray = parts.mean((2, 4)).round().astype(images.dtype)
    return means


# --- what attackers do ---------------------------------------------------------------------------

Attack = Callable[[Contribution, ServerState], Contribution]


def moved(factor: float) -> Attack:
    """The change times a factor."""

    def attack(sent: Contribution, state: ServerState) -> Contribution:
        old = state.tensors
        tensors = {
            key: tensor if is_scale(key) else old[key] + factor * (tensor - old[key])
            for key, tensor in sent.tensors.items()
        }
        return replace(sent, tensors=tensors)

    return attack


def set_to(value: float, chosen: Callable[[str], bool]) -> Attack:
    """All values of some tensors."""

    def attack(sent: Contribution, _state: ServerState) -> Contribution:
        tensors = {
            key: torch.full_like(tensor, value) if chosen(key) else tensor
            for key, tensor in sent.tensors.items()
        }
        return replace(sent, tensors=tensors)

    return attack


def many_samples(sent: Contribution, state: ServerState) -> Contribution:
    """The wrong way, in the name of a million samples."""
    return replace(moved(-1.0)(sent, state), samples=1_000_000)


def is_weight(key: str) -> bool:
    """Whether a tensor is a parameter."""
    return not is_scale(key) and "running_" not in key


ATTACKS: dict[str, Attack | None] = {
    "scaled ×50": moved(50.0),
    "sign-flipped ×5": moved(-5.0),
    "zeroed": set_to(0.0, is_weight),
    "label-flipped": None,  # trained so
    "absurd scales": set_to(3e38, is_scale),
    "zero variances": set_to(0.0, lambda key: key.endswith("running_var")),
    "false sample counts": many_samples,
}


class Attacked(InProcess):
    """Trains in this process; some devices send something else than they have trained."""

    def __init__(self, name: str, hostile: int) -> None:
        super().__init__()
        self._attack, self._flips = ATTACKS.get(name), name == "label-flipped"
        self._hostile = hostile

    def prepare(self, trainer: Trainer, plan: KernelPlan) -> None:
        super().prepare(trainer, plan)
        honest = trainer.spec.train
        flipped = replace(honest, labels=honest.facts.num_classes - 1 - honest.labels)
        self._misled = Trainer(replace(trainer.spec, train=flipped), plan)

    def collect(self, plan: RoundPlan, state: ServerState) -> Iterable[Answer]:
        for task in plan.tasks:
            is_hostile = task.device < self._hostile
            trainer = self._misled if is_hostile and self._flips else self._trainer
            sent = trainer.train(task, state)
            if is_hostile and self._attack is not None:
                sent = self._attack(sent, state)
            yield Answer(task.device, sent)


# --- runs ----------------------------------------------------------------------------------------


def accuracy(
    of: str, hostile: int, devices: int, attack: str, merging: Merging, folder: str, **changes: Any
) -> float:
    """Of the last model; as a share."""
    sizes = {"devices.count": devices, "devices.per_round": devices, "data.dir": folder}
    settings = COMMON | DATA[of] | sizes | changes
    experiment = replace(Experiment().changed(settings), merge=merging)
    experiment = experiment.changed({"evaluation.every": experiment.rounds})
    with tempfile.TemporaryDirectory() as out:
        run = simulate(experiment, out=out, executor=Attacked(attack, hostile))
        return float(run.final.scores["accuracy"])


PLAIN, DEPLOYED = Merging(), Merging().deployed


def attacks(only: str, folder: str, pool: Executor) -> int:
    """The table; how many attacks cost too much."""
    lines = [
        (of, fraction, attack)
        for of, fraction, attack in product(DATA, FRACTIONS, ATTACKS)
        if only in f"{of} {fraction} {attack}"
    ]
    honest = {
        (of, fraction): pool.submit(accuracy, of, 0, FRACTIONS[fraction][1], "", DEPLOYED, folder)
        for of, fraction in dict.fromkeys(line[:2] for line in lines)
    }
    asked = {
        (of, fraction, attack): [
            pool.submit(accuracy, of, *FRACTIONS[fraction], attack, merging, folder)
            for merging in (PLAIN, DEPLOYED)
        ]
        for of, fraction, attack in lines
    }
    failed = 0
    print(f"{'data':14} {'attackers':9} {'attack':20} {'plain':>6} {'default':>7} {'without':>7}")
    for (of, fraction, attack), futures in asked.items():
        without = honest[of, fraction].result()
        plain, default = (future.result() for future in futures)
        is_bad = default < without - MOST_LOST
        failed += is_bad
        cells = " ".join(f"{100 * value:7.1f}" for value in (plain, default, without))
        print(f"{of:14} {fraction:9} {attack:20}{cells}{'  !' * is_bad}", flush=True)
    return failed


def honest(folder: str, pool: Executor) -> int:
    """Without attackers: mean and standard deviation of both ways; how often one costs more."""
    failed = 0
    for of, split in product(DATA, ("iid", "rc")):
        asked = [
            [
                pool.submit(
                    accuracy, of, 0, 10, "", merging, folder, seed=s, **{"data.split": split}
                )
                for s in range(3)
            ]
            for merging in (PLAIN, DEPLOYED)
        ]
        found = [[future.result() for future in futures] for futures in asked]
        (plain, spread), (default, _) = rows = [
            (float(np.mean(values)), float(np.std(values, ddof=1))) for values in found
        ]
        is_bad = default < plain - spread
        failed += is_bad
        texts = [f"{100 * mean:5.1f} ± {100 * std:.1f}" for mean, std in rows]
        print(
            f"{of:14} {split:4} plain {texts[0]}   default {texts[1]}{'  !' * is_bad}", flush=True
        )
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="", help="the folder that Fashion-MNIST lies in")
    parser.add_argument("--only", default="", help="attacks whose line has this text")
    parser.add_argument("--honest", action="store_true", help="without attackers")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with ProcessPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        if arguments.honest:
            failed = honest(arguments.data, pool)
        else:
            failed = attacks(arguments.only, arguments.data, pool)
    print(f"{failed} too bad; {time.perf_counter() - begin:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
