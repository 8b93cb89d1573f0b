"""Runs that are killed, and deployments among nodes that lie, dawdle and die.

    python bench/hostile_runs.py kills --count 50
    python bench/hostile_runs.py soak --rounds 200 --over-sockets 15 --secure

`kills` ends `cocofl run` with -9 at random moments, resumes it, and compares every byte of metrics
and model with those of a run that nobody touched. Most runs are forks of this process, which has
the libraries loaded already; every 25th is the command itself, with two workers.

`soak` plays a deployment whose server is thrown out at random moments and resumed, with nodes that
send garbage, NaN, huge, foreign and old updates, that withhold replies or never answer; first in
one process, then over real sockets with processes that are killed. No round that was finished may
be lost, punctual nodes must be merged in each, and memory must not grow.

Exit code 1 if anything of that fails. Seeds are fixed; moments are not, they are drawn as shares of
the time that an undisturbed run takes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from cocofl.config import Experiment
from cocofl.engine.executor import InProcess
from cocofl.experiment import simulate
from cocofl.flower import client, server
from cocofl.flower.loopback import NODE_PROGRAM, Loopback
from cocofl.flower.records import update_reply
from cocofl.flower.settings import write_app
from cocofl.flower.trial import await_run
from cocofl.runlog import METRICS, MODEL, RunFolder

TINY: dict[str, Any] = {
    "model.options.tiny": True,
    "training.batch": 16,
    "engine.kernels": "reference",
}
# --- runs that are killed ------------------------------------------------------------------------

KILLED = {
    **TINY,
    "rounds": 8,
    "devices.count": 60,
    "devices.per_round": 3,
    "evaluation.every": 4,
    "engine.kind": "serial",
    "engine.workers": 2,
    "engine.checkpoint_every": 2,
}
AS_A_COMMAND = 25
"""Every so many runs is a command."""


def kills(count: int, seed: int) -> bool:
    """Whether as many runs end as an undisturbed one, to the byte."""
    rng, begin = random.Random(seed), time.monotonic()
    experiment = Experiment().changed(KILLED)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "experiment.toml").write_text(experiment.to_toml())
        kinds: dict[str, Callable[[Path, bool], int]] = {
            "fork": lambda path, resume: _forked(experiment, path, resume),
            "command": lambda path, resume: _started(folder, path, resume),
        }
        wanted, lasts_s = {}, {}
        for kind, start in kinds.items():
            began = time.monotonic()
            _ended(start(folder / kind, False))
            lasts_s[kind] = time.monotonic() - began
            wanted[kind] = _result(folder / kind)
        equal, unfinished = 0, 0
        for number in range(count):
            kind = "command" if number % AS_A_COMMAND == 0 else "fork"
            path = folder / f"run{number}"
            pid = kinds[kind](path, False)
            time.sleep(rng.uniform(0, lasts_s[kind]))
            _kill(pid)
            unfinished += not (path / MODEL).exists()
            _ended(kinds[kind](path, True))
            equal += _result(path) == wanted["fork"] == wanted["command"]
    spent_s = time.monotonic() - begin
    print(
        f"kills: {count} runs killed with -9 at random moments, {unfinished} of them before their "
        f"end; resumed and equal to the byte: {equal} of {count} ({spent_s:.0f} s)"
    )
    return equal == count


def _forked(experiment: Experiment, path: Path, resume: bool) -> int:
    """A process that plays the run in place of its workers, too."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        executor = InProcess()
        simulate(experiment, out=path, resume=resume and path.exists(), executor=executor)
        os._exit(0)
    except BaseException as error:
        print(f"the run in {path}: {error!r}", file=sys.stderr)
        os._exit(1)


def _started(folder: Path, path: Path, resume: bool) -> int:
    """The command, with processes of its own."""
    words = [str(Path(sys.executable).with_name("cocofl")), "run", str(folder / "experiment.toml")]
    words += ["--out", str(path), "--no-report", *["--resume"] * (resume and path.exists())]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, stdout=quiet, stderr=quiet, process_group=0).pid


def _ended(pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"a run that nobody killed ended with {code}")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # its workers end by themselves
    os.waitpid(pid, 0)


def _result(path: Path) -> tuple[bytes, bytes]:
    return (path / METRICS).read_bytes(), (path / MODEL).read_bytes()


# --- a deployment in one process -----------------------------------------------------------------

SOAK = {
    **TINY,
    "evaluation.every": 20,
    "flower.nodes": 2,
    "flower.round_s": 0.25,
    "flower.wait_s": 5.0,
    "flower.max_change": 3.0,
}
HONEST, HOSTILE = 3, 3


class Thrown(BaseException):
    """The server is thrown out, wherever it is."""


