"""Windows of a motion sensor, people as devices: what a wearable records is learned where it is.

python examples/sensor_windows.py

Shaped like UCI HAR: 128 samples at 50 Hz of an accelerometer (3 axes) and a gyroscope (3 axes), and
the activity. Made here with a fixed seed: nobody was recorded.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cocofl import Experiment, simulate

# How strongly one moves, and along which axis gravity pulls.
ACTIVITIES = {"lying": (0, 2), "standing": (0, 0), "stairs": (1, 1), "walking": (1, 0)}
TIME_S = np.arange(128) / 50


def windows(_folder: Path | None, people: int = 30, each: int = 24) -> dict[str, Any]:
    """Everybody has a pace of their own, and wears the sensor a little differently."""
    rng, person = np.random.default_rng(0), np.repeat(np.arange(people), each)
    activity = rng.choice(list(ACTIVITIES), len(person))
    strength, axis = np.array([ACTIVITIES[name] for name in activity]).T
    pace_hz, tilt = rng.normal(1.8, 0.2, (people, 1)), rng.normal(0, 0.5, (people, 6, 1))
    swing = np.sin(2 * np.pi * pace_hz[person] * TIME_S) * strength[:, None]
    found = rng.normal(0, 0.2, (len(person), 6, 128)) + tilt[person] + swing[:, None]
    found[np.arange(len(found)), axis] += 9.81
    seen = person < people * 3 // 4  # the others are met in the test only
    train = found[seen], activity[seen], person[seen]
    return {"train": train, "test": (found[~seen], activity[~seen])}


def network(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """Three convolutions over time."""
    sizes = ((6, 16), (16, 32), (32, 32))
    body = [nn.Sequential(nn.Conv1d(a, b, 5, 2, 2), nn.BatchNorm1d(b), nn.ReLU()) for a, b in sizes]
    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, num_classes))
    return nn.Sequential(*body, *head), torch.zeros(16, 6, 128)


if __name__ == "__main__":
    settings = {
        "model.name": "sensor_windows:network",
        "data": {"name": "sensor_windows:windows", "split": "natural"},
        "devices": {"count": 22, "per_round": 10},
        "training": {"batch": 8, "epochs": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(Experiment(rounds=12).changed(settings), out=Path(folder) / "sensor")
        print(f"accuracy {run.final.scores['accuracy']:.1%} on people who were never seen")
        names, shares = run.folder.about["class_names"], run.final.scores["class_accuracy"]
        for name, share in zip(names, shares, strict=True):
            print(f"  {name:8} {share:.0%}")
