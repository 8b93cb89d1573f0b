"""Devices of your own: what each may spend in each round, from a trace.

python examples/custom_trace.py

A trace is a CSV file with the columns device, round, time, memory, upload. A row holds until the
device's next one; an empty cell is no limit. Here phones charge at night and are busy by day.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from cocofl import Experiment, simulate

DEVICES, ROUNDS = 9, 4


def write_trace(path: Path) -> None:
    """Each phone is strong in every other round, and has a third of the time in between."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["device", "round", "time", "memory", "upload"])
        for device in range(DEVICES):
            for number in range(ROUNDS):
                at_night = (device + number) % 2 == 0
                rows.writerow([device, number, 1.0 if at_night else 0.33, "0.8", ""])


def main() -> None:
    """Play it, and see that the spans follow the trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "phones.csv"
        write_trace(trace)
        experiment = Experiment(rounds=ROUNDS).changed(
            {
                "devices.count": DEVICES,
                "devices.per_round": 3,
                "devices.groups": [{"name": "phones", "trace": str(trace)}],
                "data.split": "iid",
                "engine.workers": 1,
            }
        )
        run = simulate(experiment, out=Path(folder) / "run")
        for record in run.rounds:
            for device, _, span, _ in record.devices:
                when = "night" if (device + record.round - 1) % 2 == 0 else "day"
                print(f"round {record.round}: phone {device} ({when}) trains blocks {span}")


if __name__ == "__main__":
    main()
