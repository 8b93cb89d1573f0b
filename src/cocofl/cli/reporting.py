"""``cocofl report``: a page to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cocofl.cli.outputs import check_writable
from cocofl.cli.printing import Json, Trust, print_json
from cocofl.errors import CocoflError, InvalidSetting
from cocofl.named import EVERYTHING, vouch_for


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the first folder.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="A folder for the figures as PNG and SVG.")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a page about one run, several, or a comparison: one file, nothing to install.

    Example: cocofl report runs/comparison --figures figures
    """
    vouch_for(*[EVERYTHING] * trust)
    if out is not None and out.is_dir():
        raise InvalidSetting(f"{out} is a folder; expected the name of a page, like page.html")
    check_writable(out or runs[0] / "report.html", "--out")
    if figures is not None:
        check_writable(figures / "accuracy.png", "--figures")
    with drawing():
        # Drawing takes longer to import than everything else here, and is an extra.
        from cocofl.report.findings import summary  # noqa: PLC0415
        from cocofl.report.runs import arrange, find_runs  # noqa: PLC0415
        from cocofl.report.writing import write_report  # noqa: PLC0415

        found = find_runs(runs)
        page = write_report(runs, out)
        drawn: list[Path] = []
        if figures is not None:
            from cocofl.report.figures import save_figures  # noqa: PLC0415

            drawn = save_figures(found, figures)
    if as_json:
        scenes = [
            {"scene": scene.title, "rows": [asdict(summary(line)) for line in scene.lines]}
            for scene in arrange(found)
        ]
        print_json({"page": str(page), "figures": [str(path) for path in drawn], "scenes": scenes})
        return
    print(f"report: {page}")
    if drawn:
        print(f"figures: {len(drawn)} files in {figures}")


def report_of(path: Path) -> str:
    """Write the page of a folder that was just made, and say where it is.

    The runs are done and safe: that no page can be drawn is said, not raised.
    """
    try:
        with drawing():
            from cocofl.report.writing import write_report  # noqa: PLC0415

            return f"report: {write_report([path])}"
    except (CocoflError, OSError) as error:
        return f"no report: {error}"


@contextmanager
def drawing() -> Iterator[None]:
    """Say how to get the libraries that draw, where they are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or str(error)).partition(".")[0]
        raise InvalidSetting(
            f"a report needs the library {library}: pip install 'cocofl[report]'"
        ) from error
