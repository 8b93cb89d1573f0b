"""Trackers, with the real libraries: what they get of runs, comparisons, and of what ends early."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cocofl.config import Experiment
from cocofl.errors import InvalidSetting
from cocofl.runlog import DeviceRecord, RoundRecord, RunFolder
from cocofl.trackers import TRACKERS, tracking
from tests.command_line import Call
from tests.test_cli_run import TINY

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say of themselves is theirs


def needs(library: str) -> Any:
    why = f"{library} is not installed: pip install 'cocofl[{library}]'"
    return pytest.importorskip(library, reason=why)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if wandb := sys.modules.get("wandb"):  # it reads its variables once
        wandb.teardown()


def round_record(number: int) -> RoundRecord:
    devices = [DeviceRecord(3, "weak", "0:2", "merged")]
    scores = {"accuracy": 0.5, "group_accuracy": {"weak": 0.25}}
    return RoundRecord(number, 0.1, 0.25, 1000, 1.5, devices, scores)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_whose_library_is_missing_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidSetting, match=rf"pip install 'cocofl\[{name}\]'"), tracking([name]):
        pass


def test_tensorboard_gets_every_run_of_a_comparison(call: Call) -> None:
    words = ("--strategies", "cocofl,fedavg-full", "--seeds", "1", "--lr-grid", "", "--no-report")
    assert (
        call("compare", "tiny.toml", *words, "--out", "both", "--track", "tensorboard").returncode
        == 0
    )
    logged = {str(p.parent.relative_to("both-tensorboard")) for p in Path(".").rglob("events.*")}
    assert logged == {".", "rc/cocofl/seed0", "rc/fedavg-full/seed0"}


# --- MLflow --------------------------------------------------------------------------------------


def mlflow_runs(experiment: str) -> list[Any]:
    client = needs("mlflow").MlflowClient()
    place = client.get_experiment_by_name(experiment)
    return list(client.search_runs([place.experiment_id]))


def mlflow_files(run: Any) -> set[str]:
    return {one.path for one in needs("mlflow").MlflowClient().list_artifacts(run.info.run_id)}


def test_mlflow_gets_parameters_metrics_report_and_model(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    assert call("run", "tiny.toml", "--track", "mlflow").returncode == 0
    (run,) = mlflow_runs("ours")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tiny"
    assert run.data.params["training.lr"] == "0.1"
    assert run.data.params["strategy.name"] == "cocofl"
    assert json.loads(run.data.params["evaluation.metrics"]) == ["accuracy", "f1"]
    assert {"accuracy", "group_accuracy/weak", "bytes_up", "merged"} <= set(run.data.metrics)
    kept = {"experiment.toml", "about.json", "model.safetensors", "report.html"}
    assert mlflow_files(run) == kept


def test_mlflow_gets_a_comparison_as_runs_below_one(call: Call) -> None:
    needs("mlflow")
    words = ("--strategies", "cocofl,fedavg-full", "--seeds", "1", "--lr-grid", "0.1,0.2")
    assert (
        call("compare", "tiny.toml", *words, "--out", "both", "--track", "mlflow").returncode == 0
    )
    runs = {run.info.run_name: run for run in mlflow_runs("cocofl")}
    assert set(runs) == {"both", "rc/cocofl/seed0", "rc/fedavg-full/seed0"}, "no tuning"
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert mlflow_files(runs["both"]) == {"report.html"}
    child = runs["rc/cocofl/seed0"]
    assert child.data.tags["mlflow.parentRunId"] == runs["both"].info.run_id
    assert "model.safetensors" in mlflow_files(child)


@pytest.mark.parametrize(
    ("problem", "status"), [(KeyboardInterrupt(), "KILLED"), (OSError("full"), "FAILED")]
)
def test_mlflow_is_told_how_a_run_ended(
    problem: BaseException, status: str, tmp_path: Path
) -> None:
    client = needs("mlflow").MlflowClient()
    folder = RunFolder.create(tmp_path / "cut", Experiment().to_toml())
    folder.append(round_record(1), {"train_s": 0.1, "evaluate_s": 0.0})

    def cut_short() -> None:
        with tracking(["mlflow"]) as trackers:
            (watcher,) = trackers.watch(folder.path, Experiment())
            watcher.on_round(round_record(1))  # after the checkpoint, and so played again
            watcher.on_round(round_record(2))
            raise problem

    with pytest.raises(type(problem)):
        cut_short()
    (run,) = mlflow_runs("cocofl")
    assert run.info.status == status
    assert mlflow_files(run) == set()
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert [one.step for one in history] == [1, 2], "a run that goes on is there whole"


# --- Weights & Biases ----------------------------------------------------------------------------


def wandb_records(folder: Path) -> list[Any]:
    """What an offline run wrote down for its server."""
    needs("wandb").teardown()  # whatever is still on its way to the file
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("*.wandb")
    found = []
    for data in logged_parts(file.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def logged_parts(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind its own header of 7 bytes.

    Blocks have 32 KiB. A piece has a checksum (4 bytes), its length (2) and what it is (1): a whole
    record, or its first, a middle or its last piece.
    """
    at, pending = 7, b""
    while at < len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        pending += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pending
            pending = b""


def test_wandb_offline_gets_config_metrics_report_and_model(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    assert call("run", "tiny.toml", "--track", "wandb").returncode == 0
    (folder,) = (tmp_path / "elsewhere/wandb").glob("offline-run-*")
    records = wandb_records(folder)
    (run,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("ours", "tiny")
    config = {one.key: json.loads(one.value_json) for one in run.config.update}
    assert config["training"]["lr"] == 0.1
    logged = {
        item.key or "/".join(item.nested_key)
        for one in records
        if one.WhichOneof("record_type") == "history"
        for item in one.history.item
    }
    assert {"accuracy", "group_accuracy/weak", "merged"} <= logged
    names = {
        entry.path
        for one in records
        if one.WhichOneof("record_type") == "artifact"
        for entry in one.artifact.manifest.contents
    }
    assert {"report.html", "model.safetensors", "experiment.toml"} <= names
    (end,) = [one.exit for one in records if one.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def test_wandb_gets_every_run_of_a_comparison_and_its_end(
    tmp_path: Path,
) -> None:
    needs("wandb")

    def cut_short() -> None:
        with tracking(["wandb"]) as trackers:
            trackers.begin_comparison(tmp_path / "both", Experiment())
            for name in ("cocofl", "fedavg"):
                (watcher,) = trackers.watch(tmp_path / "both/rc" / name / "seed0", Experiment())
                watcher.on_round(round_record(1))
                if name == "cocofl":
                    watcher.on_end()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    found = {}
    for folder in (tmp_path / "wandb").glob("offline-run-*"):
        records = wandb_records(folder)
        (run,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
        (end,) = [one.exit for one in records if one.WhichOneof("record_type") == "exit"]
        found[run.display_name] = (run.run_group, end.exit_code)
    assert found == {
        "both": ("", 130),
        "rc/cocofl/seed0": ("both", 0),
        "rc/fedavg/seed0": ("both", 130),
    }


def test_every_tracker_is_tried_here() -> None:
    assert set(TRACKERS) == {"tensorboard", "mlflow", "wandb"}
