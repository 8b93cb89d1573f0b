"""Processes that die, hang, lie and come back, on loopback. `make test-faults` runs these.

Their figures go to the file that ``COCOFL_FAULT_FIGURES`` names; the notebook quotes it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cocofl.flower.loopback import Loopback
from cocofl.flower.settings import write_app
from cocofl.flower.trial import BUDGETS, await_run
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.subject import Settings
from cocofl.runlog import RunFolder
from tests.flower_grid import device, play

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
import os, pathlib, signal, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from cocofl.flower.client import train as honest

app = ClientApp()


@app.train()
def train(message, context):
    does = context.node_config.get("does", "")
    if does == "hang":
        time.sleep(3600)
    if does == "tell":
        pathlib.Path(context.node_config["mark"]).touch()
        time.sleep(3)
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "garbage":
        record = ConfigRecord({"update": b"\\x80\\x04garbage"})
        return Message(RecordDict({"update": record}), reply_to=message)
    if does == "foreign":
        return Message(RecordDict({"x": ConfigRecord({"a": "b"})}), reply_to=message)
    return honest(message, context)
"""


def make_app(network: Loopback, **changes: Any) -> tuple[Path, Path]:
    """An app with mischief in it, and its run folder."""
    folder = network.folder / "run"
    app = network.folder / "app"
    write_app(app, {**CONFIG, "flower.folder": str(folder), **changes})
    (app / "mischief.py").write_text(MISCHIEF)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("cocofl.flower.client:app", "mischief:app"))
    return app, folder


def start(network: Loopback, number: int, key: Path | None = None, **config: Any) -> Any:
    whole = {"trust": "mischief", "partition-id": number, "num-partitions": 3, **config}
    return network.start_node(f"node{number}", whole, key=key)


def kill_group(process: Any) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_rounds(folder: Path, count: int, within_s: float = 600) -> None:
    end = time.monotonic() + within_s
    while len(RunFolder(folder).rounds()) < count:
        assert time.monotonic() < end, f"{count} rounds did not come about"
        time.sleep(0.5)


def await_file(path: Path, within_s: float = 120) -> None:
    end = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come about"
        time.sleep(0.05)


