"""Whole runs, tiny: every strategy, reproducible, resumable, honest about what went wrong."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cocofl import Span
from cocofl.config import Experiment
from cocofl.engine.channels import WorkerFailed
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.engine.workers import Workers
from cocofl.errors import (
    CocoflError,
    InvalidExperiment,
    InvalidState,
    NoFeasibleSpan,
    RunFolderProblem,
)
from cocofl.experiment import Run, Setup, evaluate_run, simulate
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.subject import Settings
from cocofl.profiling.table import beside_head
from cocofl.runlog import RoundRecord
from cocofl.span import Blocks
from tests.states import same_state

TINY: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "resnet10-digits", "options": {"tiny": True}},
    "devices": {"count": 12, "per_round": 4},
    "training": {"batch": 16},
    "evaluation": {"every": 2},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}


def tiny(**changes: Any) -> Experiment:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return Experiment.parse(TINY).changed(dotted)


@pytest.fixture(scope="module")
def executor() -> Iterator[InProcess]:
    here = InProcess()
    yield here
    here.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    two = Workers(2)
    yield two
    two.close()


def play(experiment: Experiment, path: Path, executor: Any, **more: Any) -> Run:
    return simulate(experiment, out=path, executor=executor, **more)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_and_keeps_the_folders_promise(
    strategy: str, tmp_path: Path, executor: InProcess
) -> None:
    run = play(tiny(strategy__name=strategy), tmp_path / "run", executor)
    n_rounds = 1 if strategy == "centralized" else 3
    assert [record.round for record in run.rounds] == list(range(1, n_rounds + 1))
    final = run.final
    assert 0 <= final.scores["accuracy"] <= 1
    assert set(final.scores["group_accuracy"]) == {"strong", "medium", "weak"}
    assert len(final.scores["class_accuracy"]) == 10
    assert run.fates["merged"] > 0
    for record in run.rounds:
        assert (record.bytes_up > 0) == (record.count("merged") > 0)
        # Without a deadline two updates may arrive at one moment.
        assert record.simulated_s > 0 or not (record.bytes_up and facts_of(strategy).waits)
    assert all(bool(torch.isfinite(t).all()) for t in run.state.values())
    assert run.experiment == tiny(strategy__name=strategy)
    assert {p.name for p in run.path.iterdir()} == {
        "experiment.toml",
        "metrics.jsonl",
        "timing.jsonl",
        "plan.json",
        "about.json",
        "model.safetensors",
    }
    assert run.folder.about["tables"]
    assert set(run.final_by_statistics) == {"running", "batch"}


def test_two_runs_with_one_seed_are_the_same_bytes(
    tmp_path: Path, executor: InProcess, workers: Workers
) -> None:
    """Also in worker processes, however many there are."""
    runs = [
        play(tiny(), tmp_path / "here", executor),
        play(tiny(), tmp_path / "again", executor),
        play(tiny(), tmp_path / "workers", workers),
    ]
    first, *others = runs
    for other in others:
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (first.path / name).read_bytes() == (other.path / name).read_bytes(), name
    different = play(tiny(seed=1), tmp_path / "seed1", executor)
    assert not same_state(first.state, different.state)


def test_with_every_device_strong_cocofl_is_fedavg_full(
    tmp_path: Path, executor: InProcess
) -> None:
    strong = [{"name": "strong", "time": 1.0, "memory": 1.0, "upload": 1.0}]
    ours, full, fedavg = (
        play(tiny(strategy__name=name, devices__groups=strong), tmp_path / name, executor)
        for name in ("cocofl", "fedavg-full", "fedavg")
    )
    weights = {key: t for key, t in ours.state.items() if not key.startswith("scales.")}
    assert same_state(weights, full.state)
    assert same_state(fedavg.state, full.state)
    assert [r.scores for r in ours.evaluated] == [r.scores for r in full.evaluated]


def test_budgets_are_obeyed(tmp_path: Path, executor: InProcess) -> None:
    experiment = tiny(rounds=4)
    setup = Setup(experiment)
    run = play(experiment, tmp_path / "run", executor)
    table = setup.tables.spans("qff")
    seen = 0
    for record in run.rounds:
        for device, group, work, fate in record.devices:
            if fate != "merged":
                continue
            start, stop = map(int, work.split(":"))
            budget = setup.federation.situation(device, record.round - 1).budget
            needs = table.row(Span(start, stop))
            assert all(
                need <= limit * (1 + 1e-9)
                for need, limit in zip(needs, table.limits(budget), strict=True)
            ), (device, group, work)
            seen += 1
    assert seen


def test_lost_and_late_updates_are_discarded(tmp_path: Path, executor: InProcess) -> None:
    lost = play(tiny(faults__dropout=1.0), tmp_path / "lost", executor)
    assert all(record.count("merged") == 0 for record in lost.rounds)
    assert all(record.count("lost") > 0 for record in lost.rounds)
    assert same_state(lost.state, Setup(tiny()).job().initial.tensors)
    late = play(tiny(faults__jitter=2.0, rounds=4), tmp_path / "late", executor)
    assert sum(record.count("late") for record in late.rounds) > 0
    assert sum(record.count("merged") for record in late.rounds) > 0


def test_devices_with_nothing_feasible_sit_out_and_are_counted(
    tmp_path: Path, executor: InProcess
) -> None:
    groups = [{"name": "able"}, {"name": "unable", "memory": 0.0}]
    run = play(tiny(devices__groups=groups), tmp_path / "run", executor)
    for record in run.rounds:
        for _device, group, work, fate in record.devices:
            assert (fate == "infeasible") == (group == "unable") == (work is None)
    assert sum(record.count("infeasible") for record in run.rounds) > 0


def test_when_nobody_can_train_the_run_does_not_begin(tmp_path: Path, executor: InProcess) -> None:
    groups = [{"name": "unable", "memory": 0.0}]
    with pytest.raises(NoFeasibleSpan, match="no device can train anything"):
        play(tiny(devices__groups=groups), tmp_path / "run", executor)
    assert not (tmp_path / "run").exists()  # so the same command, put right, finds its place free


def broken_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """NaN for a device that holds a 3."""
    loss = nn.functional.cross_entropy(outputs, labels)
    return loss * float("nan") if bool((labels == 3).any()) else loss


def test_a_device_with_a_nan_loss_is_rejected_and_the_run_goes_on(
    tmp_path: Path, executor: InProcess
) -> None:
    experiment = tiny(training__loss=f"{__name__}:broken_loss", data__alpha=0.02)
    run = play(experiment, tmp_path / "run", executor)
    assert sum(record.count("rejected") for record in run.rounds) > 0
    assert sum(record.count("merged") for record in run.rounds) > 0
    assert all(bool(torch.isfinite(t).all()) for t in run.state.values())


def test_statistics_of_the_batch_are_for_all_strategies(
    tmp_path: Path, executor: InProcess
) -> None:
    for strategy in ("cocofl", "heterofl"):
        path = tmp_path / strategy
        run = play(tiny(strategy__name=strategy), path, executor)
        found = evaluate_run(path, changes={"evaluation.statistics": "batch"}, executor=executor)
        assert (
            found["class_accuracy"] != run.final.scores["class_accuracy"] or strategy == "heterofl"
        )
        again = evaluate_run(path, executor=executor)
        assert again["accuracy"] == run.final.scores["accuracy"]


def test_a_run_begins_with_given_weights(tmp_path: Path, executor: InProcess) -> None:
    first = play(tiny(strategy__name="fedavg-full"), tmp_path / "first", executor)
    tuned = tiny(
        strategy__name="fedavg-full", model__init=str(first.path / "model.safetensors"), rounds=1
    )
    assert same_state(Setup(tuned).job().initial.tensors, first.state)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(CocoflError, match="cannot read"):
        Setup(tiny(model__init=str(broken))).job()


@pytest.mark.parametrize("strategy", ["cocofl", "heterofl"])
def test_the_end_is_evaluated_with_both_statistics(
    strategy: str, tmp_path: Path, executor: InProcess
) -> None:
    found = {}
    for own in ("running", "batch"):
        changes = {"strategy__name": strategy, "evaluation__statistics": own}
        run = play(tiny(**changes), tmp_path / own, executor)
        found[own] = {kind: one["accuracy"] for kind, one in run.final_by_statistics.items()}
        for kind, accuracy in found[own].items():
            again = evaluate_run(
                run.path, changes={"evaluation.statistics": kind}, executor=executor
            )
            assert again["accuracy"] == accuracy
    assert found["running"] == found["batch"]


def test_a_run_begun_elsewhere_goes_on_here(tmp_path: Path, executor: InProcess) -> None:
    whole = play(tiny(), tmp_path / "whole", executor)

    class Stop(Exception):
        pass

    class Stopper:
        def on_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise Stop

        def on_end(self) -> None:
            raise AssertionError

    elsewhere = tiny(data__dir="/their/data", engine__workers=7, engine__checkpoint_every=1)
    with pytest.raises(Stop):
        play(elsewhere, tmp_path / "moved", executor, watchers=[Stopper()])
    moved = play(tiny(), tmp_path / "moved", executor, resume=True)
    assert same_state(moved.state, whole.state)
    theirs = moved.experiment.changed({"tables.spans": "/their/x64.json", "data.dir": ""})
    (moved.path / "experiment.toml").write_text(theirs.to_toml())
    assert evaluate_run(moved.path, executor=executor)["accuracy"] == whole.final.scores["accuracy"]


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path, executor: InProcess) -> None:
    path = tmp_path / "run"
    play(tiny(rounds=1), path, executor)
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderProblem, match="--resume"):
        play(tiny(rounds=1), path, executor)
    with pytest.raises(InvalidExperiment, match=r"another experiment.*seed is 9 .there: 0"):
        play(tiny(rounds=1, seed=9), path, executor, resume=True)
    with pytest.raises(InvalidExperiment, match=r"one: strategy\.variant is 'ff' .there: None"):
        play(tiny(rounds=1, strategy__variant="ff"), path, executor, resume=True)
    assert play(tiny(rounds=1), path, executor, resume=True).final  # complete: nothing to do
    assert (path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy.name": "cocofll"}, "unknown strategy 'cocofll' .did you mean cocofl"),
        ({"strategy.varient": "ff"}, "unknown key strategy.varient .did you mean variant"),
        ({"strategy.variant": "fff"}, "strategy.variant is 'fff' .did you mean ff"),
        ({"model.name": "mobilenet"}, "takes images of 3×32×32 .* has 1×8×8$"),
        ({"model.options": {"image_size": 9}}, r"; say image_size = 8 in .model.options.$"),
        ({"model.init": "randm"}, "'randm' .did you mean random.., and .* a safetensors file, n"),
        ({"data.split": "rcc"}, "did you mean rc"),
        ({"devices.groups": "papr"}, "devices.groups is 'papr'"),
        ({"model.options": {"tiney": True}}, "failed with TypeError: .*tiney"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CocoflError, match=message):
        simulate(Experiment.parse(TINY).changed(changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    analytic_table(Settings("cnn", batch=2)).save(path)
    with pytest.raises(CocoflError, match=r"is for 3 blocks \(cnn\), but the model has 6"):
        Setup(tiny(tables__spans=str(path)))


def narrow_only(num_classes: int) -> tuple[nn.Module, torch.Tensor]:
    """A network of the user's own that has no widths."""
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, num_classes)),
    )
    return model, torch.zeros(2, 1, 8, 8)


