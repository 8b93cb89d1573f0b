"""The node's end of the process that it keeps: sizes, deaths and silence."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe

import pytest

from cocofl.flower import node
from cocofl.flower.loopback import NODE_PROGRAM


def test_frames_arrive_as_they_were_and_large_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = Pipe()
    node.send_frames(theirs, [b"a", b"", b"x" * 1000])
    assert node.receive_frames(ours) == [b"a", b"", b"x" * 1000]
    monkeypatch.setattr(node, "_MOST_BYTES", 999)
    node.send_frames(theirs, [b"x" * 1000])
    with pytest.raises(OSError, match="bad message length"):
        node.receive_frames(ours)


def test_a_process_that_dies_or_is_silent_is_an_error_and_the_next_one_is_new() -> None:
    process = node.AppProcess()
    with pytest.raises(ChildProcessError, match="ended with"):
        process.ask("app", [b"this is no message"], within_s=120)
    with pytest.raises(TimeoutError, match="no answer"):
        process.ask("app", [b"{}", b"", b"", b"no message"], within_s=0)
    assert process.close() is None, "it is gone already"


def test_a_node_loads_no_pytorch_and_says_what_is_wrong() -> None:
    words = [*NODE_PROGRAM, "--superlink", "127.0.0.1:1", "--insecure"]
    refused = subprocess.run(
        [*words, "--root-certificates", "ca.crt"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "--insecure goes without certificates" in refused.stderr
    code = f"import runpy, sys; runpy.run_path({NODE_PROGRAM[-1]!r}); print('torch' in sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "False"