def await_end(network: Loopback, pid: int, within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while pid in network.processes():
        assert time.monotonic() < end, f"process {pid} does not end"
        time.sleep(0.2)


def remember(**figures: Any) -> None:
    file = os.environ.get("COCOFL_FAULT_FIGURES")
    print(json.dumps(figures))
    if file:
        with Path(file).open("a") as out:
            out.write(json.dumps(figures) + "\n")


@pytest.mark.parametrize(
    ("does", "fate"),
    [("garbage", "rejected"), ("foreign", "rejected"), ("hang", "late"), ("die", "lost")],
)
def test_a_node_that_misbehaves_costs_its_own_update_only(
    tmp_path: Path, does: str, fate: str
) -> None:
    with Loopback(tmp_path) as network:
        app, folder = make_app(network, rounds=2)
        for number in range(3):
            start(network, number, does=does if number == 2 else "")
        await_run(network, network.submit(app), folder)
    rounds = RunFolder(folder).rounds()
    assert [record.count("merged") for record in rounds] == [2, 2]
    assert all(record.count(fate) == 1 for record in rounds)
    remember(test="node", does=does, rounds=len(rounds), fates=[r.devices for r in rounds])


@pytest.mark.parametrize("secure", [False, True], ids=["open", "keys"])
def test_a_node_killed_in_training_comes_back(tmp_path: Path, secure: bool) -> None:
    mark = tmp_path / "training"
    with Loopback(tmp_path / "network", secure=secure) as network:
        app, folder = make_app(network, rounds=8)
        keys = [network.new_key(f"key{number}") if secure else None for number in range(3)]
        nodes = [start(network, number, keys[number]) for number in range(2)]
        nodes.append(start(network, 2, keys[2], does="tell", mark=str(mark)))
        run_id = network.submit(app)
        await_rounds(folder, 1)
        mark.unlink()
        await_file(mark)
        kill_group(nodes[2])
        starts = 0
        while len(RunFolder(folder).rounds()) < 8:
            if nodes[2].poll() is not None:  # as its systemd unit would
                nodes[2] = start(network, 2, keys[2])
                starts += 1
            time.sleep(10)
        await_run(network, run_id, folder)
    rounds = RunFolder(folder).rounds()
    merged = [record.count("merged") for record in rounds]
    # The second round may have begun before the mark was removed: then it dies in the third.
    assert merged[:2] in ([3, 2], [3, 3]), "it was there before"
    assert 2 in merged[1:3], "the round in which it died goes on without it"
    assert min(merged) >= 2
    assert merged[-1] == 3, "it is back"
    # Its key is refused until the SuperLink has noticed that the first one is dead.
    assert (starts > 1) == secure
    nodes_seen = {device[0] for record in rounds for device in record.devices}
    assert len(nodes_seen) == (3 if secure else 4), "with a key it is the same node as before"
    remember(test="killed and back", secure=secure, merged=merged, starts=starts)


def server_app(network: Loopback) -> int:
    """The ServerApp's process, which the SuperLink started."""
    (pid,) = [pid for pid, words in network.processes().items() if "flwr-serverapp" in words]
    return pid


@pytest.mark.parametrize("what", ["serverapp", "superlink"])
def test_a_server_killed_resumes_without_losing_a_round(tmp_path: Path, what: str) -> None:
    database = ["--database", str(tmp_path / "link.db")]
    with Loopback(tmp_path, link_options=database) as network:
        app, folder = make_app(network, rounds=6)
        for number in range(3):
            start(network, number)
        network.submit(app)
        await_rounds(folder, 2)
        time.sleep(random.uniform(0.5, 3))
        first = server_app(network)
        if what == "serverapp":
            os.kill(first, signal.SIGKILL)
        else:
            kill_group(network.link)
            network.link = network.start_link()
        # A ServerApp without its SuperLink ends by itself: two must not write into one folder.
        await_end(network, first)
        kept = RunFolder(folder).rounds()
        run_id = network.submit(app, {"flower.resume": True})
        await_run(network, run_id, folder)
    rounds = RunFolder(folder).rounds()
    assert [record.round for record in rounds] == list(range(1, 7))
    assert rounds[: len(kept)] == kept, "no finished round was lost or played again"
    assert [record.count("merged") for record in rounds] == [3] * 6
    remember(test="server killed", what=what, rounds=len(rounds), killed_after=len(kept))


PROGRAMS = {"link": "flower-superlink", "server": "flwr-serverapp", "nodes": "flower/node.py"}
APP_PROCESS = "cocofl.flower.app_process"


def memory_mb(network: Loopback) -> dict[str, int]:
    """What lasts as long as the deployment does."""
    found = dict.fromkeys(PROGRAMS, 0)
    for pid, words in network.processes().items():
        for part, program in PROGRAMS.items():
            if program in words:
                with suppress(OSError, IndexError):  # it ended, or is ending, while we looked
                    status = Path(f"/proc/{pid}/status").read_text()
                    found[part] += int(status.partition("VmRSS:")[2].split()[0])
    return {part: round(kilobytes / 1024) for part, kilobytes in found.items()}


def kill_something(network: Loopback, node: Any, kind: int) -> bool:
    """The device as a whole, its SuperNode, or what trains; whether there was such a thing."""
    if kind == 0:
        kill_group(node)
        return True
    if kind == 1:
        node.kill()
        node.wait()
        return True
    training = [pid for pid, words in network.processes().items() if APP_PROCESS in words]
    found = False
    for pid in training:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == node.pid:
                os.kill(pid, signal.SIGKILL)
                found = True
    return found


SOAK = {
    **CONFIG,
    "rounds": ROUNDS,
    "evaluation.every": 10,
    "flower.nodes": 2,
    "flower.per_round": 2,
    "flower.round_s": 60.0,
}


def soak_node(number: int, table: Path) -> dict[str, Any]:
    shares = dict.fromkeys(("time", "memory", "upload"), BUDGETS[number])
    return {"profile": str(table), **shares}


def soak(folder: Path, table: Path, kills: random.Random) -> dict[str, Any]:
    """Play rounds; every tenth something of a random device is killed, at a random moment."""
    begin = time.monotonic()
    killed, memory = [0, 0, 0], []
    with Loopback(folder) as network:
        app, run = make_app(network, **SOAK)
        configs = [soak_node(number, table) for number in range(3)]
        nodes = [start(network, number, **config) for number, config in enumerate(configs)]
        run_id = network.submit(app)
        for done in range(1, ROUNDS):
            await_rounds(run, done, within_s=900)
            if done % 5 == 0:
                memory.append(memory_mb(network))
            if done % 10 == 0:
                victim, kind = kills.randrange(3), kills.randrange(3)
                time.sleep(kills.uniform(0, 8))
                killed[kind] += kill_something(network, nodes[victim], kind)
                if nodes[victim].poll() is not None:
                    nodes[victim] = start(network, victim, **configs[victim])
        await_run(network, run_id, run)
        left = await_few(network)
    metrics = RunFolder(run).rounds()
    return {
        "rounds": len(metrics),
        "minutes": round((time.monotonic() - begin) / 60),
        "killed": dict(zip(("device", "supernode", "clientapp"), killed, strict=True)),
        "lost_rounds": ROUNDS - len(metrics),
        "merged": sum(record.count("merged") for record in metrics),
        **{
            fate: sum(record.count(fate) for record in metrics)
            for fate in ("late", "lost", "rejected")
        },
        "rounds_without_updates": sum(record.count("merged") == 0 for record in metrics),
        "accuracy": metrics[-1].scores["accuracy"],
        "memory_mb": [memory[index] for index in (1, len(memory) // 2, -1)],
        "processes_before_closing": left,
        "processes_after_closing": len(network.processes()),
    }


def await_few(network: Loopback, within_s: float = 120) -> dict[str, int]:
    """What runs when the run is over, after a while: how many of each program."""
    end = time.monotonic() + within_s
    while True:
        known = (*IDLE, "flwr-serverapp")
        programs = [
            next((name for name in known if name in words), words)
            for words in network.processes().values()
        ]
        found = Counter(programs)
        if found == IDLE or time.monotonic() > end:
            return dict(found)
        time.sleep(1)


IDLE = {"flower-superlink": 1, "flower-superexec": 1, "flower/node.py": 3, APP_PROCESS: 3}


def test_a_soak_with_kills_ends_as_well_as_an_undisturbed_run(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    settings = Settings("resnet10-digits", batch=16, options=(("tiny", True),))
    analytic_table(settings).save(table)
    wild = soak(tmp_path / "wild", table, random.Random(0))
    # Nothing disturbs devices that are functions.
    calm = {number: device(number, 3, **soak_node(number, table)) for number in range(3)}
    _, undisturbed, _ = play(tmp_path / "calm", calm, SOAK)
    remember(test="soak", undisturbed_accuracy=undisturbed[-1].scores["accuracy"], **wild)
    assert wild["lost_rounds"] == 0
    assert wild["rejected"] == 0, "nobody lied"
    assert wild["accuracy"] >= undisturbed[-1].scores["accuracy"] - 0.03
    assert wild["processes_before_closing"] == IDLE
    assert wild["processes_after_closing"] == 0
    first, _, last = wild["memory_mb"]
    for part in PROGRAMS:
        assert last[part] <= 1.1 * first[part] + 5, part
