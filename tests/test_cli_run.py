"""The commands that simulate, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cocofl.experiment import Run
from cocofl.fl.metrics import metric
from cocofl.fl.strategies import STRATEGIES
from cocofl.runlog import only_writer
from tests.command_line import Call

TINY = """
name = "tiny"
rounds = 2
model = {options = {tiny = true}}
devices = {count = 6, per_round = 3}
engine = {kernels = "reference", workers = 1}
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)


def test_run_then_resume_then_evaluate(call: Call, tmp_path: Path) -> None:
    done = call("run", "tiny.toml", "--set", "training.lr=0.05", "--track", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "accuracy of weak" in done.stdout
    assert "analytic: nothing was measured" in done.stdout
    assert done.stderr == ""  # no progress bar, no noise, where nobody looks
    assert list((tmp_path / "runs/tiny-tensorboard").iterdir())
    again = call("run", "tiny.toml", "--set", "training.lr=0.05")
    assert again.returncode == 2
    assert "exists already; continue it with --resume" in again.stderr
    resumed = call("run", "tiny.toml", "--set", "training.lr=0.05", "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert summary["rounds"] == 2
    tested = call("evaluate", "runs/tiny", "--json")
    assert json.loads(tested.stdout)["accuracy"] == summary["accuracy"]
    os.truncate("runs/tiny/model.safetensors", 5000)
    damaged = call("run", "tiny.toml", "--set", "training.lr=0.05", "--resume")
    assert damaged.returncode == 2
    assert "cannot read runs/tiny/model.safetensors" in damaged.stderr
    assert "remove the file: --resume then plays its rounds again" in damaged.stderr
    assert len(damaged.stderr.splitlines()) == 1


def test_a_cohort_computes_where_it_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("run", "tiny.toml", "--device", "cpu", "--no-report")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("runs/tiny/about.json").read_text())["engine"] == "cohort"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = call("run", "tiny.toml", "--device", "cuda", "--out", "elsewhere")
    assert refused.returncode == 2
    assert "was asked for a GPU, but there is none here" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not Path("elsewhere").exists()
    tested = call("evaluate", "runs/tiny")
    assert tested.returncode == 0, tested.stderr


def test_compare_prints_one_table(call: Call, tmp_path: Path) -> None:
    words = ["--strategies", "cocofl,fedavg-full", "--seeds", "2", "--lr-grid", "0.1,0.2"]
    done = call("compare", "tiny.toml", *words, "--out", "both", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["strategy"], row["split"]) for row in found["rows"]] == [
        ("cocofl", "rc"),
        ("fedavg-full", "rc"),
    ]
    assert {row["lr"] for row in found["rows"]} <= {0.1, 0.2}
    runs = {str(p.parent.relative_to(tmp_path / "both")) for p in tmp_path.rglob("model.*")}
    assert "rc/cocofl/seed1" in runs
    assert "rc/tuning/fedavg-full/lr0.2" in runs
    resumed = call("compare", "tiny.toml", *words, "--out", "both", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "the best of 0.1, 0.2, by another seed" in resumed.stdout


PLAIN_MODEL = """
import torch
from torch import nn

def plain(tiny=True):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
    return nn.Sequential(body, nn.Linear(8, 10)), torch.rand(4, 1, 8, 8)
"""


def test_compare_plays_all_that_suit_a_network_under_every_budget(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: STRATEGIES[name] for name in ("cocofl", "heterofl", "fedavg")}
    monkeypatch.setattr("cocofl.cli.running.STRATEGIES", some)
    (tmp_path / "plain_model.py").write_text(PLAIN_MODEL)
    words = ["--strategies", "fedavg,all", "--budgets", "paper,limited:0.5", "--seeds", "1"]
    words += ["--set", "model.name=plain_model:plain", "--no-report"]
    done = call("compare", "tiny.toml", *words, "--out", "league", "--json")
    assert done.returncode == 0, done.stderr
    assert "left out: heterofl: " in done.stderr, "a network without widths"
    found = {str(p.parent.relative_to(tmp_path / "league")) for p in tmp_path.rglob("model.*")}
    assert found == {
        f"{budget}/rc/{name}/seed0"
        for budget in ("paper", "limited0.5")
        for name in ("cocofl", "fedavg")
    }
    words[1] = "cocofl,heterofl"
    refused = call("compare", "tiny.toml", *words, "--out", "again")
    assert refused.returncode == 2
    assert not Path("again").exists(), "nothing is trained before it is found out"


GAP_METRIC = """
import torch
from cocofl.metrics import Metric

def sums(outputs, labels, classes):
    gaps = outputs.max(1).values - outputs[torch.arange(len(labels)), labels]
    return torch.stack([gaps.double().sum(), torch.tensor(float(len(gaps)), dtype=torch.float64)])

def gap():
    return Metric("gap", sums, lambda s: float(s[0] / s[1]), higher_is_better=False)
"""
OWN = ("--set", 'evaluation.metrics=["gap_metric:gap", "loss"]')


def test_a_metric_of_ones_own_is_what_is_shown_and_chosen_by(call: Call, tmp_path: Path) -> None:
    (tmp_path / "gap_metric.py").write_text(GAP_METRIC)
    done = call("run", "tiny.toml", *OWN)
    assert done.returncode == 0, done.stderr
    final = Run.open("runs/tiny").final.scores
    assert list(final) == ["gap", "test_loss"], "without accuracy there are no groups"
    assert f"{final['gap']:.4g}" in next(x for x in done.stdout.splitlines() if "gap" in x)
    assert f"{final['test_loss']:.4g}" in next(x for x in done.stdout.splitlines() if "loss" in x)
    assert "accuracy" not in done.stdout
    assert "no report" not in done.stdout
    found = json.loads(call("run", "tiny.toml", *OWN, "--resume", "--json").stdout)
    assert found["gap"] == final["gap"]
    words = ["--strategies", "cocofl,heterofl", "--seeds", "1", "--lr-grid", "0.001,0.1"]
    compared = call("compare", "tiny.toml", *OWN, *words, "--out", "both")
    assert compared.returncode == 0, compared.stderr
    assert "gap" in compared.stdout
    assert "CoCoFL ahead, in gap: heterofl" in compared.stdout
    for strategy in ("cocofl", "heterofl"):
        tried = {
            rate: Run.open(f"both/rc/tuning/{strategy}/lr{rate}").final.scores["gap"]
            for rate in (0.001, 0.1)
        }
        chosen = Run.open(f"both/rc/{strategy}/seed0").experiment.training.lr
        assert chosen == min(tried, key=lambda rate: tried[rate]), "lower is better"


def test_a_metric_is_read_and_shown_where_its_module_is_not(call: Call, tmp_path: Path) -> None:
    (tmp_path / "gap_metric.py").write_text(GAP_METRIC)
    assert call("run", "tiny.toml", *OWN, "--no-report").returncode == 0
    tested = call("evaluate", "runs/tiny")
    assert tested.returncode == 2
    assert "gap_metric:gap would run code of the module" in tested.stderr
    tested = call("evaluate", "runs/tiny", "--trust")
    assert tested.returncode == 0, tested.stderr
    assert [word for word in tested.stdout.split() if word in ("gap", "test_loss", "all")] == [
        "gap", "test_loss", "all",
    ]  # fmt: skip
    (tmp_path / "gap_metric.py").unlink()
    sys.modules.pop("gap_metric")
    shown = call("report", "runs/tiny", "--figures", "figures")
    assert shown.returncode == 0, shown.stderr
    assert Path("figures/gap.png").is_file()
    page = Path("runs/tiny/report.html").read_text()
    for words in ("<th>gap</th>", "<th>test_loss</th>", "Gap over rounds", "Who holds what"):
        assert words in page
    assert "Fairness" not in page
    assert "gap_metric" not in sys.modules


def test_metrics_that_cannot_be_told_apart_are_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "gap_metric.py").write_text(GAP_METRIC.replace('"gap"', '"merged"'))
    for names, message in (
        ('["gap_metric:gap"]', "a metric is called 'merged', and so is something else"),
        ('["f1", "f1"]', "a metric is called 'f1'"),
        ("[]", "evaluation.metrics is empty"),
    ):
        sys.modules.pop("gap_metric", None)
        metric.cache_clear()
        refused = call("run", "tiny.toml", "--set", f"evaluation.metrics={names}")
        assert refused.returncode == 2
        assert message in refused.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "missing.toml"], "cannot read missing.toml"),
        (["run", "--set", "training.lr"], "expected key=value"),
        (["run", "--set", "trainin.lr=1"], "unknown key trainin (did you mean training?)"),
        (["run", "tiny.toml", "--track", "tensorbord"], "did you mean tensorboard"),
        (["compare", "tiny.toml", "--lr-grid", "fast"], "--lr-grid fast"),
        (["compare", "tiny.toml", "--lr-grid", "0.1,-3"], "training.lr is -3.0"),
        (["compare", "tiny.toml", "--strategies", ","], "no strategy to compare"),
        (["compare", "tiny.toml", "--strategies", "fedavg,cocofll"], "did you mean cocofl"),
        (["compare", "tiny.toml", "--splits", "iid,rcc"], "no split 'rcc' (did you mean rc?)"),
        (["evaluate", "."], "is not a run folder"),
        (
            ["run", "tiny.toml", "--set", "strategy.name=heterofl", "--set=strategy.scaler=maybe"],
            "strategy.scaler is 'maybe'; expected true or false",
        ),
        (
            ["run", "tiny.toml", "--set", "strategy.name=fjord", "--set=strategy.distillation=x"],
            "strategy.distillation is 'x'; expected a number",
        ),
        (["flower", "app", "x", "--set", "strategy.name=fjord"], "'fjord' cannot be deployed"),
        (["flower", "up", "--out", "tiny.toml"], "tiny.toml exists already"),
        (["report", ".", "--out", "."], ". is a folder; expected the name of a page"),
        (["report", ".", "--out", "tiny.toml/page"], "cannot write tiny.toml/page: Not a dir"),
        (["report", ".", "--figures", "tiny.toml"], "Not a directory; choose another --figures"),
        (["run", "--out", "tiny.toml/run"], "cannot write tiny.toml/run: Not a directory"),
        (["compare", "--out", "tiny.toml/all"], "cannot write tiny.toml/all: Not a directory"),
        (["reproduce", "profiling", "--out", "tiny.toml"], "Not a directory; choose another --out"),
        (["reproduce", "table2", "--out", "tiny.toml"], "Not a directory; choose another --out"),
        (["data", "show", "digits", "--out", "tiny.toml/a.png"], "choose another --out"),
        (["flower", "app", "tiny.toml"], "Not a directory; choose another folder"),
        (["flower", "up", "--out", "tiny.toml/x"], "Not a directory; choose another --out"),
        (["run", "tiny.toml", "--set", "training.optimizer=sdg"], "did you mean sgd"),
        (
            ["run", "tiny.toml", "--set", "training.optimizer=adam", "--set=training.momentum=0.5"],
            "the optimizer 'adam' cannot take lr, weight_decay, momentum",
        ),
    ],
)
def test_mistakes_exit_with_2_and_one_message(call: Call, words: list[str], message: str) -> None:
    failed = call(*words)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not Path("runs").exists()  # the mended command finds its folder free


