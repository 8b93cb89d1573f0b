"""The worked examples of docs/guides/extend.md as files: what is tested is the documentation."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/guides/extend.md"


def extensions() -> dict[str, str]:
    """By name of a file its text."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return dict(blocks)


def write_extensions(folder: Path) -> None:
    """All of them, where they can be imported from."""
    for name, text in extensions().items():
        (folder / name).write_text(text, encoding="utf-8")
