"""Which version of the source a result was made with."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

VERSION = "0.2.0"
"""Of the package, installed or not; the build reads it here."""
COMMIT_VARIABLE = "COCOFL_COMMIT"
"""Says the commit where the source was copied without its history."""


@cache
def source_commit() -> str:
    """The commit of the source tree, ``+`` behind it where files were changed; "" if unknown."""
    told, root = os.environ.get(COMMIT_VARIABLE, ""), Path(__file__).parents[2]
    if told or not (root / ".git").exists():
        return told
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    return f"{commit}+" if _git(root, "status", "--porcelain", "src", "experiments") else commit


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