def test_a_folder_that_another_process_writes_is_left_to_it(call: Call, tmp_path: Path) -> None:
    with only_writer(Path("runs/tiny")):
        for more in ([], ["--resume"]):
            refused = call("run", "tiny.toml", *more)
            assert refused.returncode == 2
            assert "another process is writing the run in runs/tiny;" in refused.stderr
            assert len(refused.stderr.splitlines()) == 1
    assert list(Path("runs/tiny").iterdir()) == []


OWN_STRATEGIES = """
from cocofl.strategies import Mean, Strategy, StrategyFacts, declares

def blocks(tables):
    return Strategy(lambda situation: None, Mean("everyone"))

@declares(StrategyFacts(uploads="slices"))
def slices(tables):
    return Strategy(lambda situation: None, Mean("senders"))
"""


def test_what_a_strategy_sends_decides_whether_it_can_be_deployed(
    call: Call, tmp_path: Path
) -> None:
    (tmp_path / "own_strategies.py").write_text(OWN_STRATEGIES)
    refused = call("flower", "app", "x", "--set", "strategy.name=own_strategies:slices")
    assert refused.returncode == 2
    assert "'own_strategies:slices' cannot be deployed" in refused.stderr
    assert not Path("x").exists()
    for name in ("own_strategies:blocks", "only_on.the_server:strategy"):
        made = call("flower", "app", name.partition(":")[0], "--set", f"strategy.name={name}")
        assert made.returncode == 0, made.stderr


