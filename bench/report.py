"""How large the report of a long comparison is, how long it takes to make and to open.

python bench/report.py [--rounds 1000] [--seeds 3] [--out FOLDER]
python bench/report.py --long 100000 --against OTHER/src

Makes run folders as `cocofl compare` does, with made-up numbers (nothing is trained), reports
them, and opens the page in headless Chromium if it is there. A folder that exists is reported as
it is. --long reports one run of so many rounds, each time in a fresh process, this tree's and
another's in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from cocofl.config import Experiment
from cocofl.fl.strategies import STRATEGIES
from cocofl.report.figures import save_figures
from cocofl.report.runs import find_runs
from cocofl.report.writing import write_report

FINAL = {
    "cocofl": (0.82, 0.78, 0.75),
    "heterofl": (0.88, 0.55, 0.30),
    "fjord": (0.87, 0.52, 0.28),
    "fedavg": (0.92, 0.30, 0.12),
    "fedavg-full": (0.85, 0.83, 0.84),
    "centralized": (0.90, 0.89, 0.90),
}
GROUPS = ("strong", "medium", "weak")
BLOCKS = 10


def made_up_run(folder: Path, strategy: str, split: str, seed: int, rounds: int) -> None:
    """A complete run folder with curves as they look."""
    experiment = Experiment().changed(
        {"data.split": split, "rounds": rounds, "seed": seed, "evaluation.every": 1}
    )
    experiment = experiment.with_strategy(strategy)
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    rng = np.random.default_rng([seed, len(strategy), len(split)])
    goal = np.array(FINAL.get(strategy, (0.7, 0.6, 0.5)))
    if split == "iid":
        goal = np.full(3, goal.mean() + 0.05)
    length = rounds // 10 if strategy == "centralized" else rounds
    lines = []
    for number in range(1, length + 1):
        grown = 1 - np.exp(-5 * number / length)
        groups = np.clip(goal * grown + rng.normal(0, 0.015, 3), 0, 1)
        lines.append(
            json.dumps(
                {
                    "round": number,
                    "lr": 0.1,
                    "simulated_s": 0.0161 + float(rng.uniform(0, 0.001)),
                    "bytes_up": int(rng.integers(2_000_000, 3_000_000)),
                    "loss": float(2.3 * (1 - grown) + 0.1),
                    "merged": 9,
                    "late": 0,
                    "lost": 1,
                    "rejected": 0,
                    "infeasible": 0,
                    "devices": [
                        _device(rng, strategy, "lost" if i == 9 else "merged") for i in range(10)
                    ],
                    "accuracy": round(float(groups.mean()), 6),
                    "f1": round(float(groups.mean()) * 0.98, 6),
                    "class_accuracy": [round(float(groups.mean()), 6)] * 10,
                    "group_accuracy": dict(
                        zip(GROUPS, [round(float(g), 6) for g in groups], strict=True)
                    ),
                    "device_accuracy": {
                        "min": round(float(groups.min()) * 0.8, 6),
                        "p10": 0.4,
                        "median": 0.6,
                        "p90": 0.8,
                        "max": 0.9,
                    },
                }
            )
        )
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "timing.jsonl").write_text("")
    (folder / "model.safetensors").write_bytes(b"")  # its being there says: complete
    about = {
        "command": "cocofl compare --seeds 3",
        "cocofl": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "hardware": "made up",
        "strategy": strategy,
        "tables": {"qff": "made up: nothing was measured"},
        "model_blocks": BLOCKS,
    }
    (folder / "about.json").write_text(json.dumps(about))


def made_up_deployment(folder: Path, rounds: int, reason: str) -> None:
    """A run of four nodes, of which the last is an outlier, then refused, then quarantined."""
    made_up_run(folder, "cocofl", "rc", 0, rounds)
    rng, nodes = np.random.default_rng(0), [11, 12, 2**40, 2**64 - 1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        number = line["round"]
        held = number > 9
        is_far, is_refused = number % 3 == 0, number % 3 == 2
        fates = dict.fromkeys(nodes[: 3 if held else 4], "merged")
        fates |= {nodes[3]: "rejected"} if is_refused and not held else {}
        line["devices"] = [[node, "", f"0:{BLOCKS}", fate] for node, fate in fates.items()]
        line["figures"] = [
            [node, 400, round(float(rng.uniform(0.4, 0.6)), 4), 1.5, ratio, 1.1, ratio > 20]
            for node, fate in fates.items()
            if fate == "merged"
            for ratio in [40.0 if node == nodes[3] and is_far else float(rng.uniform(0.5, 2))]
        ]
        line["reasons"] = [[node, reason] for node, fate in fates.items() if fate == "rejected"]
        if held:
            line["quarantined"] = [nodes[3]]
        for fate in ("merged", "rejected", "lost"):
            line[fate] = list(fates.values()).count(fate)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _device(rng: np.random.Generator, strategy: str, fate: str) -> list[object]:
    group = int(rng.integers(3))
    if strategy == "centralized":
        return [0, "all", f"0:{BLOCKS}", fate]
    if strategy in ("heterofl", "fjord"):
        return [int(rng.integers(30)), GROUPS[group], ("1", "0.6", "0.4")[group], fate]
    if strategy == "cocofl":
        length = (BLOCKS, 6, 3)[group]
        start = int(rng.integers(BLOCKS - length + 1))
        return [int(rng.integers(30)), GROUPS[group], f"{start}:{start + length}", fate]
    if strategy == "fedavg":
        group = 0
    return [int(rng.integers(30)), GROUPS[group], f"0:{BLOCKS}", fate]


def made_up_comparison(folder: Path, rounds: int, seeds: int) -> None:
    """All strategies and seeds on two splits, and a run of tuning that is no result."""
    for split in ("rc", "iid"):
        for strategy in STRATEGIES:
            for seed in range(seeds):
                made_up_run(
                    folder / split / strategy / f"seed{seed}", strategy, split, seed, rounds
                )
    made_up_run(folder / "rc" / "tuning" / "cocofl-lr0.1", "cocofl", "rc", 1_000_003, 5)


def browser(*, dark: bool = False, width: int = 1280, height: int = 900) -> Any:
    """A headless Chromium that keeps what pages say and request; None where there is none."""
    from selenium import webdriver  # noqa: PLC0415
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # Without a sandbox, as root in a container has none; the page is our own file.
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    scheme = "dark" if dark else "light"
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return found


def open_in_browser(page: Path) -> dict[str, int]:
    """Milliseconds until the page was loaded, and until the charts in view were drawn."""
    # A window as high as two and a half screens: the charts behind the summary are in view.
    driver = browser(height=2400)
    if driver is None:
        return {}
    driver.set_script_timeout(120)
    try:
        driver.get(page.resolve().as_uri())
        drawn = driver.execute_async_script(
            "const done = arguments[0];"
            "const look = () => document.querySelectorAll('.main-svg').length >= 3"
            " ? done(performance.now()) : setTimeout(look, 20); look();"
        )
        loaded = driver.execute_script(
            "return performance.getEntriesByType('navigation')[0].loadEventEnd"
        )
        return {"loaded_ms": round(loaded), "first_charts_drawn_ms": round(drawn)}
    finally:
        driver.quit()


LONG = """
import sys, time
from pathlib import Path
from cocofl.report import writing
from cocofl.report.runs import find_runs
class Nowhere(writing.Sources):
    # What data and tables cost does not depend on rounds.
    def holdings(self): raise writing.CocoflError("left out")
    def tables(self): raise writing.CocoflError("left out")
