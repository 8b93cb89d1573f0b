"""The worked examples of the guides "Add …" as files: what is tested is the documentation."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = sorted((Path(__file__).parents[1] / "docs/guides").glob("extend*.md"))


def extensions() -> dict[str, str]:
    """By name of a file its text."""
    text = "".join(page.read_text() for page in PAGES)
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.M | re.S))


def write_extensions(folder: Path) -> None:
    """All of them, where they can be imported from."""
    for name, text in extensions().items():
        (folder / name).write_text(text, encoding="utf-8")
