"""The page of a run that is under way."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.report import browser
from selenium.webdriver.support.ui import WebDriverWait

from cocofl.config import Experiment
from cocofl.report.live import LiveView, who_trained
from cocofl.runlog import DeviceRecord, RoundRecord, RunFolder


def record(number: int, accuracy: float | None = None) -> RoundRecord:
    devices = [
        DeviceRecord(3, "weak", "0:2", "merged"),
        DeviceRecord(4, "<b>strong", "0:4", "merged"),
        DeviceRecord(5, "weak", None, "infeasible"),
    ]
    scores = {"accuracy": accuracy, "group_accuracy": {"weak": 0.25, "<b>strong": 0.75}}
    return RoundRecord(number, 0.1, 0.2, 1000, 1.5, devices, scores if accuracy else {})


def test_the_page_follows_a_run(tmp_path: Path) -> None:
    clock = iter(range(0, 1000, 2))
    with LiveView(Experiment(rounds=10), tmp_path, now=lambda: float(next(clock))) as view:
        assert "Round 0 of 10, running." in view.page.read_text()
        view.on_round(record(1))
        assert "has not been tested yet" in view.page.read_text()
        view.on_round(record(2, 0.5))
        text = view.page.read_text()
        assert "Round 2 of 10, running; about " in text
        assert 'http-equiv="refresh"' in text
        assert "accuracy of groups" in text.lower()
        assert "2 merged, 1 infeasible" not in text
        assert "4 merged, 2 infeasible" in text
        assert "<b>strong" not in text
        view.on_end()
    text = view.page.read_text()
    assert "Round 2 of 10, complete." in text
    assert "refresh" not in text
    assert 'href="report.html"' in text


def test_a_run_that_goes_on_is_shown_from_its_beginning(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", Experiment().to_toml())
    for number in (1, 2):
        folder.append(record(number, 0.1), {"train_s": 0.1, "evaluate_s": 0.0})
    with LiveView(Experiment(rounds=10), folder.path, every_s=0) as view:
        assert "Round 2 of 10, running." in view.page.read_text()
        view.on_round(record(2, 0.1))  # after the checkpoint, and so played again
        view.on_round(record(3, 0.5))
        text = view.page.read_text()
    assert "Round 3 of 10, running; about " in text
    assert "6 merged, 3 infeasible" in text
    assert text.count("<circle") == 3 * 3


@pytest.mark.parametrize(("problem", "word"), [(KeyboardInterrupt, "stopped"), (OSError, "failed")])
def test_an_early_end_is_told(tmp_path: Path, problem: type[BaseException], word: str) -> None:
    def cut_short() -> None:
        with LiveView(Experiment(rounds=10), tmp_path) as view:
            view.on_round(record(1, 0.5))
            raise problem

    with pytest.raises(problem):
        cut_short()
    text = (tmp_path / "live.html").read_text()
    assert f"Round 1 of 10, {word}." in text
    assert "refresh" not in text


def test_the_page_is_not_written_after_every_short_round(tmp_path: Path) -> None:
    now = iter([0.0, 0.0, 2.0, 2.0, 2.0, 2.5, 2.5]).__next__
    with LiveView(Experiment(rounds=10), tmp_path, now=now) as view:
        view.on_round(record(1))
        view.on_round(record(2))
    assert "Round 1 of 10" in view.page.read_text()


def test_who_trained_what() -> None:
    found = who_trained({("weak", "0:1"): 3, ("weak", "1:3"): 1, ("strong", "0:3"): 2})
    assert found["columns"] == ["0", "1", "2"]
    assert found["rows"] == {"weak": [0.75, 0.25, 0.25], "strong": [1, 1, 1]}
    ordered = who_trained({("weak", "0:1"): 3, ("strong", "0:3"): 2}, ["strong", "medium", "weak"])
    assert list(ordered["rows"]) == ["strong", "weak"]
    assert who_trained({("weak", "0.5"): 1})["columns"] == ["0.5"]
    assert who_trained({}) == {"columns": [], "rows": {}}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # selenium's own sockets
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_the_page_opens_without_errors(tmp_path: Path, dark: bool, width: int) -> None:
    driver = browser(dark=dark, width=width)
    if driver is None:
        pytest.skip("no chromium and chromedriver here: `make browser` installs them")
    try:
        with LiveView(Experiment(rounds=10), tmp_path, every_s=0) as view:
            driver.get(view.page.resolve().as_uri())
            for number in range(1, 11):
                view.on_round(record(number, number / 20))
            # By itself, within two seconds.
            WebDriverWait(driver, 30).until(lambda one: one.title.startswith("10/10 "))
            assert len(driver.find_elements("css selector", "polyline")) == 3
            inner, outer = driver.execute_script(
                "return [document.documentElement.scrollWidth, window.innerWidth]"
            )
            assert inner <= outer
        assert driver.get_log("browser") == []
    finally:
        driver.quit()
