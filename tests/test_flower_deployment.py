"""Real processes on loopback, with TLS and keys: one round trip, and who is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cocofl.experiment import Run
from cocofl.flower.loopback import NODE_PROGRAM, DeploymentFailed, Loopback, make_certificate
from cocofl.flower.settings import write_app
from cocofl.flower.trial import await_run
from cocofl.runlog import RunFolder
from tests.extensions import write_extensions

COCOFL = Path(sys.executable).with_name("cocofl")
PAGE = Path(__file__).parent.parent / "docs/guides/deployment.md"
CONFIG = {
    "rounds": 1,
    "model.name": "task:network",
    "data.name": "task:samples",
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "flower.nodes": 2,
    "flower.round_s": 300.0,
    "flower.resume": False,
}


def users_app(folder: Path, **more: Any) -> Path:
    """An app with what the documentation shows of one's own, in modules beside it."""
    app = write_app(Path("app"), {**CONFIG, "flower.folder": str(folder), **more})
    found = re.search(r"^```python\n(# task\.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None
    (app / "task.py").write_text(found[1])
    write_extensions(app)
    return app


def exit_code(process, within_s: float = 120) -> int:
    """A paused machine must not fail the test: it waits long, and normally returns at once."""
    return int(process.wait(timeout=within_s))


def log_of(network: Loopback, name: str) -> str:
    return (network.folder / f"{name}.log").read_text()


def await_text(network: Loopback, name: str, text: str, within_s: float = 120) -> None:
    end = time.monotonic() + within_s
    while text not in log_of(network, name):
        assert time.monotonic() < end, f"{text} is not in the log of {name}"
        time.sleep(0.1)


def test_tls_and_keys_let_the_right_ones_in_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths are good enough for people
    folder = tmp_path / "run"
    with Loopback(Path("network"), secure=True) as network:
        strong, weak = (dict.fromkeys(("time", "memory", "upload"), part) for part in (1.0, 0.6))
        for number, budget in enumerate((strong, weak)):
            config = {**budget, "trust": "task"}
            network.start_node(f"node{number}", config, key=network.new_key(f"key{number}"))
        stranger = network.start_node("stranger", key=network.new_key("stranger", register=False))
        anonymous = network.start_node("anonymous")
        make_certificate(network.folder / "other")
        key = network.new_key("fooled", register=False)
        words = [*NODE_PROGRAM, "--superlink", f"127.0.0.1:{network.port}"]
        words += ["--root-certificates", str(network.folder / "other" / "server.crt")]
        fooled = network.spawn("fooled", [*words, "--auth-supernode-private-key", str(key)])

        await_run(network, network.submit(users_app(folder)), folder)
        (record,) = Run.open(folder).rounds
        assert record.count("merged") == 2
        assert len(record.devices) == 2, "the others were never nodes"
        assert {span for _, _, span, _ in record.devices} > {"0:3"}
        assert "accuracy" in record.scores

        for refused in (stranger, anonymous, fooled):
            assert exit_code(refused) not in (0, -15)
        assert "Failed to activate" in log_of(network, "stranger")
        assert "CERTIFICATE_VERIFY_FAILED" in log_of(network, "fooled")


def test_nothing_is_left_behind_and_failures_are_told(tmp_path: Path) -> None:
    with Loopback(tmp_path) as network:
        node = network.start_node("node0")
        with pytest.raises(DeploymentFailed, match=r"no-such-app/pyproject\.toml"):
            network.submit(tmp_path / "no-such-app")
        await_text(network, "node0", "SuperNode ID")
        assert len(network.processes()) >= 2
        words = ["flower", "device", "--insecure", "--superlink", f"127.0.0.1:{network.port}"]
        device = network.spawn("device", [str(COCOFL), *words])
        await_text(network, "device", "SuperNode ID")
        assert "joining 127.0.0.1" in log_of(network, "device")
        for one in (node, device):
            one.terminate()
            assert exit_code(one) == 143
    assert network.processes() == {}


@pytest.mark.slow
def test_a_first_try_is_one_command(tmp_path: Path) -> None:
    words = ["flower", "up", "--supernodes", "3", "--set", "rounds=2", "--secure"]
    done = subprocess.run(
        [COCOFL, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert [line.count("merged") for line in shown if line.startswith("round")] == [3, 3]
    assert len(Run.open(tmp_path / "runs" / "flower" / "run").rounds) == 2
    again = subprocess.run(
        [COCOFL, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert again.returncode != 0
    assert "name another folder with --out" in again.stdout + again.stderr


WITHHOLDS = f"""
import runpy
from flwr.supercore.inflatable import inflatable_utils
inflatable_utils.push_object_contents_from_iterable = lambda *_, **__: None
runpy.run_path({NODE_PROGRAM[-1]!r}, run_name="__main__")
"""
"""A node that announces its replies and never delivers their parts."""


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["open", "tls"])
def test_a_withheld_reply_costs_the_round_its_time_and_nobody_else_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, round_s, threads = tmp_path / "run", 25.0, list[int]()
    with Loopback(tmp_path / "network", secure=secure) as network:
        for number in range(3):
            program = [sys.executable, "-P", "-c", WITHHOLDS] if number == 0 else NODE_PROGRAM
            key = network.new_key(f"key{number}") if secure else None
            config = {"trust": "task"}
            network.start_node(f"node{number}", config, key=key, program=program)
        changes = {"flower.nodes": 3, "rounds": 3, "flower.round_s": round_s}
        run_id = network.submit(users_app(folder), changes)

        def count_threads(_record: object) -> None:
            found = [pid for pid, words in network.processes().items() if "serverapp" in words]
            threads.extend(len(os.listdir(f"/proc/{pid}/task")) for pid in found)

        await_run(network, run_id, folder, count_threads)
    rounds, timing = Run.open(folder).rounds, RunFolder(folder).timing()
    print(f"withheld: rounds of {[one['train_s'] for one in timing]} s, threads {threads}")
    # In the first round a busy machine may take longer to load what devices need.
    assert [record.count("merged") for record in rounds[1:]] == [2, 2]
    assert [record.count("late") for record in rounds[1:]] == [1, 1]
    assert all(one["train_s"] <= round_s + 2 for one in timing)


def processes_that_trained(network: Loopback, name: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"trained .* process (\d+)", log_of(network, name))]


def await_rounds(folder: Path, count: int, within_s: float = 300) -> None:
    end = time.monotonic() + within_s
    while len(RunFolder(folder).rounds()) < count:
        assert time.monotonic() < end, f"{count} rounds did not come about"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_device_keeps_its_process_and_survives_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    with Loopback(tmp_path / "network") as network:
        node = network.start_node("node0", {"trust": "task capped_pull"})
        own = {"strategy.name": "capped_pull:capped_pull", "strategy.mu": 0.1}
        run_id = network.submit(users_app(folder, **own), {"flower.nodes": 1, "rounds": 8})
        await_rounds(folder, 2)
        (kept,) = set(processes_that_trained(network, "node0"))
        os.kill(kept, signal.SIGKILL)
        await_run(network, run_id, folder)

        trained = processes_that_trained(network, "node0")
        first, second = dict.fromkeys(trained)
        assert first == kept
        assert trained == sorted(trained, key=[first, second].index), "one after the other"
        fates = [record.devices[0].fate for record in Run.open(folder).rounds]
        assert fates.count("merged") >= 7
        assert set(fates) <= {"merged", "lost"}, "a process that dies is an error at once"

        assert second in network.processes()
        node.kill()  # it has no chance to clear up
        node.wait()
        end = time.monotonic() + 30
        while second in network.processes():
            assert time.monotonic() < end, "the app's process outlives its node"
            time.sleep(0.1)
