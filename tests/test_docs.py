"""What the documentation says works: its Python runs, its commands run, its links lead somewhere.

A command that takes longer than 20 s has a comment above it, ``<!-- shorter: … -->``, that says
what `make test-docs` runs in its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tools.reference import GENERATED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LENGTHY = {
    "guides/bring-your-own-model.md",
    "guides/compare.md",
    "guides/data-examples.md",
    "guides/extend.md",
    "guides/extend-kernels.md",
    "guides/extend-parts.md",
    "guides/reproduction.md",
    "guides/profiling.md",
    "guides/reports.md",
    "guides/simulation.md",
    "guides/technique.md",
    "reference/data-sets.md",
    "reference/strategies.md",
}
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = re.compile(r"^<!-- shorter:\n?(.*?)-->\n\n```sh\n.*?^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
MOST_WORDS = 900
OWN_WORDS = {
    "span": r"spans?",
    "variant": r"variants?",
    "cohort": r"cohorts?",
    "run-folder": r"run\s+folders?",
    "profile-table": r"profile\s+tables?",
}
COMMIT = re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,10}\b")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT if page.parent == ROOT else DOCS))


def prose(page: Path) -> str:
    """A page without its code and comments."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return COMMENT.sub("", text)


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
    """Pages that take 10 s and more, and whose commands other tests run as well, are slow ones.

    Those of *start* never are: they are the first that anybody tries.
    """
    slow = [pytest.mark.slow]
    return [
        pytest.param(page, id=name_of(page), marks=slow if name_of(page) in LENGTHY else [])
        for page in pages
    ]


# --- what stands there works ---------------------------------------------------------------------


@pytest.mark.parametrize("page", by_time(filter(blocks, PAGES)))
def test_the_snippets_of_a_page_run_in_order(page: Path, run: Callable[[str, str], None]) -> None:
    for language, code in blocks(page):
        run(language, code)


def of_start_first(pages: Iterable[Path]) -> list[Any]:
    return [
        pytest.param(
            page,
            id=name_of(page),
            marks=[] if page.parent.name == "start" else [pytest.mark.slow],
        )
        for page in pages
    ]


@pytest.mark.parametrize("page", of_start_first(filter(shorter_commands, PAGES)))
def test_long_commands_run_at_reduced_size(page: Path, run: Callable[[str, str], None]) -> None:
    # Files that the page makes are there for its long commands, too.
    for code in re.findall(r"^```python\n(# \S+\.py\n.*?)^```$", page.read_text(), re.M | re.S):
        run("python", code)
    for shorter in shorter_commands(page):
        run("sh", shorter)


@pytest.mark.parametrize("page", GENERATED)
def test_the_reference_says_what_the_code_says(page: str) -> None:
    there = (DOCS / "reference" / page).read_text(encoding="utf-8")
    assert there == GENERATED[page](), f"run `python tools/reference.py`: {page} is out of date"


# --- the four parts ------------------------------------------------------------------------------


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        name = name_of(page)
        assert re.search(rf"[ :] {name}$", contents, re.M), f"add {name} to nav in mkdocs.yml"


def test_pages_lie_in_the_four_parts() -> None:
    parts = {page.parent.name for page in DOCS.rglob("*.md")} - {"docs"}
    assert parts == {"start", "guides", "reference", "notebook"}


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=name_of)
def test_a_guide_is_short_and_has_no_history(page: Path) -> None:
    assert len(COMMENT.sub("", page.read_text()).split()) <= MOST_WORDS, "its code included"
    text = prose(page)
    assert not COMMIT.findall(text), "a commit belongs into the notebook"
    for word in ("AMD EPYC", "H200", "torch 2."):
        assert word not in text, f"{word}: measurements belong into the notebook"


@pytest.mark.parametrize(
    "page",
    [page for page in sorted((DOCS / "notebook").glob("*.md")) if page.name != "index.md"],
    ids=name_of,
)
def test_entries_of_the_notebook_are_dated_newest_first(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", prose(page), re.M)
    assert headings
    dates = []
    for heading in headings:
        date, colon, _ = heading.partition(": ")
        assert colon, f"{heading}: begin with the date, as in '18 November 2026: Speed'"
        dates.append(datetime.strptime(date, "%d %B %Y"))
    assert dates == sorted(dates, reverse=True)
    assert COMMIT.search(page.read_text()), "say the commit"


def test_the_notebook_s_index_has_every_page_and_its_latest_entry() -> None:
    index = (DOCS / "notebook/index.md").read_text()
    for page in (DOCS / "notebook").glob("*.md"):
        if page.name != "index.md":
            (latest, *_) = re.findall(r"^## (.*?): ", prose(page), re.M)
            assert re.search(rf"^\| \[.*\]\({page.name}\) \|.*\| {latest} \|$", index, re.M), (
                f"{page.name}: {latest}"
            )


@pytest.mark.parametrize(
    "page", [*sorted((DOCS / "guides").glob("*.md")), *(DOCS / "start").glob("*.md")], ids=name_of
)
def test_words_of_our_own_are_linked_to_the_glossary(page: Path) -> None:
    defined = re.findall(r"^## (.*)$", (DOCS / "reference/glossary.md").read_text(), re.M)
    # What is in code, in a heading or the text of a link needs no explanation there.
    plain = re.sub(r"`[^`]*`|^#[^\n]*$|\[[^\]]*\]\([^)]*\)", "", prose(page), flags=re.M)
    for word, pattern in OWN_WORDS.items():
        assert word.replace("-", " ") in defined
        if re.search(rf"(?i)(?<![\w-]){pattern}(?![\w-])", plain):
            assert f"glossary.md#{word})" in page.read_text(), f"link {word} where it comes first"


# --- links and the site --------------------------------------------------------------------------


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose(page)):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


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
    for page in DOCS.rglob("*.md"):
        own = page.relative_to(DOCS).with_suffix("")
        place = own.parent if own.name == "index" else own
        built = (tmp_path / "site" / place / "index.html").read_text()
        for heading, mark in (("h2", "## "), ("h3", "### ")):
            shown = len(re.findall(rf"<{heading} id=", built))
            written = sum(line.startswith(mark) for line in prose(page).splitlines())
            assert shown >= written, f"{name_of(page)} is not shown whole"
        for target in re.findall(r'<a[^>]* href="(?!\w+:|#|/)([^"#]+)', built):
            assert (tmp_path / "site" / place / unquote(target)).exists(), f"{own}: {target}"
    assert "analytic:pi5/mobilenet" in (tmp_path / "site/what-fits.html").read_text()
    reference = (tmp_path / "site/reference/api/index.html").read_text()
    assert 'id="cocofl.experiment.simulate"' in reference
    assert 'class="gp">&gt;&gt;&gt; ' in reference, "doctests are not shown as code"
