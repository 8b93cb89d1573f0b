"""Real processes on loopback, with TLS and keys: one round trip, and who is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cocofl.experiment import Run
from cocofl.flower.app import write_app
from cocofl.flower.keys import make_certificates
from cocofl.flower.loopback import Loopback
from cocofl.flower.trial import await_run

CONFIG = {
    "rounds": 1,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "flower.nodes": 2,
    "flower.round_s": 300.0,
    "flower.resume": False,
}


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("secure")
    with Loopback(folder, secure=True) as network:
        yield network


def exit_code(process, within_s: float = 120) -> int:
    """A paused machine must not fail the test: it waits long, and normally returns at once."""
    return int(process.wait(timeout=within_s))


def log_of(network: Loopback, name: str) -> str:
    return (network.folder / f"{name}.log").read_text()


def test_tls_and_keys_let_the_right_ones_in_and_nobody_else(network: Loopback) -> None:
    strong, weak = ({"time": part, "memory": part, "upload": part} for part in (1.0, 0.4))
    for number, budget in enumerate((strong, weak)):
        node = {"partition-id": number, "num-partitions": 2, **budget}
        network.start_node(f"node{number}", node, key=network.new_key(f"key{number}"))
    stranger = network.start_node("stranger", key=network.new_key("stranger", register=False))
    anonymous = network.start_node("anonymous")
    other = make_certificates(network.folder / "other")
    key = network.new_key("fooled", register=False)
    fooled = network.start_node("fooled", key=key, authority=other.authority)

    folder = network.folder / "run"
    app = write_app(network.folder / "app", {**CONFIG, "flower.folder": str(folder)})
    await_run(network, network.submit(app), folder)
    run = Run.open(folder)
    (record,) = run.rounds
    assert record["merged"] == 2
    assert len(record["devices"]) == 2, "the others were never nodes"
    assert {span for _, _, span, _ in record["devices"]} > {"0:6"}
    assert record["accuracy"] > 0

    for refused in (stranger, anonymous, fooled):
        assert exit_code(refused) not in (0, -15)
    assert "Failed to activate" in log_of(network, "stranger")
    assert "CERTIFICATE_VERIFY_FAILED" in log_of(network, "fooled")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with Loopback(tmp_path) as network:
        network.start_node("node0")
        time.sleep(2)
        assert len(network.processes()) >= 2
    assert network.processes() == {}
