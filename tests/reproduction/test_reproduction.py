"""From experiment files to tables beside the paper's numbers, with tiny runs and made-up ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench.report import made_up_run

from cocofl.cli import main
from cocofl.cli.running import read_experiment
from cocofl.config import Experiment
from cocofl.data.partition import RULES
from cocofl.data.registry import REGISTRY
from cocofl.experiment import Run
from cocofl.models import MODELS
from cocofl.reproduction import plans, results, tables
from cocofl.reproduction.collection import Collection, paper, small
from cocofl.reproduction.plans import Name, Planned, missing, play

TINY = """
name = "tiny-iid"
rounds = 2
model = {options = {tiny = true}}
data = {split = "iid"}
devices = {count = 6, per_round = 3}
evaluation = {every = 2}
engine = {kernels = "reference", workers = 1}
"""
Call = Callable[..., str]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        return printed.err if code else printed.out

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Collection:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "tiny-iid.toml").write_text(TINY)
    (folder / "tiny-rc.toml").write_text('base = "tiny-iid.toml"\ndata = {split = "rc"}\n')
    return Collection(folder, ("tiny-iid", "tiny-rc"))


@pytest.mark.parametrize("files", [paper(), small()], ids=["paper", "small"])
def test_every_file_is_an_experiment_that_says_its_name(files: Collection) -> None:
    assert files.rows
    for path in files.folder.glob("*.toml"):
        found = Experiment.load(path)
        if path.stem != "common":
            assert found.name == path.stem
            assert found.model.name in MODELS
            assert found.data.name in REGISTRY
            assert found.data.split in RULES
            assert found.training.last_batch == "drop"


def test_the_papers_settings() -> None:
    found = Experiment.load(paper().file("mobilenet-cifar10-rc"))
    assert (found.rounds, found.data.split, found.data.alpha) == (1000, "rc-mixed", 0.1)
    assert (found.devices.count, found.devices.per_round) == (100, 10)
    training = found.training
    assert (training.lr, training.momentum, training.batch) == (0.1, 0.0, 32)
    assert (training.weight_decay, training.decay_rounds) == (0.01, (600, 800))
    femnist = Experiment.load(paper().file("resnet18-femnist-rc"))
    assert (femnist.rounds, femnist.devices.count, femnist.devices.per_round) == (600, 3500, 35)


def test_the_papers_numbers_are_of_rows_and_strategies_that_there_are() -> None:
    files = paper()
    assert len(files.rows) == 21
    assert all(files.file(row).is_file() for row in files.rows)
    assert {strategy for _, strategy, _ in files.published} == set(plans.STRATEGY_ORDER)
    assert files.published["mobilenet-cifar10-rc", "cocofl", "weak"].mean == 0.68
    assert files.metric("mobilenet-large-xchest-rc") == "f1"


def test_a_study_of_tiny_runs_is_played_once_and_read_again(
    tiny: Collection, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    planned = plans.table2(tiny, rows=["tiny-rc"], strategies=["centralized", "cocofl"], seeds=1)
    names = [str(one.name) for one in planned]
    assert names == ["tiny-iid__centralized__seed0", "tiny-rc__cocofl__seed0"]
    started: list[str] = []
    assert play(planned, out, announce=lambda name, _: started.append(name)) == []
    assert started == names
    assert missing(planned, out) == []
    assert play(planned, out, announce=lambda name, _: started.append(name)) == []
    assert started == names
    found, unfinished = results.find(out, tiny, tiny.rows)
    assert unfinished == []
    assert {one.statistics for one in found} == {"running", "batch"}
    assert {one.changes for one in found} == {""}
    cocofl = next(one for one in found if one.strategy == "cocofl")
    assert cocofl.table.startswith("analytic resnet10-digits qff")
    assert cocofl.engine == "serial"
    assert len(cocofl.commit) >= 10
    assert set(cocofl.groups) == {"strong", "medium", "weak"}
    made = tables.of_row(tiny, found, "tiny-rc")
    assert made is not None
    assert [line[0] for line in made.lines] == ["centralized", "cocofl"]
    results.write(tmp_path / "all.csv", found)
    assert results.read(tmp_path / "all.csv") == found


def test_fewer_rounds_decay_at_the_same_share_and_have_a_name_of_their_own() -> None:
    (one,) = plans.table2(
        paper(), rows=["mobilenet-cifar10-rc"], strategies=["cocofl"], seeds=1, rounds=50
    )
    assert one.experiment.training.decay_rounds == (30, 40)
    assert str(one.name) == "mobilenet-cifar10-rc__cocofl__seed0__rounds50"
    assert Name.parse(str(one.name)) == one.name


def test_a_command_gives_the_same_experiment(tmp_path: Path) -> None:
    table = tmp_path / "x64 mobilenet.json"
    planned = [
        *plans.table2(
            paper(),
            rows=["mobilenet-cifar10-rc"],
            strategies=["cocofl", "fjord"],
            seeds=1,
            spans=str(table),
            widths="analytic",
        ),
        *plans.over_limits(paper(), "ablation", limits=[0.25], seeds=1, rounds=100),
        *plans.over_limits(paper(), "selectors", limits=[0.2], seeds=1),
    ]
    labels = [one.name.label for one in planned]
    assert labels[:4] == ["cocofl", "cocofl.x64 mobilenet", "fjord", "fjord.analytic"]
    for one in planned:
        program, verb, file, *words = shlex.split(one.command(Path("out")))
        assert (program, verb) == ("cocofl", "run")
        sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        assert read_experiment(Path(file), sets) == one.experiment
        assert words[words.index("--out") + 1] == f"out/{one.name}"


def test_studies_share_runs() -> None:
    ablation = {
        one.name for one in plans.over_limits(paper(), "ablation", limits=[0.2, 0.3], seeds=1)
    }
    selection = {
        one.name for one in plans.over_limits(paper(), "selectors", limits=[0.2, 0.3], seeds=1)
    }
    assert len(ablation) == 10  # f once, ff and qff with and without gains
    assert len(selection) == 14
    assert {name.label for name in ablation & selection} == {"limit0.2-qff", "limit0.3-qff"}


def made_up(planned: Planned, out: Path, rounds: int = 3) -> Path:
    """A complete run of what is planned, with made-up numbers."""
    folder, experiment = out / str(planned.name), planned.experiment
    strategy, split = experiment.strategy.name, experiment.data.split
    made_up_run(folder, strategy, split, experiment.seed, rounds=rounds)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    return folder


def test_a_result_names_the_table_of_every_part_of_its_run(tmp_path: Path) -> None:
    files = paper()
    row = "mobilenet-cifar10-rc"
    (one,) = plans.table2(files, rows=[row], strategies=["fjord"], seeds=1)
    about = made_up(one, tmp_path) / "about.json"
    said = json.loads(about.read_text()) | {"tables": {"width": "/there/new.json: widths"}}
    before = [{"rounds": 2, "tables": {"width": "old.json: widths"}, "commit": "abc"}]
    about.write_text(json.dumps(said | {"before": before, "commit": "def"}))
    found, _ = results.find(tmp_path, files, [row])
    assert {one.table for one in found} == {"old.json: widths to round 2, then new.json: widths"}
    assert {one.commit for one in found} == {"abc to round 2, then def"}


def test_ours_beside_the_papers(call: Call, tmp_path: Path) -> None:
    out, row = tmp_path / "out", "mobilenet-cifar10-rc"
    some = plans.table2(
        paper(), rows=[row], strategies=["cocofl", "heterofl"], seeds=2, spans="x64.json"
    )
    for planned in some:
        made_up(planned, out)
    printed = call("reproduce", "table2", "--read", "--out", "out", "--rows", row)
    assert "72.4 ± 2.9" in printed
    assert "cocofl is ahead, in points: heterofl +" in printed
    assert "(paper +19.4)" in printed
    assert "settings other" not in printed
    shown = (out / "table2.md").read_text()
    assert "| cocofl.x64 | 72.4 ± 2.9 |" in shown
    found = results.read(out / "table2.csv")
    assert {(one.strategy, one.seed) for one in found} == {
        *(("cocofl", 0), ("cocofl", 1), ("heterofl", 0), ("heterofl", 1)),
        *(("cocofl.x64", 0), ("cocofl.x64", 1)),
    }
    elsewhere = ["--read", "--out", "empty", "--also", str(out / "table2.csv")]
    again = call("reproduce", "table2", "--rows", row, *elsewhere)
    assert "(paper +19.4)" in again


def test_the_mean_of_the_last_ten_evaluations(call: Call, tmp_path: Path) -> None:
    out, row = tmp_path / "out", "mobilenet-cifar10-rc"
    (planned,) = plans.table2(paper(), rows=[row], strategies=["cocofl"], seeds=1)
    tested = Run.open(made_up(planned, out, rounds=400)).evaluated
    assert len(tested) > 10
    expected = sum(one.scores["group_accuracy"]["weak"] for one in tested[-10:]) / 10
    assert "last ten" in call("reproduce", "table2", "--read", "--out", "out", "--rows", row)
    found = {one.statistics: one for one in results.read(out / "table2.csv")}
    assert found[results.LATE].groups["weak"] == pytest.approx(expected, abs=1e-5)
    assert found[results.LATE].scores != found["running"].scores


def test_leads_are_of_the_same_seeds_and_settings(call: Call, tmp_path: Path) -> None:
    out, row = tmp_path / "out", "mobilenet-cifar10-rc"
    ours = plans.table2(paper(), rows=[row], strategies=["cocofl"], seeds=2)
    theirs = plans.table2(paper(), rows=[row], strategies=["heterofl"], seeds=1)
    stricter = [
        replace(
            one,
            name=one.name._replace(label="fjord.whole"),
            changes={**one.changes, "data.split": "rc"},
        )
        for one in plans.table2(paper(), rows=[row], strategies=["fjord"], seeds=2)
    ]
    for planned in (*ours, *theirs, *stricter):
        made_up(planned, out)
    call("reproduce", "table2", "--read", "--out", "out", "--rows", row)
    found = {
        (one.strategy, one.seed): one.scores["accuracy"]
        for one in results.read(out / "table2.csv")
        if one.statistics == "running"
    }
    lead = 100 * (found["cocofl", 0] - found["heterofl", 0])
    shown = (out / "table2.md").read_text()
    assert (
        f"cocofl is ahead, in points: heterofl {lead:+.1f} (paper +19.4; of seed 0 only)\n" in shown
    )


def test_what_a_run_changes_of_its_file_is_said(call: Call, tmp_path: Path) -> None:
    row = "mobilenet-cifar10-rc"
    (planned,) = plans.table2(paper(), rows=[row], strategies=["heterofl"], seeds=1)
    folder = made_up(planned, tmp_path / "out")
    other = planned.experiment.changed({"training.lr": 0.3, "strategy.masked": True})
    moved = other.changed({"data.dir": "/elsewhere", "engine.kind": "cohort"})
    (folder / "experiment.toml").write_text(moved.to_toml())
    printed = call("reproduce", "table2", "--read", "--out", "out", "--rows", row)
    assert "settings other than the file's: strategy.masked=True; training.lr=0.3 (all)" in printed


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mobilenet-cifar10-rc__cocofl__seed1", "seed 0"),
        ("mobilenet-cifar10-rc__fjord__seed0", "strategy cocofl"),
        ("mobilenet-cifar10-rc__cocofl__seed0__rounds7", "1000 rounds"),
    ],
)
def test_a_run_under_another_name_is_left_out(
    call: Call, tmp_path: Path, name: str, problem: str
) -> None:
    row = "mobilenet-cifar10-rc"
    (planned,) = plans.table2(paper(), rows=[row], strategies=["cocofl"], seeds=1)
    made_up(planned, tmp_path / "out").rename(tmp_path / "out" / name)
    printed = call("reproduce", "table2", "--read", "--out", "out", "--rows", row)
    assert f"{name} is left out, for it is not what its name says: {problem}" in printed
    assert "no complete run" in printed


def test_an_unfinished_run_is_named(call: Call, tmp_path: Path) -> None:
    name = "mobilenet-cifar10-rc__cocofl__seed0"
    made_up_run(tmp_path / "out" / name, "cocofl", "rc", 0, rounds=3)
    (tmp_path / "out" / name / "model.safetensors").unlink()
    printed = call("reproduce", "table2", "--read", "--out", "out")
    assert f"{name} is unfinished:" in printed
    assert "no complete run" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table2", "--rows", "mobilenet-cifar10-rd"], "did you mean mobilenet-cifar10-rc"),
        (["table2", "--rows", "mobilenet"], "there is no row mobilenet"),
        (["table2", "--strategies", "cocofi"], "did you mean cocofl"),
        (["table2", "--strategies", "x"], "expected one of cocofl, cocofl+, heterofl"),
        (["ablation", "--limits", "0.2,-1"], "--limits 0.2,-1: -1 is no share"),
        (["table2", "--read", "--also", __file__], "it lacks column 'row'"),
        (["table2", "--read", "--also", "nothing.csv"], "nothing.csv is not a file of results"),
    ],
)
def test_mistakes_have_one_message(call: Call, words: list[str], message: str) -> None:
    assert message in call("reproduce", *words, code=2)


def test_data_that_is_not_here_is_said_and_the_rest_goes_on(
    tiny: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COCOFL_DATA", str(tmp_path))
    (tiny.folder / "tiny-iid.toml").write_text(TINY.replace("{split", '{name = "cifar10", split'))
    planned = plans.table2(tiny, rows=["tiny-iid"], strategies=["cocofl"], seeds=1)
    (problem,) = play(planned, tmp_path / "runs")
    assert problem.startswith("tiny-iid was not run: cifar10 is not in")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("files", "size"), [(paper(), []), (small(), ["--small"])])
def test_the_ablations_have_tables_and_figures(
    call: Call, tmp_path: Path, files: Collection, size: list[str]
) -> None:
    some = {
        one.name: one
        for study in plans.OVER_LIMITS
        for one in plans.over_limits(files, study, limits=[0.2, 0.4], seeds=1)
    }
    for planned in some.values():
        made_up(planned, tmp_path / "out")
    limits = ["--limits", "0.2,0.4", "--read", "--out", "out", *size]
    printed = call("reproduce", "ablation", *limits)
    assert "qff without gains" in printed
    assert "left out" not in printed
    assert "settings other" not in printed
    printed = call("reproduce", "selectors", *limits)
    assert "min+all" in printed
    for name in ("ablation", "selectors"):
        written = {path.suffix for path in (tmp_path / "out").glob(f"{name}.*")}
        assert written == {".md", ".csv", ".png", ".svg"}
    assert "--limits half" in call("reproduce", "ablation", "--limits", "half", code=2)


def test_fairness_beside_the_papers(call: Call, tmp_path: Path) -> None:
    row = "mobilenet-cifar10-rc"
    for planned in plans.table2(paper(), rows=[row], strategies=["cocofl", "heterofl"], seeds=1):
        made_up(planned, tmp_path / "out")
    call("reproduce", "fairness", "--read", "--out", "out")
    shown = (tmp_path / "out" / "fairness.md").read_text()
    assert "| cocofl | paper | 79.0 | 70.0 | 68.0 | +11.0 |" in shown
    assert "| heterofl | running | " in shown
    assert (tmp_path / "out" / f"fairness-{row}.svg").stat().st_size > 1000


def test_profiling_has_a_table_and_figures(call: Call, tmp_path: Path) -> None:
    call("reproduce", "profiling", "--out", "out")
    shown = (tmp_path / "out" / "profiling.md").read_text()
    assert "| measured:epyc-mobilenet/qff | qff | 210 |" in shown
    assert (tmp_path / "out" / "profiling-mobilenet-blocks.png").is_file()
    assert (tmp_path / "out" / "profiling-mobilenet.svg").is_file()
    assert "no table of cnn ships" in call("reproduce", "profiling", "--model", "cnn", code=2)
