"""The page "What fits?": tables with sliders for a budget, in one file that requests nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocofl.errors import TableMismatch
from cocofl.files import write_text
from cocofl.profiling import ProfileTable, shipped
from cocofl.report.pages import as_json, template

LIMITS = ("time", "memory", "upload")
BEGIN = dict.fromkeys(LIMITS, 0.5)
"""Where the sliders of a page begin that nobody gave a budget: some spans fit, some do not."""
_FIRST = "measured:epyc-mobilenet"
_VARIANTS = ("qff", "ff", "f")


def shipped_names() -> list[str]:
    """The tables of spans that ship, as a page offers them: int8 before the other variants."""

    def place(name: str) -> tuple[bool, str, int]:
        network, _, variant = name.rpartition("/")
        return network != _FIRST, network, _VARIANTS.index(variant)

    return sorted((name for name in shipped() if not name.endswith("/width")), key=place)


def write_fits_page(
    tables: Sequence[ProfileTable], path: Path, limits: Mapping[str, float] | None = None
) -> Path:
    """Write the page about these tables; ``limits`` is where its sliders begin, in fractions."""
    write_text(path, fits_page(tables, BEGIN if limits is None else limits))
    return path


def fits_page(tables: Sequence[ProfileTable], limits: Mapping[str, float]) -> str:
    """The page as text."""
    data = {
        "tables": [_facts(table) for table in tables],
        "limits": {name: min(1.0, limits.get(name, 1.0)) for name in LIMITS},
    }
    return template("fits.html").render(title="What fits?", limits=LIMITS, data=as_json(data))


def _facts(table: ProfileTable) -> dict[str, Any]:
    """What the page must know of a table."""
    spans = [(min(one), max(one) + 1) for one in table.spans]
    if any(stop - start != len(one) for one, (start, stop) in zip(table.spans, spans, strict=True)):
        raise TableMismatch(
            f"{table.name} has blocks apart from each other; a page shows tables of plain spans"
        )
    return {
        "model": table.model,
        "device": _device(table),
        "name": table.name,
        "about": table.describe(),
        "blocks": table.n_blocks,
        "spans": spans,
        **{what: [float(f"{x:.4g}") for x in getattr(table, what)] for what in LIMITS},
        "full": {
            "time": table.full_step_s,
            "memory": table.full_memory_bytes,
            "upload": table.full_upload_bytes,
        },
    }


def _device(table: ProfileTable) -> str:
    """Whose costs these are, as a page offers it for choice."""
    if table.hardware is not None:
        return f"{table.hardware.cpu}, {table.hardware.threads} threads"
    return f"{table.backend.removeprefix('analytic ') or 'unknown'} ({table.source})"
