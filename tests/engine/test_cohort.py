"""The cohort executor gives what the serial one gives: devices, spans, batches, model."""

from __future__ import annotations

import gc
import re
import time
import weakref
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import Span, split
from cocofl.config import Experiment
from cocofl.engine import cohort as engine
from cocofl.engine.cohort import CohortExecutor, TrainedAlone
from cocofl.engine.executor import InProcess
from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.experiment import Run, Setup, simulate, simulate_batch
from cocofl.experiment.engines import engine_kind
from cocofl.experiment.groups import batch_groups
from cocofl.fl.merge import Mean
from cocofl.fl.spans import SpanWork
from cocofl.fl.stacked import NotStacked, StackedNetworks, stacked
from cocofl.fl.trainer import Task
from cocofl.fl.training import OPTIMIZERS
from cocofl.fl.widths import OrderedWork, WidthWork
from cocofl.freeze import VARIANTS, KernelPlan
from cocofl.models import MODELS
from cocofl.models.base import narrowed
from cocofl.models.transformer import Encoder, EncoderLayer, Shape
from cocofl.runlog import RoundRecord, RunFolder
from cocofl.vector import Cohort, DeviceWork, Program, Sgd
from tests.engine.collecting import collected
from tests.vector.serial import train_one

HAS_GPU = torch.cuda.is_available()
TINY: dict[str, Any] = {
    # Over more rounds float32 amplifies what the order of sums changes, see below; tests/vector
    # compares rounds in float64.
    "rounds": 1,
    "model": {"name": "resnet10-digits", "options": {"tiny": True}},
    "devices": {"count": 12, "per_round": 4},
    "training": {"batch": 16},
    "evaluation": {"every": 1},
    "tables": {"spans": "analytic", "widths": "analytic"},
    "engine": {"kernels": "reference", "checkpoint_every": 1},
}
STRATEGIES = [
    ("cocofl", {"variant": "f"}, 1e-5),
    ("cocofl", {"variant": "ff"}, 1e-5),
    ("cocofl", {"variant": "qff"}, 2e-2),
    ("fedavg-full", {}, 1e-5),
    ("heterofl", {}, 1e-5),
    ("heterofl", {"scaler": True}, 1e-5),
    # A masked loss opens other ReLUs for another order of sums: it is compared in float64, below.
    ("fjord", {}, 1e-5),
    ("fjord", {"distillation": 0.5}, 1e-3),  # one ReLU; test_distillation.py is in float64
]


def play(strategy: str, options: dict[str, Any], path: Path, executor: Any) -> Run:
    changes = {f"strategy.{key}": value for key, value in options.items()}
    experiment = Experiment.parse(TINY).changed({"strategy.name": strategy} | changes)
    try:
        return simulate(experiment, out=path, executor=executor)
    finally:
        executor.close()


