"""The server among devices that do as they like, and the device that decides by itself.

The grid here hands messages straight to functions; real processes are in other files.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from cocofl.config import Experiment
from cocofl.errors import (
    CocoflError,
    InvalidBudget,
    InvalidExperiment,
    RunFolderProblem,
    Untrusted,
)
from cocofl.experiment import Setup
from cocofl.flower.quarantine import Quarantine
from cocofl.flower.records import packed, state_record, unpacked, update_reply
from cocofl.flower.settings import Deployment, node_budget, read_run_config, run_config, write_app
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.subject import Settings
from cocofl.runlog import DeviceFigures, RoundRecord, RunFolder, only_writer
from tests import flower_grid
from tests.extensions import write_extensions
from tests.flower_grid import Node, device
from tests.states import same_state

TINY = {
    "rounds": 2,
    "model.options.tiny": True,
    "training.batch": 16,
    "evaluation.every": 1,
    "engine.kernels": "reference",
    "flower.round_s": 0.05,
    "flower.wait_s": 0.01,
}


def play(folder: Path, nodes: dict[int, Node], **changes: Any):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return flower_grid.play(folder, nodes, {**TINY, **dotted})


def test_devices_train_what_fits_and_send_only_that(tmp_path: Path) -> None:
    weak = dict.fromkeys(("time", "memory", "upload"), 0.4)
    state, rounds, grid = play(tmp_path / "run", {7: device(0), 9: device(1, **weak)})
    assert [record.count("merged") for record in rounds] == [2, 2]
    spans = {record.devices[0].work for record in rounds}
    assert spans == {"0:6"}, "the strong one trains everything"
    assert all(record.devices[1].work != "0:6" for record in rounds)
    assert rounds[-1].scores["accuracy"] > 0
    assert rounds[0].bytes_broadcast > rounds[0].bytes_up > 0
    assert all(bool(torch.isfinite(t).all()) for t in state.values())
    asked = str(grid.sent[0].content.config_records)
    assert "0.4" not in asked, "nobody told the server"


def test_the_reply_is_hardly_larger_than_the_update(tmp_path: Path) -> None:
    """All that Flower puts around it included."""
    changes = {"model.options.tiny": False, "rounds": 1, "flower.nodes": 1}
    config = {**TINY, **changes}
    _, (record,), grid = flower_grid.play(tmp_path / "run", {1: device(0, 30)}, config)
    reply = grid.replies["0"]
    whole = sum(len(each.deflate()) for each in get_all_nested_objects(reply).values())
    assert record.count("merged") == 1
    assert whole <= 1.1 * record.bytes_up


@pytest.mark.parametrize(
    "key",
    [
        "model.name",
        "data.name",
        "training.loss",
        "training.optimizer",
        "strategy.name",
        "strategy.selector",
        "upload.codec",
        "evaluation.metrics",
    ],
)
def test_a_device_imports_only_what_its_own_config_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Whatever a server names, by the way that messages go; a module that is imported tells."""
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path(__file__ + '.ran').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    _, _, grid = play(tmp_path / "run", {1: lambda _: None}, rounds=1, flower__nodes=1)
    state, settings = unpacked(grid.sent[0])
    value: Any = ["evil:thing"] if key == "evaluation.metrics" else "evil:thing"
    changed = Experiment.parse(settings["experiment"]).changed({key: value})
    request = Message(
        packed(state_record(state), settings | {"experiment": changed.to_dict()}), 1, "train"
    )
    with pytest.raises(Untrusted, match="would run code of the module 'evil'"):
        device(0)(request)
    assert not (tmp_path / "evil.py.ran").exists()
    with pytest.raises(CocoflError, match="evil"):  # it is imported, and has no such thing
        device(0, trust="evil")(request)
    assert (tmp_path / "evil.py.ran").exists()


