"""Secure aggregation and privacy over a grid: what comes out is what plain merging gives.

The grid here hands messages straight to functions; real processes are in other files.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from cocofl.errors import InvalidExperiment
from cocofl.fl.state import is_scale
from cocofl.flower import client
from cocofl.flower.secure_round import MASK, OFFER, REVEAL, SHARE, stage_of
from tests import flower_grid
from tests.extensions import write_extensions
from tests.flower_grid import Node

TINY = {
    "rounds": 1,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "merge.rules": "[]",
    "flower.nodes": 4,
    "flower.round_s": 0.05,
    "flower.wait_s": 0.01,
}
SECURE = {**TINY, "merge.rules": '["auto"]', "flower.secure_aggregation": True}
WEAK = dict.fromkeys(("time", "memory", "upload"), 0.4)


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine each message is for another device, and none would be kept."""
    monkeypatch.setattr(client, "_device", lru_cache(8)(client._device.__wrapped__))


def device(number: int, leaves: str = "", **config: Any) -> Node:
    """A device that keeps what Flower keeps for it, and may be gone from a stage on."""
    own = {"partition-id": number, "num-partitions": 4, **config}
    context = Context(1, number, own, RecordDict(), {})

    def answer(message: Message) -> Message | None:
        stage = stage_of(message.content)
        return None if stage and stage[0] == leaves else client.app(message, context)

    return answer


def devices(**of: dict[str, Any]) -> dict[int, Node]:
    return {10 + number: device(number, **of.get(f"d{number}", {})) for number in range(4)}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((t - other[key]).abs().max()) for key, t in one.items() if not is_scale(key))


def test_the_model_is_that_of_plain_merging_and_the_server_saw_sums_only(tmp_path: Path) -> None:
    nodes = {"d3": WEAK}
    plain, (told,), _ = flower_grid.play(tmp_path / "plain", devices(**nodes), TINY)
    state, (record,), grid = flower_grid.play(tmp_path / "secure", devices(**nodes), SECURE)
    assert record.count("merged") == told.count("merged") == 4
    # One weak device trains a block or so; the strong ones train all: at least three for each.
    assert [one.work for one in record.devices] == [one.work for one in told.devices]
    assert apart(state, plain) < 2e-7
    scales = [key for key in plain if is_scale(key)]
    assert scales
    for key in scales:
        assert float(state[key]) == pytest.approx(float(plain[key]), rel=1e-5)
    assert record.loss == pytest.approx(told.loss, abs=1e-5)
    assert record.figures is None
    assert record.reasons == []
    assert len(grid.sent) == 4 * 4
    # 8 bytes for a number instead of 4, and two for each scale.
    assert record.bytes_up < 2.5 * told.bytes_up


@pytest.mark.parametrize(
    ("stage", "fate"),
    [
        pytest.param(SHARE, "late", marks=pytest.mark.slow, id="before anything is masked"),
        pytest.param(MASK, "late", id="while others mask"),
        pytest.param(REVEAL, "merged", marks=pytest.mark.slow, id="after it has masked"),
    ],
)
def test_a_device_that_leaves_is_left_out_or_is_in_the_sum_already(
    stage: str, fate: str, tmp_path: Path
) -> None:
    nodes = devices(d0={"leaves": stage})
    state, (record,), _ = flower_grid.play(tmp_path / "secure", nodes, SECURE)
    assert [one.fate for one in record.devices] == [fate, "merged", "merged", "merged"]
    there = {node: one for node, one in devices().items() if fate == "merged" or node > 10}
    config = {**TINY, "flower.nodes": len(there)}
    plain, _, _ = flower_grid.play(tmp_path / "plain", there, config)
    assert apart(state, plain) < 2e-7


def test_with_too_few_devices_the_model_stays_as_it_is(tmp_path: Path) -> None:
    gone = {"d0": {"leaves": MASK}, "d1": {"leaves": MASK}}
    state, (record,), _ = flower_grid.play(tmp_path / "run", devices(**gone), SECURE)
    assert [one.fate for one in record.devices] == ["late", "late", "lost", "lost"]
    assert record.reasons is not None
    assert "2 devices are left of 4; 3 are needed" in record.reasons[0][1]
    fresh, (none,), _ = flower_grid.play(
        tmp_path / "nobody", devices(**{f"d{n}": {"leaves": OFFER} for n in range(4)}), SECURE
    )
    assert none.count("late") == 4
    assert apart(state, fresh) == 0.0


def test_a_device_may_insist_on_masks(tmp_path: Path) -> None:
    nodes = devices(d0={"secure-aggregation": True})
    with pytest.raises(InvalidExperiment, match="sends nothing unmasked"):
        flower_grid.play(tmp_path / "plain", nodes, TINY)
    nodes = devices(d0={"secure-aggregation": True})
    _, (record,), _ = flower_grid.play(tmp_path / "secure", nodes, SECURE)
    assert record.count("merged") == 4


PRIVATE = {"privacy.clip": 0.5, "privacy.noise": 0.01, "flower.per_round": 4}


def test_with_both_the_noise_is_on_the_sum_of_what_devices_have_clipped(tmp_path: Path) -> None:
    runs = {
        name: flower_grid.play(tmp_path / name, devices(), {**config, **PRIVATE})
        for name, config in (("plain", TINY), ("secure", SECURE))
    }
    for _, (record,), _ in runs.values():
        assert record.count("merged") == 4
        assert record.epsilon is not None
        assert record.epsilon > 1000
        assert (record.loss, record.figures) == (None, None)
    (plain, *_), (secure, *_) = runs.values()
    assert not any(map(is_scale, secure))
    # Noise of 0.01 · √2 · clip / 4 that nobody can repeat is between them, and nothing else.
    difference = torch.cat([(plain[k] - secure[k]).ravel() for k in plain if "running" not in k])
    spread = 0.01 * 2**0.5 * 0.5 / 4
    assert float(difference.std()) == pytest.approx(2**0.5 * spread, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"upload.codec": "float16_codec:float16"}, "encoded updates cannot be added up"),
        ({"flower.max_samples": 2**21}, "at most 1048576 per device"),
        ({"flower.secure_least": 2}, "flower.secure_least is 2"),
        ({"flower.quarantine": 3}, "nobody looks at single updates"),
        ({"privacy.clip": 1.0}, "give flower.per_round"),
        ({"merge.rules": '["median"]'}, "learns sums only"),
        ({"strategy.name": "scaffold:scaffold", "strategy.devices": 4}, "wants more"),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_extensions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidExperiment, match=reason):
        flower_grid.play(tmp_path / "run", {}, {**SECURE, **changes})
    assert not (tmp_path / "run").exists()
