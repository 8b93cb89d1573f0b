"""The nodes of a deployment: whom an operator should look at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench.report import browser, made_up_deployment

from cocofl.experiment import Run
from cocofl.report.nodes import node_histories, node_table, reason_table
from cocofl.report.runs import find_runs
from cocofl.report.writing import write_report

EVIL = '<img src=x onerror="console.error(1)"></script><script>console.error(2)</script>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three honest nodes; one whose update is huge in every third round, and is quarantined."""
    folder = tmp_path_factory.mktemp("deployed") / "run"
    made_up_deployment(folder, rounds=12, reason=f"format: {EVIL}")
    return folder


def test_the_most_conspicuous_node_comes_first(folder: Path) -> None:
    histories = node_histories(Run.open(folder))
    worst = histories[0]
    assert worst.node == 2**64 - 1
    assert (worst.outlier_rounds, worst.quarantined) == ([3, 6, 9], 10)
    assert worst.fates == {"merged": 6, "rejected": 3}
    table = node_table(histories)
    assert table.header == (
        *("node", "outlier", "norm / median", "largest", "scales ×", "samples", "loss"),
        *("merged", "rejected", "quarantined"),
    )
    first, *others = table.lines
    assert first[:2] == (str(2**64 - 1), "3")
    assert first[3] == "40"
    assert first[-1] == "round 10"
    assert {line[1] for line in others} == {"0"}
    assert reason_table(histories).lines == ((str(2**64 - 1), "3", "8", f"format: {EVIL}"),)


def test_the_page_names_who_stood_out_and_escapes_what_devices_say(folder: Path) -> None:
    page = write_report(find_runs([folder]), folder / "report.html")
    text = page.read_text()
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert f"Node {2**64 - 1}: an outlier in 3 of 6 rounds, last in round 9; quarantined" in shown
    assert "a deployment of 4 nodes" in shown
    assert "Who holds what" not in shown
    assert "<img" not in text
    assert "script>console" not in text
    driver = browser(width=390)
    if driver is None:
        pytest.skip("no chromium and chromedriver here: `make browser` installs them")
    try:
        driver.get(page.resolve().as_uri())
        column = (
            "return [...document.querySelector('#nodes tbody').rows]"
            ".map(row => row.cells[3].textContent)"
        )
        click = "document.querySelectorAll('#nodes th button')[3].click()"
        for backwards in (True, False):
            driver.execute_script(click)
            values = [float(one) for one in driver.execute_script(column)]
            assert values == sorted(values, reverse=backwards)
        sides = "return [document.documentElement.scrollWidth, window.innerWidth]"
        inner, outer = driver.execute_script(sides)
        assert inner <= outer
        assert driver.get_log("browser") == []
    finally:
        driver.quit()


def test_a_simulation_has_no_nodes(tmp_path: Path) -> None:
    made_up_deployment(tmp_path / "run", rounds=3, reason="")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for key in ("figures", "reasons", "quarantined"):
            line.pop(key, None)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not Run.open(tmp_path / "run").is_deployed
