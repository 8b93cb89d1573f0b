"""The node's end of the process that it keeps: sizes, deaths and silence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from threading import Timer

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError

from cocofl.errors import Untrusted
from cocofl.flower import client, node
from cocofl.flower.app_process import load_app
from cocofl.flower.loopback import NODE_PROGRAM
from cocofl.flower.settings import write_app


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower builds apps with
def test_a_device_runs_our_app_or_one_that_its_own_config_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends the app, and so names the program."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    app = write_app(tmp_path / "app", {"rounds": 1})
    assert load_app(build_fab_from_disk(app), {}) is client.app
    (app / "stranger.py").write_text(
        f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n"
        "from flwr.clientapp import ClientApp\napp = ClientApp()\nother = print\n"
    )
    for name in ("stranger:app", "stranger:other"):
        text = (app / "pyproject.toml").read_text()
        named = re.sub('clientapp = ".*"', f'clientapp = "{name}"', text)
        (app / "pyproject.toml").write_text(named)
        fab = build_fab_from_disk(app)
        if name == "stranger:app":
            with pytest.raises(Untrusted, match="would run code of the module 'stranger'"):
                load_app(fab, {})
            assert not (tmp_path / "ran").exists()
            assert isinstance(load_app(fab, {"trust": "task stranger"}), ClientApp)
            assert Path(sys.path[-1]).is_relative_to(tmp_path), "its modules hide no library"
        else:
            with pytest.raises(LoadClientAppError, match="not a ClientApp"):
                load_app(fab, {"trust": "stranger"})


def test_a_stopped_process_is_ended_and_the_next_one_is_new() -> None:
    process = node.AppProcess()
    with pytest.raises(ChildProcessError):
        process.ask("app", [b"no message"], within_s=120)
    Timer(0.5, lambda: os.kill(process._process.pid, signal.SIGSTOP)).start()
    with pytest.raises(TimeoutError, match="no answer"):  # it does not even read
        process.ask("app", [b"{}", b"x" * 10**7], within_s=2)


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


def test_a_device_trains_without_the_compiler_of_pytorch() -> None:
    """It is 90 MB that many parts of PyTorch load by the way; a Pi has better use for them."""
    code = """
import sys, numpy as np, cocofl, cocofl.flower.client
from cocofl.experiment import Setup, load_data
from cocofl.fl.federation import Situation
from cocofl.fl.trainer import Task
experiment = cocofl.Experiment().changed({"devices.count": 60})
setup = Setup(experiment, load_data(experiment))
trainer, rng = setup.trainer, np.random.default_rng(0)
plan = setup.strategy.plan(Situation(0, 0, cocofl.Budget.parse(0.33, 0.33, 0.33), rng))
state = trainer.server_state(cocofl.chain_state(trainer.chain()))
sent = trainer.train(Task(0, 0, 0, setup.partition[0], plan.work, 0.1, {}), state)
print(sent.samples > 0, [name for name in ("torch._dynamo", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"
