"""Kernels are compiled by copies of the process, and what one of them fails at is left to it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cocofl.vector.kernels import compiling

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be copied here")


def test_each_is_compiled_once_and_by_another_process(tmp_path: Path) -> None:
    def kernel(i: int) -> None:
        with (tmp_path / str(i)).open("a") as file:
            file.write(f"{os.getpid()}\n")
        if i == 1:
            raise RuntimeError("no such instruction")

    compiling.compile_in_processes([lambda i=i: kernel(i) for i in range(7)])  # type: ignore[misc]
    by = [(tmp_path / str(i)).read_text().splitlines() for i in range(7)]
    assert all(len(processes) == 1 for processes in by)
    assert str(os.getpid()) not in {process for processes in by for process in processes}


def test_who_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_PATIENCE_S", 0.2)
    begin = time.monotonic()
    compiling.compile_in_processes([lambda: time.sleep(60)] * 2)
    assert time.monotonic() - begin < 30


def test_what_fails_is_said_to_who_asks_for_it() -> None:
    def broken() -> int:
        raise RuntimeError("no such instruction")

    later = compiling._Later()
    good, bad = later.submit(lambda: 1), later.submit(broken)
    assert not good.done()
    later.compile()
    assert good.result() == 1
    with pytest.raises(RuntimeError, match="no such instruction"):
        bad.result()
