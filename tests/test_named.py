"""Names are code, folders are data: what is read runs nothing that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cocofl import Experiment, simulate
from cocofl.cli import main
from cocofl.errors import CocoflError, InvalidExperiment, KernelMissing, Untrusted
from cocofl.flower.client import Device
from cocofl.freeze import KernelPlan
from cocofl.named import import_function, names_are_data, user_file, vouch_for
from cocofl.profiling.measure import prepare_apart
from cocofl.profiling.subject import Settings
from cocofl.profiling.table import SHIPPED

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 1,
    "model.options": {"tiny": True},
    "devices.count": 6,
    "devices.per_round": 2,
    "engine.kind": "serial",
    "engine.kernels": "reference",
    "engine.workers": 1,
}
# Importing it leaves a mark; so does every call.
MALICE = """
from pathlib import Path
Path("ran").touch()
def act(*_, **__):
    raise RuntimeError("the code of the folder was run")
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "run"
    simulate(Experiment().changed(TINY), out=path)
    return path


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    (tmp_path / "malice.py").write_text(MALICE)
    monkeypatch.chdir(tmp_path)
    # As if it were installed: what is refused is refused wherever the module lies.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delitem(sys.modules, "malice", raising=False)

    def run(*words: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


def downloaded(honest: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """A run folder whose experiment names other things than what was run."""
    folder.mkdir()
    for file in honest.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    hostile = Experiment().changed(TINY | changes)
    (folder / "experiment.toml").write_text(hostile.to_toml())
    return folder


NAMES: list[dict[str, Any]] = [
    {"model.name": "malice:act"},
    {"data.name": "malice:act"},
    {"training.loss": "malice:act"},
    {"training.optimizer": "malice:act"},
    {"upload.codec": "malice:act"},
    {"devices.groups": [{"name": "all", "share": 1.0, "trace": "malice:act"}]},
]
PLAYED: list[dict[str, Any]] = [
    {"strategy.name": "malice:act"},
    {"strategy.selector": "malice:act"},
    {"evaluation.metrics": ["accuracy", "malice:act"]},
]
# Nothing is played or begun where these are read.
OTHERS = {**PLAYED[0], **PLAYED[1], "model.init": "malice:act", "tables.spans": "malice:act"}


@pytest.mark.parametrize("changes", NAMES, ids=str)
def test_evaluate_refuses_what_a_folder_names(
    changes: dict[str, Any], honest: Path, call: Call, tmp_path: Path
) -> None:
    done = call("evaluate", str(downloaded(honest, tmp_path / "run", changes)))
    assert_refused(done, tmp_path)


def assert_refused(done: Done, folder: Path) -> None:
    assert done.code == 2
    assert "module 'malice'" in done.err
    assert "say --trust" in done.err
    assert f"[trust] modules in {user_file()}" in done.err
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("changes", [*NAMES, *PLAYED], ids=str)
def test_an_experiment_of_a_run_folder_is_data(
    changes: dict[str, Any], honest: Path, call: Call, tmp_path: Path
) -> None:
    path = downloaded(honest, tmp_path / "run", changes)
    done = call("run", str(path / "experiment.toml"), "--out", str(tmp_path / "again"))
    assert_refused(done, tmp_path)
    assert not (tmp_path / "again").exists()


def test_other_files_of_a_folder_name_nothing(honest: Path, call: Call, tmp_path: Path) -> None:
    path = downloaded(honest, tmp_path / "run", {})
    about = {
        "strategy": "malice:act",
        "metrics": {"accuracy": {"name": "malice:act"}},
        "tables": {"qff": "malice:act"},
    }
    for file, changes in (("about.json", about), ("plan.json", {"choices": {"a": "malice:act"}})):
        content = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(content | changes))
    for command in ("report", "evaluate"):
        assert call(command, str(path)).code == 0
    with pytest.raises(KernelMissing, match="'malice:act'"):
        KernelPlan.load(path / "plan.json")
    assert not (tmp_path / "ran").exists()


def test_a_table_names_no_code(call: Call, tmp_path: Path) -> None:
    content = json.loads((SHIPPED / "epyc-mobilenet+qff.json").read_text())
    del content["checksum"]
    hostile = {**content, "model": "malice:act", "backend": "malice:act"}
    Path("table.json").write_text(json.dumps(hostile))
    assert "malice:act" in call("select", "table.json", "--time", "0.5").out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("changes", [*NAMES[:5], *PLAYED], ids=str)
def test_a_device_takes_no_name_from_its_server(
    changes: dict[str, Any], call: Call, tmp_path: Path
) -> None:
    told = {
        "experiment": Experiment().changed(TINY | changes).to_dict(),
        "facts": {"class_names": [str(i) for i in range(10)], "mean": [0.3], "std": [0.4]},
    }
    node = {"partition-id": 0, "num-partitions": 2}
    with (
        names_are_data("task"),
        pytest.raises(Untrusted, match=r"module 'malice'.*trust = 'malice' in its node config"),
    ):
        Device(node, 1, told)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["/elsewhere/own.csv", "../own.csv", "x/..", "/"])
