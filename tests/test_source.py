from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cocofl
from cocofl.cli import main

SOURCE = Path(cocofl.__file__).parents[1]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"cocofl {cocofl.__version__}\n"
    assert cocofl.__version__[0].isdigit()


def test_a_source_tree_serves_where_nothing_is_installed(tmp_path: Path) -> None:
    """As on a machine that has our dependencies and a copy of the source, not installed."""
    script = f"""
import importlib.metadata as metadata, runpy, sys
real = metadata.Distribution.from_name.__func__

def but_ours(cls, name):
    if name == "cocofl":
        raise metadata.PackageNotFoundError(name)
    return real(cls, name)

metadata.Distribution.from_name = classmethod(but_ours)
sys.path[:] = [{str(SOURCE)!r}, *(path for path in sys.path if path != {str(SOURCE)!r})]
sys.argv[1:] = ["doctor", "--json"]
runpy.run_module("cocofl", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert f'"found": "{cocofl.__version__}"' in done.stdout
