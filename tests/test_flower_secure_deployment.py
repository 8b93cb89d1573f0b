"""Secure aggregation between real processes, one of which leaves when others have masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cocofl.experiment import Run
from cocofl.fl.state import is_scale
from cocofl.flower.loopback import Loopback
from cocofl.flower.settings import write_app
from cocofl.flower.trial import await_run
from tests import flower_grid

CONFIG: dict[str, Any] = {
    "rounds": 2,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "flower.nodes": 4,
    "flower.round_s": 300.0,
}
LEAVING = """
from cocofl.flower import client
from cocofl.flower.secure_round import MASK

app = client.app


class Leaving(client.Device):
    def take_part(self, stage, payload, kept, asked):
        if stage == MASK and self._node["partition-id"] == 0:
            raise RuntimeError("gone, after its secrets were shared")
        return super().take_part(stage, payload, kept, asked)


client.Device = Leaving
"""


@pytest.mark.slow
def test_a_device_that_fails_after_it_has_shared_is_recovered_from(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = {**CONFIG, "flower.secure_aggregation": True, "flower.folder": str(folder)}
    app = write_app(tmp_path / "app", config)
    (app / "leaving.py").write_text(LEAVING)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("cocofl.flower.client:app", "leaving:app"))
    with Loopback(tmp_path / "network", secure=True) as network:
        for number in range(4):
            node = {"partition-id": number, "num-partitions": 4, "trust": "leaving"}
            node["secure-aggregation"] = True
            network.start_node(f"node{number}", node, key=network.new_key(f"key{number}"))
        await_run(network, network.submit(app), folder)
    run = Run.open(folder)
    for record in run.rounds:
        assert (record.count("merged"), record.count("lost")) == (3, 1)
        assert "gone, after its secrets were shared" in record.reasons[0][1]

    there = {number: flower_grid.device(number, 4) for number in (1, 2, 3)}
    alike = {**CONFIG, "merge.rules": "[]", "flower.nodes": 3, "flower.round_s": 1.0}
    plain, _, _ = flower_grid.play(tmp_path / "plain", there, alike)
    assert run.state.keys() == plain.keys()
    for key, tensor in plain.items():
        if not is_scale(key):
            assert float((run.state[key] - tensor).abs().max()) < 1e-5, key
