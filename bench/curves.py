"""Draw the accuracy of whole cohort runs over their rounds.

    python bench/curves.py docs/images/cohort-curves.png

It reads what was kept of runs on a GPU, ``bench/results/cohort-mobilenet-*.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for path in sorted(RESULTS.glob("cohort-mobilenet-*.json")):
        run = json.loads(path.read_text())
        rounds, accuracies = zip(*run["curve"], strict=True)
        label = f"{run['strategy']}, {run['precision']}: {accuracies[-1]:.1%}"
        axes.plot(rounds, [100 * accuracy for accuracy in accuracies], label=label, linewidth=1.2)
    axes.set(xlabel="round", ylabel="accuracy / %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
