"""`cocofl` as a function: its words, and what came of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

COCOFL = Path(sys.executable).with_name("cocofl")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


def in_a_process(*words: str, cwd: Path) -> Done:
    """As a person runs it."""
    done = subprocess.run(
        [COCOFL, *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)
