from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cocofl
from cocofl.source import source_version

SOURCE = Path(cocofl.__file__).parents[1]


def test_an_installed_version_is_told() -> None:
    assert source_version()[0].isdigit()


def test_a_source_tree_serves_where_nothing_is_installed(tmp_path: Path) -> None:
    """As on a machine that has torch and a copy of the source, and nothing of ours beside it."""
    script = f"""
import sys
sys.path[:] = [path for path in sys.path if path != {str(SOURCE)!r}]
import importlib.metadata as metadata
metadata.MetadataPathFinder.find_distributions = classmethod(lambda *_: iter(()))
sys.path.insert(0, {str(SOURCE)!r})
from cocofl.source import source_version
print(source_version())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "not installed\n"
