"""The front door: the README is short and says what the results say; ten questions and their way.

A newcomer begins with the README. Each question is answered within two clicks, a link of the README
and a heading of that page, and within 200 words from there.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Answer(NamedTuple):
    """Where a question is answered: page, heading ("" for its beginning), words of the answer."""

    page: str
    heading: str
    words: tuple[str, ...]


QUESTIONS = {
    "How do I use my model?": Answer(
        "guides/bring-your-own-model.md", "", ("name it as `module:function`", "--set model.name=")
    ),
    "How do I use my data?": Answer(
        "guides/data.md", "Your own data", ("`package.module:function`", "(inputs, labels)")
    ),
    "How do I say my devices' limits?": Answer(
        "guides/profiling.md", "Groups of devices", ('"share"', '"upload"', '"time"')
    ),
    "What does it cost on my device?": Answer(
        "guides/profiling.md", "Make a table", ("`cocofl profile mobilenet --fast`",)
    ),
    "How do I add a method?": Answer(
        "guides/extend.md", "A strategy: a capped pull", ("plans what a device does", "Strategy(")
    ),
    "Where are my results?": Answer(
        "guides/simulation.md", "The run folder", ("report.html", "metrics.jsonl", "model.safe")
    ),
    "How do I resume?": Answer("guides/simulation.md", "Resume", ("--resume", "interruption")),
    "How do I deploy?": Answer(
        "guides/deployment.md", "A first try on one machine", ("cocofl flower up",)
    ),
    "How sure are the numbers?": Answer(
        "guides/compare.md", "How sure are the numbers", ("standard deviation over seeds",)
    ),
    "What does it not do?": Answer(
        "guides/faq.md", "What does it not do?", ("no single layers", "synchronous")
    ),
}


LAST = "What does it not do?"  # is answered in the FAQ itself


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_finds_the_answer(question: str) -> None:
    page, heading, words = QUESTIONS[question]
    assert f"](docs/{page})" in README, "the first click"
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    if heading:
        _, found, text = text.partition(f"\n## {heading}\n")
        assert found, "the second click: a heading in the page's contents"
    near = " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split()[:200])
    for word in words:
        assert word in near


def test_the_faq_begins_with_these_questions() -> None:
    text = (ROOT / "docs/guides/faq.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*\?) \| \[(.*)\]\((.*?)(?:#.*)?\) \|$", text, re.M)
    assert rows == [
        (question, one.heading or "Bring your own model", one.page.removeprefix("guides/"))
        for question, one in (QUESTIONS | {LAST: QUESTIONS[LAST]._replace(page="")}).items()
    ]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90
    assert "make demo" in README
    assert "make test" in README
    assert not re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,10}\b", README), "no commits"


def rows(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def spread(row: str, strategy: str, column: str) -> str:
    return mean_and_spread(
        line[column]
        for line in rows("results/table2.csv")
        if (line["row"], line["strategy"], line["statistics"]) == (row, strategy, "running")
    )


def mean_and_spread(accuracies: Iterable[str]) -> str:
    found = [100 * float(accuracy) for accuracy in accuracies]
    deviation = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.1f}{deviation}"


def published(row: str, strategy: str) -> str:
    (line,) = (
        one
        for one in rows("experiments/paper/published.csv")
        if (one["row"], one["strategy"], one["value"]) == (row, strategy, "accuracy")
    )
    return f"{line['mean']} ± {line['std']}"


@pytest.mark.parametrize("strategy", ["cocofl", "heterofl", "fjord", "fedavg", "fedavg-full"])
def test_the_table_of_results_is_that_of_the_runs(strategy: str) -> None:
    rc, iid = "mobilenet-cifar10-rc", "mobilenet-cifar10-iid"
    wanted = [
        spread(rc, strategy, "accuracy"),
        published(rc, strategy),
        spread(rc, strategy, "weak"),
        spread(iid, strategy, "accuracy"),
        published(iid, strategy),
    ]
    assert cells_of(strategy) == wanted


def cells_of(strategy: str) -> list[str]:
    (line,) = re.findall(rf"^\| \**{re.escape(strategy)}\** .*\|$", README, re.M)
    return [cell.strip(" *") for cell in line.split("|")[2:-1]]


def test_what_our_own_variant_reaches_is_that_of_its_runs() -> None:
    """It was tested with the mean over rounds, and has no figures in the paper."""

    def found(row: str, column: str) -> str:
        played = ("strategy.head=true evaluation.every=20", "1000")
        return mean_and_spread(
            line[column]
            for line in rows("bench/results/rc-trials.csv")
            if (line["settings"], line["rounds"]) == played and line["row"] == row
        )

    rc, iid = "mobilenet-cifar10-rc", "mobilenet-cifar10-iid"
    wanted = [found(rc, "end_averaged"), "", found(rc, "weak_averaged"), found(iid, "end_averaged")]
    assert cells_of("cocofl+") == [*wanted, ""]
