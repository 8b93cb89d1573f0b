"""The examples run as their first lines say, and stay short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# All but the one that most people begin with take long, or show what other tests try.
LONG = ("custom_strategy.py", "custom_trace.py", "fine_tune.py", "one_device.py")
LONG = (*LONG, "sensor_windows.py")
SLOW = dict.fromkeys(LONG, pytest.mark.slow)
EXAMPLES = [
    pytest.param(path, marks=SLOW.get(path.name, ()), id=path.name)
    for path in sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: Path, tmp_path: Path, cache: Path) -> None:
    lines = example.read_text().splitlines()
    assert len(lines) < 60
    assert lines[2] == f"python examples/{example.name}"
    environment = {**os.environ, "COCOFL_CACHE": str(cache), "COCOFL_DATA": ""}
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
