"""The page "What fits?": it says what `cocofl.feasible` says, by mouse, by keys, and on a phone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import which

import numpy as np
import pytest
from bench.report import browser
from PIL import Image
from selenium.webdriver.common.keys import Keys
from tools.pictures import HEIGHTS, IMAGES, WIDTH, taken, what_fits

from cocofl import Budget, ProfileTable, Span, all_spans, feasible, maximal
from cocofl.errors import TableMismatch
from cocofl.profiling import Cost
from cocofl.report.fits import fits_page, shipped_names, write_fits_page
from tests.report.test_profiles import spans, widths

SHIPPED = "measured:epyc-mobilenet"
pytestmark = pytest.mark.filterwarnings("ignore")  # tables of other machines; selenium's sockets


@pytest.fixture
def open_page(tmp_path: Path):
    opened = []

    def show(tables, limits, *, width=1280, dark=False):
        driver = browser(width=width, dark=dark)
        if driver is None:
            pytest.skip("no chromium and chromedriver here: `make browser` installs them")
        opened.append(driver)
        page = write_fits_page(tables, tmp_path / "fits.html", limits)
        driver.get(page.resolve().as_uri())
        return driver

    yield show
    for driver in opened:
        assert driver.get_log("browser") == []
        driver.quit()


def said(driver) -> str:
    return driver.find_element("id", "fit").text


def test_the_page_agrees_with_the_library_and_is_moved_by_keys(open_page) -> None:
    table = ProfileTable.load(SHIPPED)
    counted = replace(table, name="analytic:pi5/mobilenet", hardware=None, source="analytic")
    tables = [table, spans(), replace(counted, backend="analytic pi5")]
    driver = open_page(tables, {"time": 0.5, "memory": 0.33})
    fitting = feasible(table, Budget(time=0.5, memory=0.33))
    best = maximal(fitting)
    assert said(driver) == f"{len(fitting)} of 210 spans fit; {len(best)} are maximal."
    rows = driver.find_elements("css selector", "#best tbody tr")
    assert [row.find_element("css selector", "td").text for row in rows] == list(map(str, best))
    # A slider, by keys.
    driver.find_element("id", "time").send_keys(Keys.HOME)
    tight = feasible(table, Budget(time=0.01, memory=0.33))
    assert not tight
    assert said(driver).startswith("None of 210 spans fits. The cheapest in time, ")
    driver.find_element("id", "time").send_keys(Keys.ARROW_RIGHT * 19)
    some = feasible(table, Budget(time=0.20, memory=0.33))
    assert said(driver).startswith(f"{len(some)} of 210 spans fit")
    # The map: one stop for the tabulator, arrows within.
    cells = driver.find_elements("css selector", "#map td.span")
    assert [cell.get_attribute("tabindex") for cell in cells].count("0") == 1
    cells[0].click()
    driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert driver.switch_to.active_element.get_attribute("aria-label").startswith("span 0:2, ")
    assert driver.find_element("id", "chosen").text.startswith("Span 0:2 ")
    # Another device, then another network.
    choice = driver.find_element("id", "device")
    assert choice.text.split("\n") == ["AMD EPYC, 2 threads", "pi5 (analytic)"]
    choice.send_keys("pi5")
    assert driver.find_element("id", "about").text.startswith("analytic:pi5/mobilenet: ")
    driver.find_element("id", "model").send_keys("toy")
    assert "of 10 spans" in said(driver)


def test_nothing_sticks_out_on_a_phone(open_page) -> None:
    driver = open_page([ProfileTable.load(SHIPPED)], {}, width=390, dark=True)
    inner, outer = driver.execute_script(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    )
    assert inner <= outer
    assert said(driver) == "210 of 210 spans fit; 1 is maximal."
    right = driver.execute_script(
        "return Math.max(...[...document.querySelectorAll('#map td')]"
        ".map((cell) => cell.getBoundingClientRect().right))"
    )
    assert right <= outer, "the whole map is in view"


def test_without_a_budget_the_sliders_begin_in_the_middle(open_page) -> None:
    names = shipped_names()
    assert names[:2] == ["measured:epyc-mobilenet/qff", "measured:epyc-mobilenet/ff"]
    assert not any("width" in name for name in names)
    table = ProfileTable.load(names[0])
    driver = open_page([table], None)
    found = feasible(table, Budget(time=0.5, memory=0.5, upload=0.5))
    assert 0 < len(found) < len(table)
    assert said(driver).startswith(f"{len(found)} of 210 spans fit; ")


def test_the_documentation_shows_it_as_it_is(tmp_path: Path) -> None:
    if not (which("chromium") and which("chromedriver")):
        pytest.skip("no chromium and chromedriver here: `make browser` installs them")
    name = "what-fits.png"
    with Image.open(IMAGES / name) as image:
        shown = image.convert("RGB")
    found = taken(what_fits(tmp_path), name)
    assert shown.size == found.size == (WIDTH, HEIGHTS[name])
    # Small, so that other fonts do not count.
    small = [np.asarray(one.resize((64, 50), Image.Resampling.BOX), int) for one in (shown, found)]
    assert np.abs(small[0] - small[1]).mean() < 1.5, "take it again: python -m tools.pictures"


def test_names_are_text_and_other_tables_are_refused() -> None:
    evil = "<script>console.error(1)</script>"
    costs = {span: Cost(len(span), None, 100 * len(span), 10) for span in all_spans(2)}
    facts = {"n_blocks": 2, "method": "span", "variant": "qff", "source": "measured"}
    page = fits_page([ProfileTable.from_costs(costs, model=evil, **facts)], {})
    assert evil not in page
    head = {Span(0, 1) | Span(2, 3): Cost(1.0, None, 100, 10), Span(0, 3): Cost(2.0, None, 200, 20)}
    apart = ProfileTable.from_costs(head, model="toy", **{**facts, "n_blocks": 3})
    for table, message in ((apart, "blocks apart from each other"), (widths(), "")):
        with pytest.raises(TableMismatch, match=message):
            fits_page([table], {})
