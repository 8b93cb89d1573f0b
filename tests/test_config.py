from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cocofl.config import Experiment, parse_value
from cocofl.errors import InvalidExperiment


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    experiment = Experiment.parse(
        {
            "seed": 3,
            "model": {"options": {"tiny": True, "norm": 'group "x"'}},
            "strategy": {"name": "cocofl", "variant": "ff"},
            "training": {"decay_rounds": [6, 8], "lr": 1},
            "devices": {
                "groups": [{"name": "phones", "time": 0.5, "upload": {"uniform": [0.1, 0.3]}}]
            },
        }
    )
    path = tmp_path / "experiment.toml"
    path.write_text(experiment.to_toml())
    assert Experiment.load(path) == experiment
    assert experiment.strategy.options == {"variant": "ff"}
    assert experiment.training.lr == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"trainig": {}}, "unknown key trainig .did you mean training"),
        ({"training": {"lr_": 1}}, "unknown key training.lr_ .did you mean lr"),
        ({"training": {"lr": -1}}, "training.lr is -1.0; expected a number above 0"),
        ({"training": {"lr": "fast"}}, "training.lr is 'fast'; expected a number"),
        ({"training": {"epochs": 1.5}}, "expected a whole number"),
        ({"training": {"epochs": True}}, "expected a whole number"),
        ({"training": {"momentum": 1.0}}, "at least 0 and below 1"),
        ({"training": {"last_batch": "kep"}}, "did you mean keep"),
        ({"training": 3}, "training is 3; expected a table"),
        ({"rounds": 0}, "rounds is 0; expected a number at least 1"),
        ({"devices": {"count": 5, "per_round": 6}}, "devices.per_round is 6, but .*count is 5"),
        ({"evaluation": {"statistics": "none"}}, "expected one of running, batch"),
        ({"faults": {"dropout": 1.5}}, "at least 0 and at most 1"),
        ({"engine": {"kernels": "cuda"}}, "expected one of auto, reference"),
        ({"training": {"lr": float("nan")}}, "training.lr is nan"),
        ({"seed": 2**64}, "seed is 18446744073709551616; expected a number at least 0 and at most"),
        ({"strategy": {"options": 3}}, "strategy.options is 3; expected a table"),
        ({"engine": {"device": "gpu"}}, "engine.device is 'gpu'; expected auto, cpu, cuda"),
        ({"engine": {"workers": 100_000}}, "engine.workers is 100000; .* at most 1024"),
    ],
)
def test_mistakes_are_named(content: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        Experiment.parse(content)


@pytest.mark.parametrize("name", ["", ".", "../x", "/x"])
def test_a_name_cannot_lead_out_of_the_folder_of_runs(name: str) -> None:
    with pytest.raises(InvalidExperiment, match="expected the name of a folder below runs"):
        _ = Experiment(name=name).folder


def test_changes_replace_values_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text("rounds = 5\n[training]\nlr = 0.5\n")
    changed = Experiment.load(path, {"training.lr": 0.25, "strategy.name": "fedavg"})
    assert (changed.rounds, changed.training.lr, changed.strategy.name) == (5, 0.25, "fedavg")
    with pytest.raises(InvalidExperiment, match=r"unknown key training\.lrr"):
        changed.changed({"training.lrr": 1})
    with pytest.raises(InvalidExperiment, match="rounds is a value"):
        changed.changed({"rounds.x": 1})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="cannot read"):
        Experiment.load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(InvalidExperiment, match="is not TOML"):
        Experiment.load(broken)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("device,round,time,memory,upload\n")
    (tmp_path / "table.json").write_text("{}")
    path = tmp_path / "one.toml"
    path.write_text(
        '[tables]\nspans = "table.json"\n[[devices.groups]]\nname = "a"\ntrace = "trace.csv"\n'
        '[[devices.groups]]\nname = "b"\ntrace = "mine:trace"\n'
    )
    experiment = Experiment.load(path)
    assert experiment.tables.spans == str(tmp_path / "table.json")
    assert experiment.devices.groups[0]["trace"] == str(tmp_path / "trace.csv")
    assert experiment.devices.groups[1]["trace"] == "mine:trace"


def test_values_on_the_command_line() -> None:
    assert parse_value("[600, 800]") == [600, 800]
    assert parse_value("runs/x") == "runs/x"


def test_a_file_says_only_what_it_changes_of_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "bases"
    folder.mkdir()
    (folder / "table.json").write_text("{}")
    (folder / "common.toml").write_text(
        'rounds = 9\ntables = {spans = "table.json"}\n[data]\nname = "cifar10"\nsplit = "iid"\n'
    )
    (folder / "row.toml").write_text('base = "common.toml"\ndata = {split = "rc", alpha = 0.5}\n')
    (tmp_path / "mine.toml").write_text('base = "bases/row.toml"\nrounds = 3\n')
    found = Experiment.load(tmp_path / "mine.toml")
    assert (found.rounds, found.data.name, found.data.split) == (3, "cifar10", "rc")
    assert found.tables.spans == str(folder / "table.json")  # relative to the file that says it


def test_a_base_must_be_another_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(InvalidExperiment, match=r"b.toml: its base a.toml rests on this very file"):
        Experiment.load(tmp_path / "a.toml")
    (tmp_path / "c.toml").write_text("base = 3\n")
    with pytest.raises(InvalidExperiment, match="expected the name of another file"):
        Experiment.load(tmp_path / "c.toml")


def test_the_documentation_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/experiment.md").read_text(encoding="utf-8")
    for key, value in Experiment().by_key().items():
        section, _, name = key.rpartition(".")
        _, _, text = page.partition(f"## [{section}]" if section else "## At the top")
        (line,) = re.findall(rf"^\| `{name}` \| .* \|$", text.partition("\n## ")[0], re.M)
        told, meaning = line.split(" | ")[1:]
        assert tomllib.loads(f"value = {told.strip('`')}")["value"] == value
        assert meaning.strip(" |"), f"{key} has no description: add one below its field"


def test_where_it_runs_is_not_what_is_run() -> None:
    one = Experiment().changed({"data.dir": "/a", "tables.spans": "/a/x64.json"})
    moved = {"data.dir": "/b", "tables.spans": "/b/x64.json", "engine.kind": "cohort"}
    other = one.changed({**moved, "engine.workers": 2, "engine.device": "cuda"})
    assert one.without_places() == other.without_places()
    for change in ({"seed": 1}, {"engine.precision": "bf16"}, {"tables.spans": "/a/arm.json"}):
        assert one.changed(change).without_places() != one.without_places()
    shipped = [{"tables.spans": f"measured:epyc-{name}/qff"} for name in ("mobilenet", "resnet18")]
    first, second = (one.changed(change).without_places() for change in shipped)
    assert first != second
