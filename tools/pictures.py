"""The pictures of our pages in docs/images, taken with Chromium.

python -m tools.pictures RUN COMPARISON

takes them of the folders that `cocofl run` and `cocofl compare` made. A test takes the one of "What
fits?" again, and complains where it looks otherwise.
"""

from __future__ import annotations

import io
import sys
import time
import warnings
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.report import browser
from PIL import Image

from cocofl.errors import OtherHardware
from cocofl.experiment import Run
from cocofl.profiling import ProfileTable
from cocofl.report.fits import shipped_names, write_fits_page
from cocofl.report.live import LiveView
from cocofl.runlog import RunFolder

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1280
HEIGHTS = {"report.png": 1470, "quickstart.png": 900, "live.png": 860, "what-fits.png": 1010}


def main(run: Path, comparison: Path) -> None:
    """Take all of them."""
    with TemporaryDirectory() as folder:
        pages = {
            "report.png": comparison / "report.html",
            "quickstart.png": run / "report.html",
            "live.png": half_way(run, Path(folder) / "run"),
            "what-fits.png": what_fits(Path(folder)),
        }
        for name, page in pages.items():
            taken(page, name).save(IMAGES / name, optimize=True)


def taken(page: Path, name: str) -> Image.Image:
    """The top of a page."""
    driver = browser(width=WIDTH, height=HEIGHTS[name])
    try:
        driver.get(page.resolve().as_uri())
        time.sleep(2)  # for the charts in view
        with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as image:
            return image.convert("RGB")
    finally:
        driver.quit()


def what_fits(folder: Path) -> Path:
    """The page "What fits?" with a device in mind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        tables = [ProfileTable.load(name) for name in shipped_names()]
    return write_fits_page(tables, folder / "fits.html", {"time": 0.5, "memory": 0.33})


def half_way(run: Path, folder: Path) -> Path:
    """The page of a run that is under way, as it was after half of these rounds."""
    done = Run.open(run)
    begun = RunFolder.create(folder, done.experiment.to_toml())
    for record in islice(done.rounds, len(done.rounds) // 2):
        begun.append(record, {"train_s": 0.0, "evaluate_s": 0.0})
    return LiveView(done.experiment, folder).page


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