def test_a_network_of_the_users_own(tmp_path: Path, executor: InProcess) -> None:
    own = {"model.name": f"{__name__}:narrow_only", "model.options": {}}
    experiment = Experiment.parse(TINY).changed(own)
    run = play(experiment, tmp_path / "run", executor)
    assert run.final.scores["accuracy"] > 0
    with pytest.raises(CocoflError, match="takes no width="):
        Setup(experiment.with_strategy("heterofl"))


def test_workers_report_mistakes_and_deaths(tmp_path: Path) -> None:
    two = Workers(2)
    try:
        for channel in two._channels:
            channel.process.kill()
        with pytest.raises(WorkerFailed, match="--resume continues"):
            play(tiny(), tmp_path / "run", two)
    finally:
        two.close()


def test_groups_are_weighed_by_their_classes(tmp_path: Path, executor: InProcess) -> None:
    run = play(tiny(), tmp_path / "run", executor)
    setup = Setup(tiny())
    labels = setup.data.train.labels
    for index, group in enumerate(("strong", "medium", "weak")):
        members = np.flatnonzero(setup.devices.group_of == index)
        held = np.concatenate([labels[setup.partition[d]] for d in members])
        expected = np.mean([run.final.scores["class_accuracy"][label] for label in held])
        assert run.final.scores["group_accuracy"][group] == pytest.approx(expected, abs=1e-5)