@pytest.mark.slow
def test_what_fails_in_a_worker_is_one_line_and_debug_shows_where(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text("def loss(outputs, labels):\n    raise OSError('full')\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("run", "tiny.toml", "--set", "training.loss=failing:loss", "--no-report")
    failed = call(*words)
    assert failed.returncode == 1
    assert failed.stderr.startswith("failed: WorkerFailed: OSError: full")
    assert failed.stderr.count("\n") == 1
    assert 'failing.py", line 2, in loss' in call(*words, "--resume", "--debug").stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_say_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    cocofl = Path(sys.executable).with_name("cocofl")
    words = [cocofl, "run", "tiny.toml", "--set", "rounds=5000", "--set", "engine.workers=2"]
    run = subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "runs/tiny/metrics.jsonl").exists():
        assert run.poll() is None
        time.sleep(0.05)
    os.killpg(run.pid, number)  # as a terminal does: to every process of the command
    _, said = run.communicate()
    assert run.returncode == code
    assert said == (
        "stopped: what is done is kept in runs/tiny; the same command with --resume goes on\n"
    )


def test_a_run_can_be_watched(call: Call) -> None:
    done = call("run", "tiny.toml", "--watch", "--no-report")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "watch: runs/tiny/live.html\n"
    assert "Round 2 of 2, complete." in Path("runs/tiny/live.html").read_text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["faults.dropout=1.0"], "(6 lost): its model is the one it began with; see [faults]"),
        (["training.lr=1e38"], "(6 rejected): its model is the one it began with; what devices"),
    ],
)
def test_a_run_in_which_nothing_is_merged_fails(call: Call, changes: list[str], why: str) -> None:
    words = [word for change in changes for word in ("--set", change)]
    failed = call("run", "tiny.toml", *words, "--no-report")
    assert failed.returncode == 1
    assert "failed: no update was merged in 2 rounds of runs/tiny" in failed.stderr
    assert why in failed.stderr
    assert "accuracy of weak" in failed.stdout, "what there is to see is shown all the same"


