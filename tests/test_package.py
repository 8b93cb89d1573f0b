"""A wheel and an sdist build, hold what is needed, and run where nothing else of ours is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import cocofl

ROOT = Path(__file__).parent.parent


def test_the_changelog_begins_with_this_version() -> None:
    releases = [
        line.removeprefix("## ")
        for line in (ROOT / "CHANGELOG.md").read_text().splitlines()
        if line.startswith("## ")
    ]
    assert releases[0] == cocofl.__version__
    assert releases == sorted(releases, reverse=True)


def test_every_extra_is_described() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/start/install.md").read_text()
    for name in set(extras["optional-dependencies"]) - {"docs"}:
        assert f"`{name}`" in page, f"say in docs/start/install.md what the extra {name} is for"


@pytest.mark.slow
def test_a_wheel_is_complete_and_runs_by_itself(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "."]
    subprocess.run([*made, str(ROOT)], cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"cocofl-{cocofl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        file.extractall(tmp_path / "installed")
    for needed in (
        "cocofl/py.typed",
        "cocofl/report/page/report.html",
        "cocofl/report/page/fits.js",
        "cocofl/report/page/live.css",
        "cocofl/profiling/tables/epyc-mobilenet+qff.json",
        "cocofl/experiments/paper/published.csv",
    ):
        assert needed in names
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cocofl", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"cocofl {cocofl.__version__}\n"


@pytest.mark.slow
def test_an_sdist_has_tests_docs_and_tools(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="build is not installed: pip install build")
    words = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for needed in ("tests/test_package.py", "docs/index.md", "tools/reference.py", "README.md"):
        assert needed in names
    assert any(name.startswith("notebooks/") for name in names)