def test_a_strategy_of_ones_own_is_deployed_as_it_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_extensions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    moved = []
    for mu in (0.0, 3.0):
        config = {
            **TINY,
            "rounds": 1,
            "strategy.name": "capped_pull:capped_pull",
            "strategy.mu": mu,
        }
        nodes = {number: device(number - 1, trust="capped_pull") for number in (1, 2)}
        state, (record,), _ = flower_grid.play(tmp_path / f"mu{mu}", nodes, config)
        assert record.count("merged") == 2
        moved.append(state["stem.0.weight"])
    assert not torch.equal(*moved), "the rule is obeyed on devices, too"


def test_a_device_that_would_remember_says_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_extensions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {**TINY, "rounds": 1, "strategy.name": "scaffold:scaffold"}
    nodes = {number: device(number - 1, trust="scaffold") for number in (1, 2)}
    with pytest.raises(InvalidExperiment, match="which only a simulation can do"):
        flower_grid.play(tmp_path / "run", nodes, config)


HONEST = device(0)


def payload_of(message: Message) -> bytes:
    return HONEST(message).content.config_records["update"]["update"]


def replied(message: Message, payload: bytes) -> Message:
    return Message(update_reply(payload), reply_to=message)


def spoilt(message: Message) -> Message:
    payload = bytearray(payload_of(message))
    payload[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    return replied(message, bytes(payload))


def foreign(message: Message) -> Message:
    record = ArrayRecord({"conv.weight": Array(torch.ones(3).numpy())})
    return Message(RecordDict({"arrays": record}), reply_to=message)


def typed_wrongly(message: Message) -> Message:
    return Message(RecordDict({"update": ConfigRecord({"update": [1.0, 2.0]})}), reply_to=message)


def with_more(message: Message) -> Message:
    content = update_reply(payload_of(message))
    content["gift"] = ConfigRecord({"a": 1})
    return Message(content, reply_to=message)


@pytest.mark.parametrize(
    ("answer", "fate", "reason"),
    [
        (lambda m: None, "late", None),
        (lambda m: replied(m, b"\x80\x04garbage"), "rejected", "format"),
        (lambda m: replied(m, payload_of(m)[:-4]), "rejected", "size"),
        (spoilt, "rejected", "values"),
        (foreign, "rejected", "format"),
        (typed_wrongly, "rejected", "format"),
        (with_more, "rejected", "format"),
        (lambda m: ValueError("not a message at all"), "rejected", "format"),
        (lambda m: Message(Error(2, "it burns"), reply_to=m), "lost", "failed"),
        (lambda m: Message(Error(3, "expired"), reply_to=m), "late", None),
    ],
    ids=[
        "silence",
        "garbage",
        "cut",
        "nan",
        "foreign",
        "type",
        "more",
        "unreadable",
        "error",
        "old",
    ],
)
def test_one_bad_device_spoils_no_round(
    tmp_path: Path, answer: Node, fate: str, reason: str | None, caplog
) -> None:
    state, rounds, _ = play(tmp_path / "bad", {1: device(0), 2: answer}, rounds=1)
    assert (rounds[0].count("merged"), rounds[0].count(fate)) == (1, 1)
    if reason is not None:
        ((node, told),) = rounds[0].reasons
        assert node == 2
        assert told.startswith(reason)
        assert "node 2" in caplog.text, "it is in the log too"
    alone, _, _ = play(tmp_path / "alone", {1: device(0)}, rounds=1, flower__nodes=1)
    assert same_state(state, alone), "the model is what it is without the bad one"


def test_an_update_is_good_for_one_device_in_one_round_only(tmp_path: Path) -> None:
    """An old one sent again, one that another device made, one that says it is from another."""
    kept: list[bytes] = []

    def remembering(message: Message) -> Message:
        kept.append(payload_of(message))
        return replied(message, kept[-1])

    def posing(message: Message) -> Message:
        reply = HONEST(message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    nodes = {
        1: remembering,
        2: lambda message: replied(message, kept[0]),  # in round 1 it is node 1's
        3: posing,
    }
    _, rounds, _ = play(tmp_path / "run", nodes)
    assert [[one.fate for one in record.devices] for record in rounds] == [
        ["merged", "rejected", "rejected"]
    ] * 2
    told = [dict(record.reasons) for record in rounds]
    assert told[0][2] == "request: the update answers another request than this device's"
    assert told[1][2] == "request: the update is of round 1; asked was round 2"
    assert told[0][3] == "request: the reply is to another request"


def test_a_reply_that_is_never_delivered_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Flower pulls its parts for hours; the others are merged, and nothing piles up."""
    never = Event()

    class Withheld(flower_grid.Direct):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            (name,) = message_ids
            if self.sent[int(name)].metadata.dst_node_id == 1:
                never.wait()
            return super().pull_messages(message_ids)

    before = threading.active_count()
    nodes = {1: device(0), 2: device(1), 3: device(0)}
    _, rounds, _ = flower_grid.play(tmp_path / "run", nodes, TINY, Withheld)
    fates = [[one.fate for one in record.devices] for record in rounds]
    assert fates == [["late", "merged", "merged"]] * 2
    assert threading.active_count() <= before + 2, "one for each pull that never ends"
    never.set()


def test_what_a_device_says_forges_no_line_of_the_log(tmp_path: Path, caplog) -> None:
    evil = "it burns\r\n\x1b[2JINFO : round 1: 2 merged\u2028\u202e" + 10_000 * "x"
    answer = {2: lambda message: Message(Error(2, evil), reply_to=message)}
    _, (record,), _ = play(tmp_path / "run", {1: device(0), **answer}, rounds=1)
    ((node, told),) = record.reasons
    assert (node, len(told)) == (2, 300)
    assert told.isprintable()
    assert r"it burns\r\n\x1b[2JINFO : round 1: 2 merged\u2028\u202exx" in told
    assert all(line.isprintable() for line in caplog.messages)


def test_no_secret_of_the_command_line_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ServerApp is given its token as a word."""
    words = ["/venv/bin/flwr-serverapp", "--token", "c2VjcmV0", "--insecure"]
    monkeypatch.setattr(sys, "argv", words)
    play(tmp_path / "run", {1: device(0)}, rounds=1, flower__nodes=1)
    assert RunFolder(tmp_path / "run").about["command"] == "flwr-serverapp"
    assert not [f for f in (tmp_path / "run").iterdir() if b"c2VjcmV0" in f.read_bytes()]
    monkeypatch.setattr(sys, "argv", ["/venv/bin/cocofl", "run", "my file.toml"])
    assert Setup(Experiment()).about()["command"] == "cocofl run 'my file.toml'"


def scaled(message: Message) -> Message:
    """A device that sends 1.6 times the parameters that it has trained."""
    payload = payload_of(message)
    at = 8 + int.from_bytes(payload[:8], "little")
    end = at + json.loads(payload[8:at])["F32"]["data_offsets"][1]
    values = torch.frombuffer(bytearray(payload[at:end]), dtype=torch.float32)
    return replied(message, payload[:at] + (1.6 * values).numpy().tobytes() + payload[end:])


def test_a_node_that_stands_out_too_often_is_no_longer_asked(tmp_path: Path, caplog) -> None:
    """Which follows from the records: a server that resumes knows it."""
    calls = 0

    def stopping(message: Message) -> Message:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return HONEST(message)

    path = tmp_path / "run"
    config = {"rounds": 3, "flower__quarantine": 2, "flower__max_change": 10.0}
    nodes = {1: device(0, 4), 2: device(1, 4), 3: stopping, 4: scaled}
    with pytest.raises(KeyboardInterrupt):
        play(path, nodes, **config)
    assert "node 4: outlier: its change is" in caplog.text
    assert "node 4: quarantined: an outlier in rounds 1, 2 (flower.quarantine)" in caplog.text
    nodes[4] = lambda _: pytest.fail("it was asked again")
    _, rounds, _ = play(path, nodes, **config, flower__resume=True)
    stood_out = [[f.device for f in record.figures if f.outlier] for record in rounds]
    assert stood_out[:2] == [[4], [4]]
    assert [record.quarantined for record in rounds] == [None, None, [4]]
    assert [len(record.devices) for record in rounds] == [4, 4, 3]
    nodes[4] = scaled
    with pytest.raises(InvalidExperiment, match="there are 3 nodes beside 1 in quarantine"):
        play(tmp_path / "few", nodes, **config, flower__nodes=4)


def test_outliers_count_within_twenty_rounds_and_among_others() -> None:
    def record(number: int, *outliers: int, of: int = 4) -> RoundRecord:
        figures = [DeviceFigures(n, 9, 1.0, 1.0, 1.0, 1.0, n in outliers) for n in range(of)]
        return RoundRecord(number, 0.1, 0.0, 0, 1.0, [], figures=figures)

    quarantine = Quarantine(2)
    assert quarantine.add(record(1, 3)) == []
    assert quarantine.add(record(21, 3)) == [], "the first is too long ago"
    assert quarantine.add(record(22, 3, 0)) == [], "half of them: nobody knows who is right"
    assert quarantine.add(record(23, 0, of=1)) == [], "alone"
    assert quarantine.add(record(40, 3)) == [3]
    assert quarantine.held == {3: [21, 40]}
    assert Quarantine(0).add(record(1, 3)) == []


def test_a_device_without_room_sits_out(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("time", "memory", "upload"), 0.0)
    _, rounds, _ = play(tmp_path / "run", {1: device(0), 2: device(1, **nothing)}, rounds=1)
    assert (rounds[0].count("merged"), rounds[0].count("infeasible")) == (1, 1)


def table_of(path: Path, hardware: Hardware | None = None) -> str:
    """A profile table for the tiny network."""
    settings = Settings("resnet10-digits", batch=16, options=(("tiny", True),))
    replace(analytic_table(settings), hardware=hardware).save(path)
    return str(path)


def test_seconds_and_bytes_are_measured_with_the_device_s_own_table(tmp_path: Path) -> None:
    table = table_of(tmp_path / "table.json")
    # 479 samples, 30 steps: full training takes 18 ms, the last block alone 1.2 ms.
    spans = {}
    for name, budget in {
        "time": {"time": "2ms"},
        "memory": {"memory": "100kB"},
        "upload": {"upload": "5kB"},
        "ample": {"time": "1min", "memory": "1GB", "upload": "1MB"},
    }.items():
        node = device(0, 3, profile=table, **budget)
        _, rounds, _ = play(tmp_path / name, {1: node}, rounds=1, flower__nodes=1)
        spans[name] = rounds[0].devices[0].work
    assert spans["ample"] == "0:6"
    assert spans["time"] == spans["memory"] == "5:6"
    assert spans["upload"] in ("0:1", "1:2", "2:3", "5:6")


def test_a_device_trains_with_the_threads_that_its_table_is_about(tmp_path: Path) -> None:
    table = table_of(tmp_path / "table.json", Hardware.here(2))
    seen = []
    try:
        for more in ({}, {"threads": 3}):
            node = device(0, 3, profile=table, **more)
            play(tmp_path / str(more), {1: node}, rounds=1, flower__nodes=1)
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(1)
    assert seen == [2, 3]


def test_seconds_mean_nothing_without_a_table_of_this_device() -> None:
    for limit in ({"time": "30s"}, {"memory": "200MB"}):
        with pytest.raises(InvalidBudget, match="give profile in the node config"):
            node_budget(limit, 10)
    assert node_budget({"upload": "2MB", "time": "50%"}, 10).upload_bytes == 2e6


def test_the_limits_of_an_update_are_in_the_run_config(tmp_path: Path) -> None:
    for key, value in (("max_change", 1e-6), ("max_samples", 10)):
        _, rounds, _ = play(
            tmp_path / key,
            {1: device(0)},
            rounds=1,
            flower__nodes=1,
            **{f"flower__{key}": value},
        )
        assert (rounds[0].count("merged"), rounds[0].count("rejected")) == (0, 1)


def test_a_budget_may_come_from_a_file_that_changes(tmp_path: Path) -> None:
    file = tmp_path / "budget.toml"
    file.write_text("time = 0.0\n")
    node = device(1, **{"budget-file": str(file)})

    def freed(message: Message) -> Message:
        reply = node(message)
        file.write_text('time = 1.0\nupload = "1MB"\n')
        return reply

    _, rounds, _ = play(tmp_path / "run", {1: device(0), 2: freed})
    assert [record.devices[1].fate for record in rounds] == ["infeasible", "merged"]
    with pytest.raises(InvalidBudget, match="give one of them"):
        node_budget({"budget-file": str(file), "time": 0.5}, 10)
    (tmp_path / "wrong.toml").write_text("tiem = 1\n")
    with pytest.raises(InvalidBudget, match="unknown key"):
        node_budget({"budget-file": str(tmp_path / "wrong.toml")}, 10)
    with pytest.raises(InvalidBudget, match="cannot read"):
        node_budget({"budget-file": str(tmp_path / "none.toml")}, 10)


def test_a_killed_server_resumes_without_losing_a_round(tmp_path: Path) -> None:
    nodes = {1: device(0), 2: device(1)}
    whole, rounds, _ = play(tmp_path / "whole", nodes, rounds=3)
    calls = 0

    def killer(message: Message) -> Message:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return device(1)(message)

    path = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        play(path, {1: device(0), 2: killer}, rounds=3)
    again, resumed, _ = play(path, nodes, rounds=3, flower__resume=True)
    assert calls == 3, "the two finished rounds were not played again"
    assert resumed == rounds
    assert same_state(again, whole)


def test_the_server_leaves_a_folder_to_who_writes_it(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"), pytest.raises(RunFolderProblem, match="another process"):
        play(tmp_path / "run", {}, flower__resume=True)


def test_too_few_nodes_end_the_run_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match=r"needs 3 \(flower.nodes\)"):
        play(tmp_path / "run", {1: device(0)}, flower__nodes=3)


def test_some_nodes_are_drawn(tmp_path: Path) -> None:
    nodes = {number: device(number, 4) for number in range(4)}
    _, rounds, _ = play(tmp_path / "run", nodes, flower__per_round=2)
    assert all(len(record.devices) == 2 for record in rounds)


def test_strategies_that_send_slices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="cannot be deployed"):
        play(tmp_path / "run", {}, strategy__name="heterofl")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("flower.nods", 3, "did you mean nodes"),
        ("flower.nodes", "three", "expected a whole number"),
        ("flower.nodes", 0, "at least 1"),
        ("flower.round_s", 0.0, "above 0"),
        ("flower.max_samples", 0, "at least 1"),
        ("flower.max_change", float("nan"), "above 0"),
        ("training.lrr", 0.1, "did you mean lr"),
    ],
)
def test_a_wrong_run_config_is_an_error_that_names_the_key(
    key: str, value: Any, message: str
) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        read_run_config({key: value})


def test_an_app_holds_the_whole_experiment(tmp_path: Path) -> None:
    experiment = Experiment().changed({"training.decay_rounds": [6, 8], "strategy.variant": "f"})
    deployment = Deployment(nodes=5)
    config = run_config(experiment, deployment)
    assert read_run_config(config) == (experiment, deployment)
    text = (write_app(tmp_path / "app", config) / "pyproject.toml").read_text()
    assert "[tool.flwr.app.config.training]" in text