def test_ctrl_c_while_a_checkpoint_gets_its_name_is_no_problem_of_the_disk(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        if target.name == "checkpoint.safetensors":
            raise KeyboardInterrupt
        return renamed

    monkeypatch.setattr(Path, "replace", interrupted)
    words = ("run", "tiny.toml", "--set", "engine.checkpoint_every=1", "--no-report")
    stopped = call(*words)
    assert stopped.returncode == 130
    assert stopped.stderr.startswith("stopped: what is done is kept in runs/tiny;")
    monkeypatch.setattr(Path, "replace", rename)
    os.truncate("runs/tiny/checkpoint.safetensors", 3000)
    damaged = call(*words, "--resume")
    assert damaged.returncode == 2
    assert "remove the file: --resume then plays its rounds again" in damaged.stderr
    Path("runs/tiny/checkpoint.safetensors").unlink()
    assert call(*words, "--resume").returncode == 0


def test_a_function_of_ones_own_that_raises_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "own_failing.py").write_text(
        "def data(folder):\n    return {}['train']\n\ndef net():\n    return 1 / 0\n"
    )
    failed = call("run", "tiny.toml", "--set", "data.name=own_failing:data")
    assert failed.returncode == 2
    place = tmp_path / "own_failing.py"
    assert f"own_failing:data failed with KeyError: 'train' (line 2 of {place})" in failed.stderr
    words = ("--set", "model.options={}", "--set", "model.name=own_failing:net")
    failed = call("run", "tiny.toml", *words)
    assert failed.returncode == 2
    assert "own_failing:net failed with ZeroDivisionError: division by zero" in failed.stderr