@pytest.mark.parametrize(("strategy", "options", "tolerance"), STRATEGIES)
def test_a_run_of_either_engine_gives_the_same_model(
    strategy: str, options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    serial = play(strategy, options, tmp_path / "serial", InProcess())
    cohort = play(
        strategy, options, tmp_path / "cohort", CohortExecutor("cpu", precision="fp32", devices=3)
    )  # 4 devices in chunks of 3
    assert [r.devices for r in serial.rounds] == [r.devices for r in cohort.rounds]
    assert [r.bytes_up for r in serial.rounds] == [r.bytes_up for r in cohort.rounds]
    assert serial.state.keys() == cohort.state.keys()
    for key, tensor in serial.state.items():
        difference = (tensor.double() - cohort.state[key].double()).abs().max()
        assert float(difference) <= tolerance, key


def double_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return 2 * F.cross_entropy(scores, labels)


@pytest.mark.parametrize(
    ("loss", "captures"), [("cross_entropy", True), (f"{__name__}:double_loss", False)]
)
def test_one_cohort_serves_all_rounds(
    loss: str, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where not all devices fit. What the host decides in each step is not captured."""
    made: list[bool] = []

    def make(*args: Any, capture: bool, **settings: Any) -> Cohort:
        made.append(capture)
        return Cohort(*args, capture=capture, **settings)

    monkeypatch.setattr("cocofl.engine.cohort.Cohort", make)
    experiment = Experiment.parse(TINY).changed({"rounds": 3, "training.loss": loss})
    simulate(experiment, out=tmp_path / "run", executor=CohortExecutor("cpu", devices=3))
    assert made == [captures]


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [("sgd", "cohort"), ("adam", "cohort"), ("torch.optim:RMSprop", "serial")],
)
def test_auto_is_what_the_optimizer_allows(
    optimizer: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_kind(Experiment().changed({"training.optimizer": optimizer})) == kind


class Exact(nn.Module):
    """A small network that computes in float64."""

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        channels = narrowed(8, width)
        self.stem = nn.Conv2d(1, channels, 3, stride=2)
        self.body = nn.Conv2d(channels, channels, 3)
        self.last = nn.Linear(channels, num_classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x.double()))
        return self.last(F.relu(self.body(x)).flatten(1))


def exact(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    return Exact(num_classes, width), torch.rand(4, 1, 8, 8)


DESCENTS = [{"optimizer": "sgd", "momentum": 0.5}, {"optimizer": "adam", "lr": 0.01}]


@pytest.mark.parametrize("optimizer", DESCENTS, ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("cocofl", {"variant": "f"}),
        ("cocofl", {"variant": "ff"}),
        ("fedavg-full", {}),
        ("heterofl", {}),
        ("heterofl", {"masked": True}),
        ("heterofl", {"masked": True, "scaler": True}),
        ("fjord", {}),
    ],
)
def test_two_rounds_in_float64_give_the_same_model(
    strategy: str,
    options: dict[str, Any],
    optimizer: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With clipping, decay, and mini-batches that are not full."""
    monkeypatch.setitem(MODELS, "exact", exact)  # not tried out, which needs float32
    changes = {
        "rounds": 2,
        "model": {"name": "exact"},
        "strategy": {"name": strategy, **options},
        "training": {"batch": 16, "weight_decay": 0.01, "clip": 1.0, **optimizer},
    }
    experiment = Experiment.parse(TINY | changes)
    serial = simulate(experiment, out=tmp_path / "s", executor=InProcess())
    cohort = simulate(experiment, out=tmp_path / "c", executor=CohortExecutor("cpu", devices=3))
    assert [r.devices for r in serial.rounds] == [r.devices for r in cohort.rounds]
    assert distance(serial, cohort) < 1e-9


def test_of_classes_that_nobody_has_the_classifier_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "exact", exact)
    training = {"batch": 16, "momentum": 0.5, "weight_decay": 0.01}
    job = Setup(Experiment.parse(TINY | {"model": {"name": "exact"}, "training": training})).job()
    labels = job.trainer.spec.train.labels
    classes, widths = [(1, 4), (4, 7), (1, 4, 9)], (0.5, 1.0, 0.25)
    states = []
    for executor in (InProcess(), CohortExecutor("cpu", devices=2)):
        executor.prepare(job.trainer, KernelPlan())
        state = executor.placed(job.initial)
        for round_index in range(2):
            tasks = [
                Task(
                    seed=0,
                    round_index=round_index,
                    device=device,
                    indices=np.flatnonzero(np.isin(labels, own))[: 40 + 5 * device],
                    work=WidthWork(width, masked=True),
                    lr=0.1,
                )
                for device, (own, width) in enumerate(zip(classes, widths, strict=True))
            ]
            state = Mean("senders")(state, collected(executor, tasks, state))
        states.append(state.tensors)
        executor.close()
    serial, cohort = states
    assert all(float((serial[key] - cohort[key]).abs().max()) < 1e-9 for key in serial)
    for key in ("last.weight", "last.bias"):
        stays = [
            torch.equal(a, b) for a, b in zip(cohort[key], job.initial.tensors[key], strict=True)
        ]
        assert np.flatnonzero(stays).tolist() == [0, 2, 3, 5, 6, 8]


def two_heads(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(64, 8)
            self.one, self.two = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.relu(self.body(x.flatten(1)))
            return self.one(x), self.two(x)

    return TwoHeads(), torch.rand(4, 1, 8, 8)


def can_stack(experiment: Experiment, work: Any) -> bool:
    """Whether devices with this work can be one computation."""
    job = Setup(experiment).job()
    networks = StackedNetworks(job.trainer, Program(job.trainer.chain(), torch.device("cpu")))
    try:
        stacked(networks, Task(0, 0, 0, np.arange(16), work, 0.1))
    except NotStacked:
        return False
    return True


def test_only_scores_can_be_masked() -> None:
    def can(name: str, work: WidthWork) -> bool:
        experiment = Experiment.parse(TINY | {"model": {"name": f"{__name__}:{name}"}})
        # A loss of one's own may read what is no tensor.
        return can_stack(experiment.changed({"training.loss": f"{__name__}:double_loss"}), work)

    assert can("reads_rows", WidthWork(0.5, masked=True))
    assert can("two_heads", WidthWork(1.0))
    assert not can("two_heads", WidthWork(1.0, masked=True))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "torch.optim:RMSprop"}, "knows the optimizers sgd and adam, not 'torch.op"),
        ({"optimizer": "adam", "momentum": 0.5}, "cannot take lr, weight_decay, momentum"),
        ({"optimizer": "own"}, "knows the optimizers sgd and adam, not 'own'"),
    ],
)
def test_other_optimizers_are_refused(
    training: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "own", partial(torch.optim.Adam, amsgrad=True))
    experiment = Experiment.parse(TINY | {"training": training})
    with pytest.raises(InvalidSetting, match=message):
        simulate(experiment, out=tmp_path, executor=CohortExecutor("cpu"))