def test_a_final_model_that_is_cut_off_is_noticed(tmp_path: Path, executor: InProcess) -> None:
    path = tmp_path / "run"
    model = play(tiny(rounds=1), path, executor).path / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1])
    with pytest.raises(InvalidState, match=r"model.safetensors.*remove the file: --resume"):
        play(tiny(rounds=1), path, executor, resume=True)
    model.unlink()
    play(tiny(rounds=1), path, executor, resume=True)
    assert model.read_bytes() == whole


KILLED = """
import sys
from cocofl.config import Experiment
from cocofl.experiment import simulate
simulate(Experiment.load(sys.argv[1]), out=sys.argv[2], resume=True)
"""


@pytest.mark.slow  # `make test-hostile` kills fifty
def test_killed_at_any_moment_a_run_resumes_to_the_same_bits(
    tmp_path: Path, executor: InProcess
) -> None:
    experiment = tiny(rounds=6, engine__workers=1)
    undisturbed = play(experiment, tmp_path / "undisturbed", executor)
    file, path = tmp_path / "experiment.toml", tmp_path / "killed"
    file.write_text(experiment.to_toml())
    chance = random.Random(4)
    kills = 0
    while not (path / "model.safetensors").exists():
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(file), str(path)])
        rounds_before = _lines(path / "metrics.jsonl")
        # Importing takes seconds, a round much less: wait for progress, then strike at random.
        while process.poll() is None and _lines(path / "metrics.jsonl") <= rounds_before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.15))
        if process.poll() is None and kills < 2:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 1
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (path / name).read_bytes() == (undisturbed.path / name).read_bytes(), name


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_metrics_hold_no_wall_clock(tmp_path: Path, executor: InProcess) -> None:
    run = play(tiny(rounds=1), tmp_path / "run", executor)
    (record,) = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    assert not {key for key in record if "train_s" in key or "evaluate_s" in key}
    (timing,) = run.folder.timing()
    assert timing["train_s"] > 0


@pytest.mark.parametrize("on", ["serial", "cohort"])
def test_the_classifier_is_trained_beside_every_span(on: str, executor, tmp_path: Path) -> None:
    one = executor if on == "serial" else CohortExecutor("cpu")
    experiment = tiny(strategy__head=True)
    run = play(experiment, tmp_path / "head", one)
    works = [Blocks(work) for r in run.rounds for _, _, work, _ in r.devices if work]
    assert all(5 in blocks for blocks in works)
    apart = [blocks for blocks in works if len(blocks.spans) == 2]
    assert {str(blocks.spans[1]) for blocks in apart} == {"5:6"}
    table = Setup(experiment).tables.spans("qff")
    for blocks in apart:
        alone, both = table.row(blocks.spans[0]), beside_head(table).row(blocks)
        assert both[0] > alone[0]
        assert both[1] >= alone[1]
        assert both[2] > alone[2]
    before = Setup(experiment).job().initial.tensors
    moved = {key.partition(".")[0] for key, t in before.items() if not t.equal(run.state[key])}
    assert "classifier" in moved
