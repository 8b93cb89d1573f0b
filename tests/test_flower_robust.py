"""What one hostile device of a deployment can do to the model, if nothing is configured."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from cocofl.flower.records import update_reply
from tests import flower_grid
from tests.flower_grid import Node, device

TINY = {
    "rounds": 2,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 2,
    "engine.kernels": "reference",
    "flower.round_s": 0.05,
    "flower.wait_s": 0.01,
}


def with_last_scale(value: float) -> Node:
    """An honest device but for its last scale, with which an update ends."""
    honest = device(3, 4)

    def answer(message: Message) -> Message:
        payload = honest(message).content.config_records["update"]["update"]
        return Message(update_reply(payload[:-4] + struct.pack("<f", value)), reply_to=message)

    return answer


def play(folder: Path, hostile: Node, **config: Any):
    nodes = {number + 1: device(number, 4) for number in range(3)} | {4: hostile}
    return flower_grid.play(folder, nodes, TINY | config)


def largest_scale(state: dict[str, torch.Tensor]) -> float:
    return max(float(tensor) for key, tensor in state.items() if key.startswith("scales."))


def test_a_scale_out_of_all_proportion_is_refused(tmp_path: Path) -> None:
    state, rounds, _ = play(tmp_path, with_last_scale(3e38))
    assert [record.count("merged") for record in rounds] == [3, 3], "nobody else is blamed"
    assert rounds[0].reasons[0][0] == 4
    assert "is 3e+38; expected a number from 1e-20 to 1e+06" in rounds[0].reasons[0][1]
    assert largest_scale(state) < 1


def test_a_scale_that_is_merely_wrong_changes_nothing(tmp_path: Path) -> None:
    state, rounds, _ = play(tmp_path / "default", with_last_scale(1e5))
    assert [record.count("merged") for record in rounds] == [4, 4]
    assert largest_scale(state) < 1
    assert [one.device for one in rounds[1].figures if one.outlier] == [4], "and it is seen who"
    state, _, _ = play(tmp_path / "plain", with_last_scale(1e5), **{"merge.rules": "[]"})
    assert largest_scale(state) > 1e4


def test_a_bad_rule_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="unknown rule of merging 'medain'"):
        play(tmp_path, with_last_scale(0.1), **{"merge.rules": '["medain"]'})
