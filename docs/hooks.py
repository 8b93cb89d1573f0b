"""What the site has besides its pages: "What fits?", made of the tables that ship."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocofl.errors import OtherHardware
from cocofl.profiling import ProfileTable
from cocofl.profiling.analytic import analytic_tables
from cocofl.profiling.device_rates import DEVICES
from cocofl.profiling.subject import Settings
from cocofl.report.fits import shipped_names, write_fits_page

COUNTED = "mobilenet"
"""The network whose spans are counted for every device that has a name."""


def on_post_build(config: Any) -> None:
    """Put the page beside the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        tables = [ProfileTable.load(name) for name in shipped_names()]
    counted = analytic_tables(Settings(COUNTED), list(DEVICES))
    tables += [
        replace(table, name=f"analytic:{device}/{COUNTED}")
        for device, table in zip(DEVICES, counted, strict=True)
    ]
    write_fits_page(tables, Path(config["site_dir"]) / "what-fits.html")