writing.Sources = Nowhere
def memory(name):  # not getrusage's, which begins with the peak of the parent
    return int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])
begin, before = time.process_time(), memory("VmRSS:")
writing.write_report(find_runs([Path(sys.argv[1])]), Path(sys.argv[2]))
peak = memory("VmHWM:")
print(time.process_time() - begin, (peak - before) / 1e3, peak / 1e3)
"""


def long_run(rounds: int, against: Path | None, repeats: int = 3) -> None:
    """What the report of one long run takes, here and in another tree."""
    here = Path(__file__).parents[1] / "src"
    trees = {"here": here} | ({"against": against.resolve()} if against else {})
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as temporary:
        folder, page = Path(temporary) / "runs", Path(temporary) / "page.html"
        made_up_run(folder / "cocofl", "cocofl", "rc", 0, rounds)
        for _ in range(repeats):
            for name, source in trees.items():
                environment = {**os.environ, "PYTHONPATH": str(source)}
                words = [sys.executable, "-c", LONG, str(folder), str(page)]
                done = subprocess.run(words, env=environment, capture_output=True, check=True)
                found[name].append([float(word) for word in done.stdout.split()])
    medians = {name: np.median(measured, axis=0) for name, measured in found.items()}
    for name, (seconds, grown, peak) in medians.items():
        print(f"{name}: {seconds:.1f} s of CPU, {grown:.0f} MB above {peak - grown:.0f} MB")
    if against:
        ratios = medians["here"] / medians["against"]
        print(f"ratio: time {ratios[0]:.2f}, memory {ratios[1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the folder and the page")
    parser.add_argument("--long", type=int, help="rounds of a single run")
    parser.add_argument("--against", type=Path, help="src of another tree to compare --long with")
    arguments = parser.parse_args()
    if arguments.long:
        long_run(arguments.long, arguments.against)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary) / "comparison"
        if not folder.exists():
            made_up_comparison(folder, arguments.rounds, arguments.seeds)
        begin = time.perf_counter()
        page = write_report(find_runs([folder]), folder / "report.html")
        print(f"page: {page.stat().st_size / 1e6:.2f} MB, {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
        written = save_figures(find_runs([folder]), folder / "figures")
        print(f"figures: {len(written)} files, {time.perf_counter() - begin:.1f} s")
        opened = [open_in_browser(page) for _ in range(3)]
        print(f"in Chromium: {opened if opened[0] else 'not here; make browser installs it'}")


if __name__ == "__main__":
    main()
