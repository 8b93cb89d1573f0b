"""The notebooks run from top to bottom, and are kept without what came out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
BY_NAME = [pytest.param(path, id=path.name) for path in NOTEBOOKS]
LENGTHY = pytest.param(NOTEBOOKS[0], id=NOTEBOOKS[0].name, marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")  # what Jupyter says of itself is its own
@pytest.mark.parametrize("path", [LENGTHY, *BY_NAME[1:]])
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Jupyter is not installed: pip install nbclient ipykernel"
    nbclient = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    nbformat = pytest.importorskip("nbformat", reason=why)
    monkeypatch.setenv("COCOFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    options = {"timeout": 300, "kernel_name": "python3"}
    resources = {"metadata": {"path": os.fspath(tmp_path)}}
    nbclient.NotebookClient(content, resources=resources, **options).execute()
    assert any(cell.get("outputs") for cell in content.cells)


@pytest.mark.parametrize("path", BY_NAME)
def test_a_notebook_is_kept_without_results(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs"), "clear the outputs before you commit"
        assert cell.get("execution_count") is None


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare_methods", "freeze_your_model"]
