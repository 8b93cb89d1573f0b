"""The page: complete in one file, whatever names its runs bring, and as it opens in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench.report import browser, made_up_run
from PIL import Image

from cocofl.experiment.tables import ExperimentTables
from cocofl.report.figures import save_figures
from cocofl.report.runs import find_runs
from cocofl.report.writing import write_report

EVIL = '<img src=x onerror="console.error(1)"></script><script>console.error(2)</script>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for strategy in ("cocofl", "heterofl", "fedavg-full"):
        for seed in (0, 1):
            path = folder / strategy / f"seed{seed}"
            made_up_run(path, strategy, "rc", seed, rounds=30)
    for file in folder.rglob("experiment.toml"):
        file.write_text(
            file.read_text().replace('name = "quickstart"', f"name = {json.dumps(EVIL)}")
        )
    for file in folder.rglob("metrics.jsonl"):
        file.write_text(file.read_text().replace('"weak"', json.dumps(EVIL)))
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Path:
    return write_report(find_runs([folder]), folder / "report.html")


def test_the_page_says_everything_and_escapes_names(page):
    assert page.name == "report.html"
    text = page.read_text()
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for words in (
        "heterofl", "made up: nothing was measured", "cocofl compare --seeds 3", "weight_decay",
        "Who holds what", "Accuracy over uploaded bytes", "resnet10-digits: time and upload",
    ):  # fmt: skip
        assert words in shown
    assert "<img" not in text
    assert "script>console" not in text
    assert len(text) < 6e6


def test_a_run_whose_data_is_not_here_is_reported_without_it(tmp_path, monkeypatch):
    monkeypatch.delenv("COCOFL_DATA", raising=False)
    monkeypatch.setenv("COCOFL_CACHE", str(tmp_path / "cache"))
    made_up_run(tmp_path / "run", "cocofl", "rc", 0, rounds=3)
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace('name = "digits"', 'name = "cifar100"'))
    (tmp_path / "run" / "model.safetensors").unlink()
    text = write_report(find_runs([tmp_path / "run"]), tmp_path / "new" / "page.html").read_text()
    assert "Not shown: the data set cifar100 is not on this machine" in text
    assert "Not complete:" in text


def charts_of(page):
    found = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(found[1])


def test_a_short_run_of_one_seed_shows_its_points_and_no_deviation(tmp_path):
    made_up_run(tmp_path / "run", "cocofl", "rc", 0, rounds=1)
    text = write_report(find_runs([tmp_path / "run"]), tmp_path / "page.html").read_text()
    curves = [
        trace
        for chart in charts_of(text).values()
        for trace in chart["data"]
        if trace["type"] == "scatter" and "line" in trace.get("meta", {})
    ]
    assert len(curves) == 6, "over rounds, time and uploads; and of three groups"
    assert all("markers" in trace["mode"] for trace in curves)
    assert "±" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_heat_maps_have_one_scale(page):
    maps = [
        trace
        for chart in charts_of(page.read_text()).values()
        for trace in chart["data"]
        if trace["type"] == "heatmap"
    ]
    assert len(maps) == 3
    assert len({one["zmax"] for one in maps}) == 1


def test_no_table_is_counted_that_served_nobody(tmp_path, monkeypatch):
    made_up_run(tmp_path / "run", "cocofl", "rc", 0, rounds=3)

    def nobody_asked(_tables):
        raise AssertionError("a width table was counted for a strategy that trains spans")

    monkeypatch.setattr(ExperimentTables, "widths", nobody_asked)
    text = write_report(find_runs([tmp_path / "run"]), tmp_path / "page.html").read_text()
    assert "resnet10-digits: time and upload" in text


def test_figures_for_a_paper(folder, tmp_path):
    written = save_figures(find_runs([folder / "cocofl", folder / "heterofl"]), tmp_path / "new")
    names = {"accuracy", "fairness", "blocks", "data", "profile"}
    assert {path.name for path in written} == {
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    }
    with Image.open(tmp_path / "new" / "accuracy.png") as image:
        assert image.format == "PNG"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # selenium's own sockets
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_the_page_opens_without_errors_and_requests(page, dark, width):
    driver = browser(dark=dark, width=width)
    if driver is None:
        pytest.skip("no chromium and chromedriver here: `make browser` installs them")
    try:
        driver.get(page.resolve().as_uri())
        driver.set_script_timeout(60)
        driver.execute_async_script(
            "const done = arguments[0]; const places = [...document.querySelectorAll('.chart')];"
            "const next = () => places.length ? (places.shift().scrollIntoView(),"
            " setTimeout(next, 60)) : look();"
            "const look = () => document.querySelector('.chart:not(.js-plotly-plot)')"
            " ? setTimeout(look, 100) : done(); next();"
        )
        # Nothing sticks out to the side, on a phone neither.
        sides = "return [document.documentElement.scrollWidth, window.innerWidth]"
        inner, outer = driver.execute_script(sides)
        assert inner <= outer
        # A strategy can be hidden: in charts, in the table, with its own heat map.
        traces = (
            "return document.querySelector('.chart').data"
            ".filter(t => t.visible && t.meta.line === 'heterofl').length"
        )
        assert driver.execute_script(traces) == 2
        driver.execute_script("document.querySelector('[data-line=heterofl]').click()")
        assert driver.execute_script(traces) == 0
        hidden = "return document.querySelectorAll('[data-of=heterofl]:not([hidden])').length"
        assert driver.execute_script(hidden) == 0
        assert driver.get_log("browser") == []
        requested = [
            message["params"]["request"]["url"]
            for entry in driver.get_log("performance")
            if (message := json.loads(entry["message"])["message"])["method"]
            == "Network.requestWillBeSent"
        ]
        assert page.resolve().as_uri() in requested
        assert [url for url in requested if not url.startswith(("file:", "data:"))] == []
    finally:
        driver.quit()
