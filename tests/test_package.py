"""A wheel and an sdist build, hold what is needed, and run where nothing else of ours is."""

from __future__ import annotations

import os
import re
import shutil
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
def test_what_the_install_page_says_works_in_a_clean_environment(tmp_path: Path) -> None:
    """Its commands one after the other, then the quick start; `make test-install PYTHON=…`."""
    tree = tmp_path / "tree"
    tree.mkdir()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for name in ("pyproject.toml", *settings["targets"]["sdist"]["include"]):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    python = os.environ.get("PYTHON", sys.executable)
    subprocess.run([python, "-m", "venv", str(tmp_path / "clean")], check=True)
    unset = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    programs = f"{tmp_path / 'clean/bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**unset, "PATH": programs, "COCOFL_CACHE": str(tmp_path / "cache")}

    def run(command: str) -> str:
        words = ["bash", "-ec", command]
        done = subprocess.run(
            words, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    commands = re.findall(r"^\$ (.*)$", (ROOT / "docs/start/install.md").read_text(), re.M)
    assert "pip install '.[report]'" in commands
    for command in commands:
        # `make demo` is the quick start below; PyTorch's index is not for everyone to reach.
        if command != "make demo" and "download.pytorch.org" not in command:
            run(command.replace("/path/to/", f"{tree}/"))
    assert run("cd / && cocofl --version") == f"cocofl {cocofl.__version__}\n"
    run("cd .. && cocofl run --set rounds=2 && test -s runs/quickstart/report.html")
    run("pip install build && python -m build --sdist --outdir ../sdist .")
    (archive,) = (tmp_path / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for needed in ("tests/test_package.py", "docs/index.md", "tools/reference.py", "README.md"):
        assert needed in names
    assert any(name.startswith("notebooks/") for name in names)
    run(f"pip install --no-deps --force-reinstall {archive} && cd / && cocofl --version")