class Nodes(Grid):
    """Honest and hostile nodes as functions; what a hostile one does is drawn anew every round."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._replies = rng, dict[str, Message | None]()
        self._withheld: set[str] = set()
        self._first: dict[int, bytes] = {}
        self.did: Counter[str] = Counter()
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

    def get_node_ids(self) -> Iterable[int]:
        return range(1, HONEST + HOSTILE + 1)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self._replies, self._withheld = {}, set()
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = message.metadata.group_id
            self._replies[name] = self._reply(message)
        return list(self._replies)

    def _reply(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        honest = _honest(node, message)
        if node <= HONEST or self._rng.random() < 0.5:
            return honest
        does = self._rng.choice(["withhold", *MISCHIEF])
        self.did[does] += 1
        if does == "withhold":
            self._withheld.add(message.metadata.message_id)
            return None
        payload = honest.content.config_records["update"]["update"]
        assert isinstance(payload, bytes)
        return MISCHIEF[does](message, payload, self._first.setdefault(node, payload))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        (name,) = message_ids
        if name in self._withheld:
            time.sleep(2.0)  # far beyond the round
        reply = self._replies.get(name)
        return [] if reply is None else [reply]

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Any: ...

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Any: ...


def _honest(node: int, message: Message) -> Message:
    config: dict[str, bool | float | int | str] = {
        "partition-id": node - 1,
        "num-partitions": 24,
        "time": (1.0, 0.6, 0.35)[node % 3],
    }
    return client.app(message, Context(1, node, config, RecordDict(), {}))


def _values(payload: bytes, change: Callable[[Any], Any]) -> bytes:
    """The update with other values of its parameters."""
    begin = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8:begin])
    end = begin + header["F32"]["data_offsets"][1]
    values = np.frombuffer(payload[begin:end], np.float32)
    changed: bytes = change(values).astype(np.float32).tobytes()
    return payload[:begin] + changed + payload[end:]


MISCHIEF: dict[str, Callable[[Message, bytes, bytes], Message | None]] = {
    "silence": lambda *_: None,
    "garbage": lambda m, *_: Message(update_reply(b"\x80\x04garbage"), reply_to=m),
    "cut": lambda m, p, _: Message(update_reply(p[:-4]), reply_to=m),
    "nan": lambda m, p, _: Message(update_reply(_values(p, lambda v: v * np.nan)), reply_to=m),
    "huge": lambda m, p, _: Message(update_reply(_values(p, lambda v: 1e6 * v)), reply_to=m),
    "old": lambda m, _, first: Message(update_reply(first), reply_to=m),
    "foreign": lambda m, *_: Message(RecordDict({"x": ConfigRecord({"a": 1})}), reply_to=m),
    "error": lambda m, *_: Message(Error(2, "burns\nround 1: 9 merged"), reply_to=m),
}


def soak(rounds: int, seed: int, throws: int) -> bool:
    """Whether a deployment gets through in one process, thrown out many times."""
    # Every node is a device of this process: keep all of them.
    client._device = lru_cache(maxsize=HONEST + HOSTILE)(client._device.__wrapped__)
    rng, grid, begin = random.Random(seed), Nodes(random.Random(seed)), time.monotonic()
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "run")
        config = {**SOAK, "rounds": rounds, "flower.folder": str(folder.path)}
        thrown, lost, lasts_s = 0, 0, 4.0
        signal.signal(signal.SIGALRM, _throw)
        while not folder.is_complete:
            kept = folder.rounds() if folder.path.exists() else []
            resume = {"flower.resume": folder.path.exists()}
            if thrown < throws:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.5, 2) * lasts_s)
            watch = threading.Thread(target=_watch_memory, args=(memory, stop := threading.Event()))
            watch.start()
            try:
                server.main(grid, Context(1, 1, {}, RecordDict(), {**config, **resume}))
            except Thrown:
                thrown += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                stop.set()
                watch.join()
            # The last round may be written and not kept yet: then it is played again.
            lost += folder.rounds()[: max(0, len(kept) - 1)] != kept[: max(0, len(kept) - 1)]
        played = folder.rounds()
    honest = sum(
        one.device <= HONEST and one.fate in ("merged", "infeasible")
        for record in played
        for one in record.devices
    )
    spent_s, fates = time.monotonic() - begin, Counter(f for r in played for *_, f in r.devices)
    first, last = _quarters(memory)
    print(
        f"soak in one process: {len(played)} rounds of {HONEST} honest and {HOSTILE} hostile nodes "
        f"in {spent_s:.0f} s, thrown out {thrown} times; finished rounds lost: {lost}; honest "
        f"updates merged: {honest} of {HONEST * len(played)}; fates {dict(fates)}; memory in the "
        f"first quarter {first:.0f} MB, in the last {last:.0f} MB; threads "
        f"{threading.active_count()}; hostile nodes did {dict(grid.did)}"
    )
    is_whole = len(played) == rounds and lost == 0 and honest == HONEST * rounds
    return is_whole and last <= 1.1 * first + 10


def _throw(*_: object) -> None:
    raise Thrown


def _watch_memory(into: list[float], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        into.append(_memory_mb(os.getpid()))


def _memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _quarters(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and the last quarter."""
    part = max(1, len(values) // 4)
    return statistics.median(values[:part]), statistics.median(values[-part:])


# --- a deployment over real sockets --------------------------------------------------------------

OVER_SOCKETS = {
    **TINY,
    "evaluation.every": 4,
    "flower.nodes": 2,
    "flower.wait_s": 120.0,
}
LIES = """
import numpy as np
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from cocofl.flower.client import train as honest
from cocofl.flower.records import update_reply

app = ClientApp()
calls = 0


@app.train()
def train(message, context):
    global calls
    calls += 1
    if context.node_config.get("lies") and calls % 2:
        return Message(update_reply(b"garbage"), reply_to=message)
    return honest(message, context)
"""
WITHHOLDS = f"""
import itertools, runpy
from flwr.supercore.inflatable import inflatable_utils
push, count = inflatable_utils.push_object_contents_from_iterable, itertools.count()
def sometimes(*words, **more):
    if next(count) % 5 != 3:
        push(*words, **more)
inflatable_utils.push_object_contents_from_iterable = sometimes
runpy.run_path({NODE_PROGRAM[-1]!r}, run_name="__main__")
"""
"""A node that delivers nothing of every fifth reply that it announces."""


def soak_over_sockets(rounds: int, seed: int, round_s: float, secure: bool) -> bool:
    """Whether a deployment of real processes gets through, some of which are killed or lie."""
    rng, begin, memory, killed = random.Random(seed), time.monotonic(), list[float](), 0
    with (
        tempfile.TemporaryDirectory() as temporary,
        Loopback(Path(temporary) / "network", secure=secure) as network,
    ):
        folder = RunFolder(Path(temporary) / "run")
        config = {**OVER_SOCKETS, "rounds": rounds, "flower.folder": str(folder.path)}
        config["flower.round_s"] = round_s
        app = write_app(Path(temporary) / "app", config)
        (app / "lies.py").write_text(LIES)
        text = (app / "pyproject.toml").read_text().replace("cocofl.flower.client:app", "lies:app")
        (app / "pyproject.toml").write_text(text)
        keys = [network.new_key(f"key{number}") if secure else None for number in range(4)]

        def start(number: int) -> Any:
            whole = {"partition-id": number, "num-partitions": 24, "trust": "lies"}
            program = [sys.executable, "-P", "-c", WITHHOLDS] if number == 3 else NODE_PROGRAM
            whole |= {"lies": True} if number == 2 else {}
            return network.start_node(f"node{number}", whole, key=keys[number], program=program)

        nodes = [start(number) for number in range(4)]
        run_id = network.submit(app)

        def on_round(record: Any) -> None:
            nonlocal killed
            servers = [pid for pid, w in network.processes().items() if "flwr-serverapp" in w]
            memory.extend(_memory_mb(pid) for pid in servers)
            for number, node in enumerate(nodes):  # as its systemd unit would
                if node.poll() is not None:
                    nodes[number] = start(number)
            # The SuperLink takes a dead node for alive for a minute, in which every round lasts as
            # long as it may: only one is killed as a whole, near the end.
            victim = nodes[rng.choice((1, 2))].pid
            if record.round == rounds - 2:
                os.killpg(victim, signal.SIGKILL)
                killed += 1
            elif record.round % 3 == 2:
                killed += _kill_app(network, victim)

        await_run(network, run_id, folder.path, on_round)
        played, timing = folder.rounds(), folder.timing()
    fates, spent_s = Counter(f for r in played for *_, f in r.devices), time.monotonic() - begin
    longest_s, allowed_s = max(one["train_s"] for one in timing), round_s + 2
    # The first round waits for devices to load their libraries.
    empty = sum(record.count("merged") == 0 for record in played[1:])
    first, last = _quarters(memory)
    print(
        f"soak over {'TLS' if secure else 'sockets'}: {len(played)} rounds in {spent_s:.0f} s, "
        f"{killed} kills of nodes or of what trains there; fates {dict(fates)}; rounds without an "
        f"update {empty}; longest round {longest_s:.1f} s of {allowed_s:g} s allowed; the "
        f"ServerApp's memory in the first quarter {first:.0f} MB, in the last {last:.0f} MB"
    )
    is_whole = len(played) == rounds and empty == 0 and longest_s <= allowed_s
    return is_whole and last <= 1.1 * first + 10


def _kill_app(network: Loopback, group: int) -> int:
    """Kill the process in which a node trains, if there is one."""
    for pid, words in network.processes().items():
        with suppress(ProcessLookupError):
            if "cocofl.flower.app_process" in words and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGKILL)
                return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Play what is asked for; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("all", "kills", "soak"), default="all")
    parser.add_argument("--count", type=int, default=50, help="how many runs are killed")
    parser.add_argument("--rounds", type=int, default=200, help="of the soak in one process")
    parser.add_argument("--throws", type=int, default=12, help="how often its server is thrown out")
    parser.add_argument("--over-sockets", type=int, default=15, help="rounds over real sockets")
    parser.add_argument("--round-s", type=float, default=12.0, help="how long these may take")
    parser.add_argument("--secure", action="store_true", help="with TLS and keys")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    good = True
    if options.what != "soak":
        good &= kills(options.count, options.seed)
    if options.what != "kills" and options.rounds:
        good &= soak(options.rounds, options.seed, options.throws)
    if options.what != "kills" and options.over_sockets:
        good &= soak_over_sockets(
            options.over_sockets, options.seed, options.round_s, options.secure
        )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
