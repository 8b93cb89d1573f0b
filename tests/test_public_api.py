"""What users import changes on purpose only: `python tools/public_api.py` writes it down."""

from __future__ import annotations

import difflib

from tools.public_api import FILE, listing


def test_the_public_api_is_what_was_written_down() -> None:
    there, now = FILE.read_text(encoding="utf-8").splitlines(), listing().splitlines()
    changes = [line for line in difflib.ndiff(there, now) if line[0] in "+-"]
    assert not changes, "\n".join(["run `python tools/public_api.py` if this is meant:", *changes])
