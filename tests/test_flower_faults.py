"""Processes that die, hang, lie and come back, on loopback. `make test-faults` runs these.

Their figures go to the file that ``COCOFL_FAULT_FIGURES`` names; `docs/deployment.md` quotes it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cocofl.flower.app import write_app
from cocofl.flower.loopback import Loopback
from cocofl.flower.trial import await_run
from cocofl.runlog import RunFolder

pytestmark = pytest.mark.faults

ROUNDS = int(os.environ.get("COCOFL_SOAK_ROUNDS", "200"))
CONFIG: dict[str, Any] = {
    "rounds": 4,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "flower.nodes": 3,
    "flower.round_s": 40.0,
    "flower.wait_s": 600.0,
    "flower.resume": False,
}
# A ClientApp with a bad day: what it does is in its node config.
MISCHIEF = """
import os, signal, time
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from cocofl.flower.client import train as honest

app = ClientApp()


@app.train()
def train(message, context):
    does = context.node_config.get("does", "")
    if does == "hang":
        time.sleep(3600)
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "garbage":
        array = Array("uint8", (9,), "cocofl.bytes", b"\\x80\\x04garbage")
        return Message(RecordDict({"update": ArrayRecord({"update": array})}), reply_to=message)
    if does == "foreign":
        return Message(RecordDict({"x": ConfigRecord({"a": "b"})}), reply_to=message)
    return honest(message, context)
"""


def make_app(network: Loopback, **changes: Any) -> tuple[Path, Path]:
    """An app with mischief in it, and its run folder."""
    folder = network.folder / "run"
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    app = network.folder / "app"
    write_app(app, {**CONFIG, "flower.folder": str(folder), **dotted})
    (app / "mischief.py").write_text(MISCHIEF)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("cocofl.flower.client:app", "mischief:app"))
    return app, folder


def start(network: Loopback, number: int, of: int = 3, does: str = "") -> Any:
    config = {"partition-id": number, "num-partitions": of, "does": does}
    return network.start_node(f"node{number}", config)


def kill_group(process: Any) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_rounds(folder: Path, count: int, within_s: float = 600) -> None:
    end = time.monotonic() + within_s
    while len(RunFolder(folder).metrics()) < count:
        assert time.monotonic() < end, f"{count} rounds did not come about"
        time.sleep(0.2)


def remember(**figures: Any) -> None:
    file = os.environ.get("COCOFL_FAULT_FIGURES")
    print(json.dumps(figures))
    if file:
        with Path(file).open("a") as out:
            out.write(json.dumps(figures) + "\n")


@pytest.mark.parametrize(
    ("does", "fate"),
    [("garbage", "rejected"), ("foreign", "rejected"), ("hang", "late"), ("die", "late")],
)
def test_a_node_that_misbehaves_costs_its_own_update_only(
    tmp_path: Path, does: str, fate: str
) -> None:
    with Loopback(tmp_path) as network:
        app, folder = make_app(network, rounds=2)
        for number in range(3):
            start(network, number, does=does if number == 2 else "")
        await_run(network, network.submit(app), folder)
    rounds = RunFolder(folder).metrics()
    assert [record["merged"] for record in rounds] == [2, 2]
    # Flower tells of a dead process only after a minute: until then it is late.
    assert all(record[fate] + record["lost"] == 1 for record in rounds)
    remember(test="node", does=does, rounds=len(rounds), fates=[r["devices"] for r in rounds])


def test_a_node_killed_in_training_comes_back(tmp_path: Path) -> None:
    with Loopback(tmp_path) as network:
        app, folder = make_app(network, rounds=8)
        nodes = [start(network, number) for number in range(3)]
        run_id = network.submit(app)
        await_rounds(folder, 1)
        time.sleep(1)
        kill_group(nodes[2])
        await_rounds(folder, 3)
        start(network, 2)
        await_run(network, run_id, folder)
    rounds = RunFolder(folder).metrics()
    assert len(rounds) == 8
    merged = [record["merged"] for record in rounds]
    assert merged[0] == 3
    assert min(merged) >= 2, "the round goes on without it"
    assert merged[-1] == 3, "it is back"
    remember(test="killed and back", rounds=len(rounds), merged=merged, lost_rounds=0)


def server_app(network: Loopback) -> int:
    """The ServerApp's process, which the SuperLink started."""
    (pid,) = [pid for pid, words in network.processes().items() if "flwr-serverapp" in words]
    return pid