def test_a_device_reads_no_file_that_its_server_points_to(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,label\n1,x\n2,x\n")
    settings = {"data": {"name": name}, "model": {"name": "resnet10-digits"}}
    told = {"experiment": settings, "facts": {"class_names": ["x"], "mean": [0], "std": [1]}}
    with pytest.raises(InvalidExperiment, match="put data-dir into its node config"):
        Device({}, 1, told)
    if name.endswith("own.csv"):  # in its own folder it is
        with pytest.raises(InvalidExperiment, match=f"1×8×8, but {tmp_path}/own.csv has 1"):
            Device({"data-dir": str(tmp_path)}, 1, told)


def test_the_user_keeps_a_list_of_modules_to_trust(
    honest: Path, call: Call, tmp_path: Path
) -> None:
    path = downloaded(honest, tmp_path / "run", NAMES[0])
    user_file().parent.mkdir(parents=True)
    user_file().write_text('[trust]\nmodules = ["malice"]\n')
    call("evaluate", str(path))
    assert (tmp_path / "ran").exists()
    user_file().write_text("[trust]\nmodule = []\n")
    done = call("doctor")
    assert (done.code, "unknown key trust.module (did you mean modules?)" in done.err) == (2, True)


def test_no_file_that_is_read_adds_to_that_list(honest: Path, call: Call, tmp_path: Path) -> None:
    path = downloaded(honest, tmp_path / "run", NAMES[0])
    with (path / "experiment.toml").open("a") as file:
        file.write('[trust]\nmodules = ["malice"]\n')
    done = call("evaluate", str(path))
    assert (done.code, "unknown key trust" in done.err) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_a_measurement_does_not_look_into_the_current_folder_first(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    settings = Settings("resnet10-digits", 4, options=(("tiny", True),), method="width")
    prepare_apart(tmp_path / "workspace", settings)
    assert (tmp_path / "workspace" / "settings.json").exists()


def test_reproducing_imports_nothing_of_the_folders_that_it_finds(
    honest: Path, call: Call, tmp_path: Path
) -> None:
    name = "resnet-fashion_mnist-iid__malice:act__seed0"
    downloaded(honest, tmp_path / name, {**PLAYED[0], **NAMES[0], "rounds": 1})
    done = call("reproduce", "table2", "--small", "--read", "--out", str(tmp_path))
    assert done.code == 0
    assert not (tmp_path / "ran").exists()
    call("reproduce", "table2", "--small", "--strategies", "malice:act", "--list")
    assert (tmp_path / "ran").exists()  # the user named it here


@pytest.mark.parametrize("changes", [*NAMES, OTHERS], ids=str)
def test_report_runs_nothing_that_a_folder_names(
    changes: dict[str, Any], honest: Path, call: Call, tmp_path: Path
) -> None:
    path = downloaded(honest, tmp_path / "run", changes)
    done = call("report", str(path))
    assert done.code == 0, done.err
    assert not (tmp_path / "ran").exists()
    if changes in NAMES:
        assert "--trust" in (path / "report.html").read_text()


@pytest.mark.parametrize("changes", [NAMES[0], OTHERS], ids=str)
def test_resume_plays_what_the_user_names(
    changes: dict[str, Any], honest: Path, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "own.toml").write_text(Experiment().changed(TINY).to_toml())
    path = downloaded(honest, tmp_path / "run", changes)
    done = call("run", "own.toml", "--resume", "--no-report", "--out", str(path))
    assert done.code == 2
    assert not (tmp_path / "ran").exists()


def test_who_trusts_a_folder_says_so(honest: Path, call: Call, tmp_path: Path) -> None:
    path = downloaded(honest, tmp_path / "run", NAMES[0])
    done = call("evaluate", str(path), "--trust")
    assert done.code == 2
    assert "malice:act failed with RuntimeError" in done.err
    assert (tmp_path / "ran").exists()


def test_a_library_in_the_folder_is_not_imported(honest: Path, tmp_path: Path) -> None:
    path = downloaded(honest, tmp_path / "run", {})
    for name in ("jinja2", "plotly", "numpy", "torch"):
        (path / f"{name}.py").write_text("raise SystemExit('imported')")
    script = Path(sys.executable).parent / "cocofl"
    for command in ("report", "evaluate"):
        done = subprocess.run(
            [script, command, "."], cwd=path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0
        assert "imported" not in done.stderr  # on a busy machine it says what takes long


def test_names_of_this_command_line_are_imported(call: Call, tmp_path: Path) -> None:
    call("data", "show", "malice:act")
    assert (tmp_path / "ran").exists()


def test_a_name_in_the_user_s_own_file_is_imported(call: Call, tmp_path: Path) -> None:
    own = Experiment().changed(TINY | {"model.name": "malice:act"})
    (tmp_path / "own.toml").write_text(own.to_toml())
    call("run", "own.toml", "--out", str(tmp_path / "run"))
    assert (tmp_path / "ran").exists()


def test_python_code_may_name_anything() -> None:
    assert import_function("math:sqrt", CocoflError)(9.0) == 3.0


def test_data_names_only_trusted_modules() -> None:
    with names_are_data("math"):
        assert import_function("math:sqrt", CocoflError)(9.0) == 3.0
        with pytest.raises(Untrusted, match="'operator'"):
            import_function("operator:neg", CocoflError)
        path = list(sys.path)
        vouch_for("operator:neg", "mobilenet")
        assert import_function("operator:neg", CocoflError)(1) == -1
        with pytest.raises(Untrusted):
            import_function("operator:add", CocoflError)
    assert sys.path == path
