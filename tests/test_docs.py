"""What the documentation says works: its Python runs, and so do its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COCOFL_CACHE": str(tmp_path / "cache"),
        "COCOFL_DATA": "",
    }
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    for language, code in blocks:
        # A snippet that begins with a file's name is that file.
        named = re.match(r"# (\S+\.py)\n", code)
        script = tmp_path / (named[1] if named else "snippet.py")
        if language == "python":
            script.write_text(code)
        command = [sys.executable, str(script)] if language == "python" else ["bash", "-ec", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stderr}"