class ReadsRows(nn.Module):
    """A Transformer over the eight rows of a digit."""

    segments = Encoder.segments

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        shape = Shape(length=8, heads=2, head_channels=8, hidden=16, dropout=0.0)
        channels = 2 * narrowed(8, width)
        self.rows = nn.Linear(8, channels)
        self.layers = nn.ModuleList(EncoderLayer(shape, width) for _ in range(2))
        self.last = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)  # (batch, 8, 8)
        mask = (x.sum(2) > 0).unsqueeze(1).unsqueeze(1)  # of rows that are not empty
        x = self.rows(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.last(x.mean(1))


def reads_rows(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    return ReadsRows(num_classes, width), torch.rand(4, 1, 8, 8)


@pytest.mark.parametrize(
    ("strategy", "options"), [("heterofl", {}), ("heterofl", {"scaler": True}), ("fjord", {})]
)
def test_narrower_transformers_train_together(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = {"name": f"{__name__}:reads_rows"}
    experiment = Experiment.parse(TINY | {"model": model, "rounds": 2})
    experiment = experiment.changed(
        {"strategy.name": strategy} | {f"strategy.{key}": value for key, value in options.items()}
    )
    assert all(can_stack(experiment, WidthWork(width)) for width in (0.125, 0.5, 1.0))
    serial = simulate(experiment, out=tmp_path / "s", executor=InProcess())
    cohort = simulate(experiment, out=tmp_path / "c", executor=CohortExecutor("cpu", devices=3))
    assert len({width for r in serial.rounds for _, _, width, _ in r.devices}) > 1
    assert [r.devices for r in serial.rounds] == [r.devices for r in cohort.rounds]
    assert distance(serial, cohort) < 1e-5


class Vectors(nn.Module):
    """Its norm finds one value per channel in a sample."""

    def __init__(self, num_classes: int, width: float, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(64, narrowed(8, width))
        self.norm, self.last = norm, nn.Linear(narrowed(8, width), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.flatten(1)))
        return self.last(F.relu(self.norm(x)))


def vectors(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    norm = nn.BatchNorm1d(narrowed(8, width))
    return Vectors(num_classes, width, norm), torch.rand(4, 1, 8, 8)


def untracked(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    norm = nn.BatchNorm1d(narrowed(8, width), track_running_stats=False)
    return Vectors(num_classes, width, norm), torch.rand(4, 1, 8, 8)


def images(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Of an image its norms find several values per channel."""
    channels = narrowed(4, width)
    body = nn.Sequential(nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())
    last = nn.Linear(36 * channels, num_classes)
    return nn.Sequential(body, nn.Flatten(), last), torch.rand(4, 1, 8, 8)


def points(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Of an image that is down to one point, one value."""
    channels = narrowed(4, width)
    body = nn.Sequential(nn.Conv2d(1, channels, 8), nn.BatchNorm2d(channels), nn.ReLU())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(channels, num_classes)), torch.rand(
        4, 1, 8, 8
    )


@pytest.mark.parametrize(
    ("network", "refusals"), [(vectors, 9), (untracked, 11), (images, 0), (points, 9)]
)
def test_a_mini_batch_of_one_sample_is_refused_where_the_serial_engine_does(
    network: Any, refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "own", network)
    job = Setup(Experiment.parse(TINY | {"model": {"name": "own"}})).job()
    executor, trainer = CohortExecutor("cpu", devices=2), job.trainer
    executor.prepare(job.trainer, KernelPlan())
    n, placed = len(trainer.chain()), executor.placed(job.initial)
    spans = [SpanWork(Span(a, b), v) for a, b in ((0, n), (0, 1), (n - 1, n)) for v in VARIANTS]
    refused = 0
    for work in (*spans, WidthWork(0.5), OrderedWork((0.5, 1.0))):
        tasks = [Task(0, 0, d, np.arange(16 + d), work, 0.1) for d in range(2)]
        try:
            trainer.train(tasks[1], job.initial)
        except InvalidSetting as error:
            refused += 1
            with pytest.raises(InvalidSetting, match=re.escape(str(error))):
                list(collected(executor, tasks, placed))
        else:
            assert all(sent.is_finite for sent in collected(executor, tasks, placed))
        assert len(list(collected(executor, tasks[:1], placed))) == 1
    assert refused == refusals


def random_depth(num_classes: int) -> tuple[nn.Module, Tensor]:
    """A network with randomness of its own."""
    torch.manual_seed(0)

    class RandomDepth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.last = nn.Linear(4 * 64, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.one(x))
            keep = F.dropout(torch.ones_like(x[:, :1, :1, :1]), 0.5, self.training)
            return self.last((x + keep * F.relu(self.two(x))).flatten(1))

    return RandomDepth(), torch.randn(4, 1, 8, 8)


def test_a_network_without_a_stacked_form_trains_device_by_device(tmp_path: Path) -> None:
    model = {"name": f"{__name__}:random_depth"}
    experiment = Experiment.parse(TINY | {"model": model})
    with pytest.warns(TrainedAlone, match="it draws random numbers of its own"):
        cohort = simulate(experiment, out=tmp_path / "c", executor=CohortExecutor("cpu"))
    serial = simulate(experiment, out=tmp_path / "s", executor=InProcess())
    assert serial.state.keys() == cohort.state.keys()
    assert all(torch.equal(tensor, cohort.state[key]) for key, tensor in serial.state.items())


def test_engines_differ_less_than_float32_from_float64() -> None:
    """Over several steps single roundings decide whether a ReLU opens: so does the order of sums.

    With digits, whose background is constant, training in float32 ends 0.01 away from float64.
    """
    training = {"training": {"batch": 16, "momentum": 0.5}}
    experiment = Experiment.parse(TINY | training | {"strategy": {"name": "fedavg-full"}})
    job = Setup(experiment).job()
    tasks = [
        Task(0, 0, device, job.federation.partition[device], SpanWork(Span(0, 6), "f"), 0.1)
        for device in range(4)
    ]
    trainer, sent = job.trainer, []
    for executor in (InProcess(), CohortExecutor("cpu", precision="fp32")):
        executor.prepare(job.trainer, KernelPlan())
        state = executor.placed(job.initial)
        sent.append([dict(one.tensors) for one in collected(executor, tasks, state)])
        executor.close()
    exact = split(deepcopy(trainer.model()).double(), torch.randn(16, 1, 8, 8).double())
    initial = {
        k: t.double() if t.is_floating_point() else t for k, t in job.initial.tensors.items()
    }
    for task, serial, cohort in zip(tasks, *sent, strict=True):
        loaded = [((x.double(),), y) for x, y in trainer.load(task)]
        work = DeviceWork(Span(0, len(exact)), "f", task.lr)
        truth, _ = train_one(exact, initial, work, loaded, Sgd(momentum=0.5))
        apart = max(float((serial[key] - cohort[key]).abs().max()) for key in serial)
        off = max(float((serial[key] - truth[key]).abs().max()) for key in serial)
        assert apart < off


def distance(one: Run, other: Run) -> float:
    return max(
        float((tensor.double() - other.state[key].double()).abs().max())
        for key, tensor in one.state.items()
    )


class Stop:
    """A watcher that ends a run after some rounds, as a power cut would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round(self, record: RoundRecord) -> None:
        if record.round == self.after:
            raise KeyboardInterrupt

    def on_end(self) -> None:
        pass


def bright_spots(_folder: Path | None) -> dict[str, tuple[Any, Any]]:
    """A small data set that needs nothing installed, as machines with a GPU may not have it."""
    rng = np.random.default_rng(0)

    def some(n: int) -> tuple[Any, Any]:
        labels = rng.integers(0, 10, n)
        images = rng.integers(0, 100, (n, 8, 8, 1))
        images[np.arange(n), labels % 8, labels // 2] += 150
        return images.astype(np.uint8), labels

    return {"train": some(600), "test": some(100)}


@pytest.mark.parametrize(
    "on", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU here"))]
)
@pytest.mark.parametrize("strategy", ["cocofl", "heterofl", "fjord"])
def test_an_interrupted_cohort_goes_on_as_if_nothing_had_been(
    strategy: str, on: str, tmp_path: Path
) -> None:
    settings = {"rounds": 5, "strategy.name": strategy, "data.name": f"{__name__}:bright_spots"}
    experiment = Experiment.parse(TINY).changed({**settings, "engine.checkpoint_every": 2})
    whole = simulate(experiment, out=tmp_path / "whole", executor=CohortExecutor(on))
    with pytest.raises(KeyboardInterrupt):
        simulate(experiment, out=tmp_path / "cut", executor=CohortExecutor(on), watchers=[Stop(3)])
    again = simulate(experiment, out=tmp_path / "cut", executor=CohortExecutor(on), resume=True)
    assert [r.devices for r in whole.rounds] == [r.devices for r in again.rounds]
    assert [r.loss for r in whole.rounds] == [r.loss for r in again.rounds]
    assert whole.state.keys() == again.state.keys()
    assert all(torch.equal(tensor, again.state[key]) for key, tensor in whole.state.items())


@pytest.mark.parametrize("at_once", [5, 8])
@pytest.mark.parametrize(
    ("strategy", "tolerance"), [("cocofl", 2e-2), ("heterofl", 1e-5), ("fjord", 1e-5)]
)
def test_seeds_that_run_together_give_what_each_gives_alone(
    strategy: str, tolerance: float, at_once: int, tmp_path: Path
) -> None:
    """Whether the devices of all of them fit, or not."""
    base = Experiment.parse(TINY | {"strategy": {"name": strategy}})
    several = {tmp_path / f"seed{seed}": base.changed({"seed": seed}) for seed in (3, 4)}
    together = simulate_batch(several, executor=CohortExecutor("cpu", devices=at_once))
    for run, one in zip(together, several.values(), strict=True):
        alone = simulate(one, out=tmp_path / f"alone{one.seed}", executor=CohortExecutor("cpu"))
        assert [r.devices for r in alone.rounds] == [r.devices for r in run.rounds]
        assert [r.bytes_up for r in alone.rounds] == [r.bytes_up for r in run.rounds]
        assert alone.state.keys() == run.state.keys()
        assert distance(alone, run) <= tolerance


def test_seeds_that_run_together_are_resumed_together(tmp_path: Path) -> None:
    base = Experiment.parse(TINY | {"rounds": 3})
    several = {tmp_path / f"seed{seed}": base.changed({"seed": seed}) for seed in (0, 1)}
    whole = {tmp_path / f"whole{one.seed}": one for one in several.values()}
    expected = simulate_batch(whole, executor=CohortExecutor("cpu"))
    with pytest.raises(KeyboardInterrupt):
        simulate_batch(several, executor=CohortExecutor("cpu"), watchers=[Stop(2)])
    found = simulate_batch(several, resume=True, executor=CohortExecutor("cpu"))
    for one, other in zip(expected, found, strict=True):
        assert distance(one, other) == 0


def test_a_run_with_fewer_rounds_is_complete_before_the_others(tmp_path: Path) -> None:
    base = Experiment.parse(TINY)
    long, short = tmp_path / "long", tmp_path / "short"
    several = {long: base.changed({"rounds": 3}), short: base.changed({"rounds": 1, "seed": 1})}
    with pytest.raises(KeyboardInterrupt):
        simulate_batch(several, executor=CohortExecutor("cpu"), watchers=[Stop(2)])
    assert [RunFolder(path).is_complete for path in several] == [False, True]


MIXED = {
    "cocofl": {"name": "cocofl", "variant": "ff"},
    "plain": {"name": "cocofl", "variant": "f"},
    "fedavg": {"name": "fedavg"},
    "heterofl": {"name": "heterofl"},
    "masked": {"name": "heterofl", "masked": True, "scaler": True},
    "fjord": {"name": "fjord"},
    "distilled": {"name": "fjord", "distillation": 0.5},
}


@pytest.mark.parametrize("at_once", [7, 40])
def test_strategies_that_run_together_give_what_each_gives_alone(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, over two rounds; whether the devices of all of them fit, or not."""
    monkeypatch.setitem(MODELS, "exact", exact)
    training = {"batch": 16, "weight_decay": 0.01, "momentum": 0.5}
    base = Experiment.parse(TINY | {"rounds": 2, "model": {"name": "exact"}, "training": training})
    several = {
        tmp_path / name: Experiment.parse(base.to_dict() | {"strategy": strategy, "seed": seed})
        for seed, (name, strategy) in enumerate(MIXED.items())
    }
    assert len(batch_groups(several)) == 1
    together = simulate_batch(several, executor=CohortExecutor("cpu", devices=at_once))
    for run, (path, one) in zip(together, several.items(), strict=True):
        alone = simulate(one, out=tmp_path / f"alone-{path.name}", executor=InProcess())
        assert [r.devices for r in alone.rounds] == [r.devices for r in run.rounds]
        assert [r.bytes_up for r in alone.rounds] == [r.bytes_up for r in run.rounds]
        assert alone.state.keys() == run.state.keys()
        assert distance(alone, run) < 1e-9, path.name


def test_int8_beside_narrower_networks_with_statistics_of_their_own(tmp_path: Path) -> None:
    """Of a network with norms, and with scales that only some runs measure."""
    strategies = {"cocofl": {}, "fjord": {"distillation": 0.5}, "heterofl": {}, "fedavg-full": {}}
    base = Experiment.parse(TINY | {"rounds": 2})
    several = {
        tmp_path / name: base.with_strategy(name, **options) for name, options in strategies.items()
    }
    together = simulate_batch(several, executor=CohortExecutor("cpu"))
    for run, (path, one) in zip(together, several.items(), strict=True):
        alone = simulate(one, out=tmp_path / f"alone-{path.name}", executor=CohortExecutor("cpu"))
        assert alone.state.keys() == run.state.keys()
        # The order of sums differs where more devices take part; in float64 see the test above.
        assert distance(alone, run) < 2e-2, path.name


def test_what_is_one_computation() -> None:
    base = Experiment.parse(TINY)
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "strategy": {"strategy.name": "heterofl"},
        "split": {"data.split": "rc"},
        "rate": {"training.lr": 0.5, "rounds": 3},
        "batch": {"training.batch": 8},
        "metrics": {"evaluation.metrics": ["accuracy"]},
        "codec": {"upload.codec": "own:codec"},
        "model": {"model.name": "mobilenet"},
        "central": {"strategy.name": "centralized"},
        "many": {"devices.count": 60, "devices.per_round": 30},
    }
    several = {Path(name): base.changed(change) for name, change in changes.items()}
    assert [[path.name for path in group] for group in batch_groups(several)] == [
        ["as it is", "strategy", "split", "rate"],
        ["batch"],
        ["metrics"],
        ["codec"],
        ["model"],
        ["central"],
        ["many"],
    ]


def test_runs_of_unequal_engines_do_not_go_together(tmp_path: Path) -> None:
    base = Experiment.parse(TINY)
    with pytest.raises(InvalidExperiment, match="must have the same engine"):
        simulate_batch(
            {tmp_path / "a": base, tmp_path / "b": base.changed({"engine.precision": "fp32"})}
        )


def test_only_the_states_of_a_round_are_kept() -> None:
    """Not those of all rounds before."""
    job = Setup(Experiment.parse(TINY)).job()
    indices = np.arange(20)
    for work in (SpanWork(Span(0, 6), "f"), WidthWork(0.5), OrderedWork((0.5, 1.0))):
        executor = CohortExecutor("cpu")
        executor.prepare(job.trainer, KernelPlan())
        state, seen = executor.placed(job.initial), []
        for round_index in range(4):
            sent = collected(executor, [Task(0, round_index, 0, indices, work, 0.1)], state)
            state = Mean("senders")(state, sent)
            seen.append(weakref.ref(state.parts["parameters"]))
        assert [one() is None for one in seen] == [True, True, True, False], work


def test_a_cohort_is_let_go_of_at_once() -> None:
    """When a larger one takes its place, and in the end: its memory is a GPU's."""
    job = Setup(Experiment.parse(TINY)).job()
    executor = CohortExecutor("cpu")
    executor.prepare(job.trainer, KernelPlan())
    state = executor.placed(job.initial)
    gc.disable()
    try:
        cohorts = []
        for devices in (1, 2):
            tasks = [Task(0, 0, d, np.arange(20), WidthWork(0.5), 0.1) for d in range(devices)]
            assert [one.is_finite for one in collected(executor, tasks, state)] == [True] * devices
            cohorts.append(weakref.ref(executor._cohort))
        assert [cohort() is None for cohort in cohorts] == [True, False]
        executor.close()
        assert [cohort() is None for cohort in cohorts] == [True, True]
    finally:
        gc.enable()


def test_a_process_with_nothing_to_play_does_not_end_while_libraries_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is in the middle of CUDA when Python ends takes the process down."""
    loaded = []

    def load(on: torch.device) -> None:
        time.sleep(1.0)
        loaded.append(on)

    monkeypatch.setattr(engine, "load_libraries", load)
    with pytest.raises(InvalidExperiment, match="unknown key"):
        simulate(
            Experiment().changed(
                {"engine.kind": "cohort", "engine.device": "cpu", "strategy.nonsense": 1}
            ),
            out=tmp_path,
        )
    assert loaded == [torch.device("cpu")]


def test_testing_leaves_the_numbers_of_samples_alone() -> None:
    job = Setup(Experiment.parse(TINY)).job()
    executor = CohortExecutor("cpu")
    executor.prepare(job.trainer, KernelPlan())
    parts = [np.arange(20), np.arange(20, 40)]
    for _ in range(2):
        executor.test(job.initial, parts, "running")
        assert [part.tolist() for part in parts] == [[*range(20)], [*range(20, 40)]]