def test_a_server_killed_resumes_without_losing_a_round(tmp_path: Path) -> None:
    with Loopback(tmp_path) as network:
        app, folder = make_app(network, rounds=6)
        for number in range(3):
            start(network, number)
        run_id = network.submit(app)
        await_rounds(folder, 2)
        time.sleep(random.uniform(0, 3))
        os.kill(server_app(network), signal.SIGKILL)
        kept = RunFolder(folder).metrics()
        run_id = network.submit(app, {"flower.resume": True})
        await_run(network, run_id, folder)
    rounds = RunFolder(folder).metrics()
    assert [record["round"] for record in rounds] == list(range(1, 7))
    # The last line may have been of a round whose checkpoint was not written yet.
    finished = kept[:-1]
    assert rounds[: len(finished)] == finished
    remember(test="server killed", rounds=len(rounds), killed_after=len(kept), lost_rounds=0)


def memory_mb(network: Loopback) -> float:
    """What the SuperLink and the ServerApp hold; ClientApps live for one message each."""
    total = 0
    for pid, words in network.processes().items():
        if "flower-superlink" in words or "flwr-serverapp" in words:
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.partition("VmRSS:")[2].split()[0])
    return total / 1024


def soak(folder: Path, rounds: int, kills: random.Random | None) -> dict[str, Any]:
    """Play rounds; every 10 or so a random node is killed, and started again a little later."""
    killed, memory = 0, []
    with Loopback(folder) as network:
        app, run = make_app(
            network, rounds=rounds, evaluation__every=10, flower__nodes=2, flower__round_s=30.0
        )
        nodes = {number: start(network, number) for number in range(3)}
        run_id = network.submit(app)
        for done in range(1, rounds):
            await_rounds(run, done, within_s=3600)
            if done % 5 == 0:
                memory.append(memory_mb(network))
            if kills is not None and done % 10 == 0:
                victim = kills.randrange(3)
                time.sleep(kills.uniform(0, 3))
                # Now the device as a whole, now the SuperNode alone.
                os.kill(nodes[victim].pid, signal.SIGKILL)
                if killed % 2 == 0:
                    kill_group(nodes[victim])
                nodes[victim].wait()
                killed += 1
                nodes[victim] = start(network, victim)
        await_run(network, run_id, run)
    left = network.processes()
    metrics = RunFolder(run).metrics()
    return {
        "rounds": len(metrics),
        "kills": killed,
        "lost_rounds": rounds - len(metrics),
        "rejected": sum(record["rejected"] for record in metrics),
        "late": sum(record["late"] for record in metrics),
        "lost_updates": sum(record["lost"] for record in metrics),
        "accuracy": metrics[-1]["accuracy"],
        "memory_start_mb": round(memory[1]) if len(memory) > 1 else None,
        "memory_end_mb": round(memory[-1]) if memory else None,
        "processes_left": len(left),
    }


def test_a_soak_with_kills_ends_as_well_as_an_undisturbed_run(tmp_path: Path) -> None:
    calm = soak(tmp_path / "calm", ROUNDS, None)
    wild = soak(tmp_path / "wild", ROUNDS, random.Random(0))
    remember(test="soak", calm=calm, wild=wild)
    assert wild["lost_rounds"] == 0
    assert wild["processes_left"] == 0
    assert wild["accuracy"] >= calm["accuracy"] - 0.03
    assert wild["memory_end_mb"] <= 1.2 * wild["memory_start_mb"] + 20
