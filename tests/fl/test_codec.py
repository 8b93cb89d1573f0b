from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Experiment, chain_state, simulate, split
from cocofl.codecs import Identity
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidSetting, RejectedUpdate
from cocofl.experiment import Setup
from cocofl.fl.codec import ERROR, codec, transmitted
from cocofl.fl.state import Contribution
from cocofl.flower.updates import Contract
from tests.extensions import write_extensions

TINY: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "resnet10-digits", "options": {"tiny": True}},
    "devices": {"count": 6, "per_round": 3},
    "strategy": {"name": "fedavg-full"},
    "training": {"batch": 16},
    "evaluation": {"every": 2},
    "tables": {"spans": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("extensions")
    write_extensions(folder)
    monkeypatch.syspath_prepend(str(folder))


def test_identity_is_what_was_sent() -> None:
    tensor, rng = torch.randn(3, 2), np.random.default_rng(0)
    payload = Identity().encode(tensor, tensor, rng)
    assert len(payload) == Identity().size_bytes(tensor.shape, tensor.dtype) == 24
    assert torch.equal(Identity().decode(payload, torch.zeros(3, 2)), tensor)


def test_what_a_codec_loses_is_said_in_the_next_round() -> None:
    by, start, rng = codec("float16_codec:float16"), torch.zeros(4), np.random.default_rng(0)
    meant = torch.full((4,), 0.1)
    memory: dict[str, Any] = {}
    said = []
    for _ in range(2):
        sent = transmitted(by, Contribution({"w": meant}, 1), {"w": start}, rng, memory)
        memory, received = sent.memory, sent.tensors["w"]
        said.append(received)
        assert sent.nbytes == 8
    assert not torch.equal(said[0], meant)
    assert set(memory) == {ERROR}
    torch.testing.assert_close(said[0] + said[1], 2 * meant, rtol=0, atol=2e-5)


def test_both_engines_charge_and_merge_what_is_really_sent(tmp_path: Path) -> None:
    one = TINY | {"rounds": 1}  # in a second one float32 of two engines drifts apart by itself
    own = Experiment.parse(one | {"upload": {"codec": "float16_codec:float16"}})
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(
        own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", precision="fp32")
    )
    plain = simulate(Experiment.parse(one), out=tmp_path / "plain", executor=InProcess())
    sizes = [[record.bytes_up for record in run.rounds] for run in (serial, cohort, plain)]
    assert sizes[0] == sizes[1] == [size // 2 for size in sizes[2]]
    apart = max(float((t - cohort.state[key]).abs().max()) for key, t in serial.state.items())
    moved = max(float((t - plain.state[key]).abs().max()) for key, t in serial.state.items())
    assert apart < 0.25 * moved


def test_a_codec_serves_devices_that_train_a_few_blocks(tmp_path: Path) -> None:
    changes = {"strategy": {"name": "cocofl", "variant": "ff"}, "rounds": 1}
    own = Experiment.parse(TINY | changes | {"upload": {"codec": "float16_codec:float16"}})
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    executor = CohortExecutor("cpu", precision="fp32")
    cohort = simulate(own, out=tmp_path / "cohort", executor=executor)
    assert len({one[2] for one in serial.rounds[0].devices}) > 1
    assert serial.rounds[0].bytes_up == cohort.rounds[0].bytes_up
    for key, tensor in serial.state.items():
        torch.testing.assert_close(tensor, cohort.state[key], atol=1e-3, rtol=0)


def test_budgets_are_charged_for_what_is_sent() -> None:
    plain, half = (
        Setup(Experiment.parse(TINY | {"upload": {"codec": name}})).tables.spans("qff")
        for name in ("identity", "float16_codec:float16")
    )
    np.testing.assert_allclose(half.upload, plain.upload / 2)
    assert np.array_equal(half.time, plain.time)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(InvalidSetting, match=r"unknown codec 'identiti' .did you mean identity"):
        codec("identiti")
    with pytest.raises(InvalidSetting, match=r"gives a dict; expected a cocofl\.codecs\.Codec"):
        codec("builtins:dict")


def test_a_deployed_device_sends_what_its_codec_makes() -> None:
    by = codec("float16_codec:float16")
    chain = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
    state = {key: torch.zeros_like(t) for key, t in chain_state(chain).items()}
    trained = {"2.weight": torch.full((2, 8), 0.1), "2.bias": torch.full((2,), 0.5)}
    rng = np.random.default_rng(0)
    sent = transmitted(by, Contribution(trained, 5), state, rng, {})
    plain = Contract(chain).encode(Contribution(trained, 5))
    contract = Contract(chain, codec=by)
    payload = contract.encode(sent)
    assert len(plain) - len(payload) > 20
    blocks, received = contract.decode(payload, state)
    assert str(blocks) == "1:2"
    assert all(torch.equal(received.tensors[key], t) for key, t in sent.tensors.items())
    for wrong in (payload[:-1], plain):
        with pytest.raises(RejectedUpdate):
            contract.decode(wrong, state)
