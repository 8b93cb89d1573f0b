"""What the documentation says works: its Python runs, and so do its commands.

A command that takes longer than 20 s has a comment above it, ``<!-- shorter: … -->``, that says
what `make test-docs` runs in its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LENGTHY = {
    "bring-your-own-model.md",
    "data-sets.md",
    "data.md",
    "extend.md",
    "index.md",
    "profiling.md",
    "reports.md",
    "simulation.md",
    "strategies.md",
    "technique.md",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = re.compile(r"^<!-- shorter:\n?(.*?)-->\n\n```sh\n.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages, as a reader has: int8 kernels are chosen once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Callable[[str, str], None]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COCOFL_CACHE": str(cache),
        "COCOFL_DATA": "",
    }

    def call(language: str, code: str) -> None:
        # A snippet that begins with a file's name is that file.
        named = re.match(r"# (\S+\.py)\n", code)
        script = tmp_path / (named[1] if named else "snippet.py")
        if language == "python":
            script.write_text(code)
        command = [sys.executable, str(script)] if language == "python" else ["bash", "-ec", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stderr}"

    return call


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and code of what runs as it stands."""
    found: list[tuple[str, str]] = BLOCK.findall(LONG.sub("", page.read_text()))
    return found


def shorter_commands(page: Path) -> list[str]:
    found: list[str] = LONG.findall(page.read_text())
    return found


def by_time(pages: Iterable[Path]) -> list[Any]:
    """Pages that take 10 s and more, and whose commands other tests run as well, are slow ones."""
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in LENGTHY else [])
        for page in pages
    ]


@pytest.mark.parametrize("page", by_time(filter(blocks, PAGES)))
def test_the_snippets_of_a_page_run_in_order(page: Path, run: Callable[[str, str], None]) -> None:
    for language, code in blocks(page):
        run(language, code)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(shorter_commands, PAGES)], ids=lambda page: page.name)
def test_long_commands_run_at_reduced_size(page: Path, run: Callable[[str, str], None]) -> None:
    # Files that the page makes are there for its long commands, too.
    for code in re.findall(r"^```python\n(# \S+\.py\n.*?)^```$", page.read_text(), re.M | re.S):
        run("python", code)
    for shorter in shorter_commands(page):
        run("sh", shorter)


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f" {page.name}\n" in contents, f"add {page.name} to nav in mkdocs.yml"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # Not --quiet: warnings that are not printed do not count.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        built = tmp_path / "site" / ("" if page.stem == "index" else page.stem) / "index.html"
        for heading, mark in (("h2", "## "), ("h3", "### ")):
            shown = len(re.findall(rf"<{heading} id=", built.read_text()))
            written = sum(line.startswith(mark) for line in prose.splitlines())
            assert shown >= written, f"{page.name} is not shown whole"
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    assert 'id="cocofl.experiment.simulate"' in reference
    assert 'class="gp">&gt;&gt;&gt; ' in reference, "doctests are not shown as code"
