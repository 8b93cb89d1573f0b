from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Experiment, chain_state, simulate, split
from cocofl.codecs import CODECS, Codec, Identity, Int8, TopK
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import CocoflError, InvalidSetting, RejectedUpdate
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
    sizes = [run.rounds[0].bytes_up for run in (serial, cohort, plain)]
    state = Setup(own).chain.state_dict().items()
    as_they_are = sum(t.nbytes for key, t in state if "running_" in key)
    assert sizes[0] == sizes[1] == (sizes[2] + 3 * as_they_are) // 2, "of three devices"
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
    assert half.upload.tolist() == pytest.approx((plain.upload / 2).tolist(), rel=0.2)
    assert (half.upload >= plain.upload / 2).all(), "norm statistics are sent as they are"
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


# --- those that ship -----------------------------------------------------------------------------

SHAPES = ((5, 3), (7,), (4, 3, 3, 3), (0,), (1,))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_sizes_are_known_beforehand_and_small_changes_come_through(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    by, rng = codec(name), np.random.default_rng(0)
    start = torch.from_numpy(rng.normal(size=shape)).to(dtype)
    tensor = start + torch.from_numpy(rng.normal(scale=0.01, size=shape)).to(dtype)
    payload = by.encode(tensor, start, rng)
    assert len(payload) == by.size_bytes(shape, dtype)
    found = by.decode(payload, start)
    assert found.shape == tensor.shape
    assert found.dtype == dtype
    if not by.keeps_error:
        torch.testing.assert_close(found, tensor, atol=5e-4, rtol=0)


def test_what_the_server_has_already_costs_nothing_by_any_codec() -> None:
    """As where APF froze most parameters; a rule's memory is sent as it is."""
    start, rng = {"w": torch.zeros(8, 100)}, np.random.default_rng(0)
    sizes = [
        transmitted(
            Int8(), Contribution({"w": torch.ones(8, 100)}, 5, sent_bytes=size), start, rng, {}
        ).nbytes
        for size in (320, 3200, 3300)
    ]
    assert sizes == [83, 832, 932]  # 800 codes and 8 scales; a tenth of these; and 100 bytes


def test_int8_is_right_on_average() -> None:
    change = torch.tensor([[1.0, 0.3, -0.0041], [0.02, -0.013, 0.0]], dtype=torch.float64)
    start, rng, by = torch.zeros(2, 3, dtype=torch.float64), np.random.default_rng(0), Int8()
    found = [by.decode(by.encode(change, start, rng), start) for _ in range(4000)]
    mean = torch.stack(found).mean(0)
    torch.testing.assert_close(mean, change, atol=5e-4, rtol=1e-6)
    scales = torch.tensor([[1.0], [0.02]], dtype=torch.float64) / 127
    codes = found[0] / scales
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)


def test_topk_says_the_largest_changes_and_the_others_later() -> None:
    by, start, rng = TopK(0.25), torch.zeros(8), np.random.default_rng(0)
    change = torch.tensor([0.1, -5.0, 0.2, 3.0, 0.0, 0.3, -0.4, 0.25])
    memory: dict[str, Any] = {}
    said = torch.zeros(8)
    for round_index in range(40):
        sent = transmitted(by, Contribution({"w": start + change}, 1), {"w": start}, rng, memory)
        memory, said = sent.memory, said + sent.tensors["w"]
        if round_index == 0:
            assert sent.tensors["w"].tolist() == [0.0, -5.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
        assert int((sent.tensors["w"] != 0).sum()) <= 2
        assert sent.nbytes == 16
    # Nothing is lost: what was said and what waits are what was meant.
    torch.testing.assert_close(said + memory[ERROR]["w"], 40 * change, atol=1e-3, rtol=0)


@pytest.mark.parametrize("places", [[0, 8], [-1, 2], [3, 3], [5, 1]])
def test_hostile_places_are_refused(places: list[int]) -> None:
    payload = np.array(places, np.int32).tobytes() + np.ones(2, np.float32).tobytes()
    with pytest.raises(ValueError, match="place"):
        TopK(0.25).decode(payload, torch.zeros(8))


@pytest.mark.parametrize("name", ["float16", "int8", "topk"])
def test_shipped_codecs_on_both_engines_and_after_an_interruption(
    name: str, tmp_path: Path
) -> None:
    changes = {"strategy": {"name": "cocofl", "variant": "ff"}, "training": {"batch": 64}}
    own = Experiment.parse(TINY | changes | {"upload": {"codec": name, "fraction": 0.1}})
    whole = simulate(own, out=tmp_path / "whole", executor=InProcess())
    cohort = simulate(
        own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", precision="fp32")
    )
    sizes = [record.bytes_up for record in whole.rounds]
    assert sizes == [record.bytes_up for record in cohort.rounds]
    plain = simulate(Experiment.parse(TINY | changes), out=tmp_path / "plain", executor=InProcess())
    assert sum(sizes) < 0.6 * sum(record.bytes_up for record in plain.rounds)

    class Stop:
        def on_round(self, _record: Any) -> None:
            raise KeyboardInterrupt

        def on_end(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        simulate(own, out=tmp_path / "cut", executor=InProcess(), watchers=[Stop()])
    again = simulate(own, out=tmp_path / "cut", executor=InProcess(), resume=True)
    assert all(torch.equal(t, whole.state[key]) for key, t in again.state.items())


@pytest.mark.parametrize(
    ("strategy", "name", "why"),
    [
        ("heterofl", "topk", "send slices of tensors"),
        ("fjord", "float16_codec:float16", "send slices of tensors"),
        ("centralized", "int8", "nothing is uploaded"),
        ("fedbuff", "topk", "'fedbuff' does not wait for them"),
        ("fedasync", "topk", "'fedasync' does not wait for them"),
    ],
)
def test_a_codec_that_a_strategy_cannot_use(strategy: str, name: str, why: str) -> None:
    own = Experiment.parse(TINY | {"strategy": {"name": strategy}, "upload": {"codec": name}})
    with pytest.raises(CocoflError, match=why):
        Setup(own)


@pytest.mark.slow
def test_a_narrow_network_sends_in_few_bytes(tmp_path: Path) -> None:
    changes = {"strategy": {"name": "heterofl"}, "rounds": 1, "tables": {"widths": "analytic"}}
    sizes = {}
    for name in ("identity", "int8"):
        own = Experiment.parse(TINY | changes | {"upload": {"codec": name}})
        sizes[name] = simulate(own, out=tmp_path / name, executor=InProcess()).rounds[0].bytes_up
    assert sizes["int8"] < 0.4 * sizes["identity"]


def test_a_share_beyond_all_is_refused() -> None:
    with pytest.raises(CocoflError, match=r"upload\.fraction is 1\.5"):
        Experiment().changed({"upload.fraction": 1.5})
    assert isinstance(codec("topk"), Codec)
