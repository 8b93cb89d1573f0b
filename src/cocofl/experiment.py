"""Puts one experiment together: from names and numbers to a job, and from a job to a run."""

from __future__ import annotations

import hashlib
import inspect
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cocofl import data
from cocofl.chain import BlockChain
from cocofl.config import Experiment
from cocofl.data import DataSet, Partition, Rule
from cocofl.data.origin import cache_dir
from cocofl.engine.cohort import CohortExecutor, has_optimizer
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Evaluation, Job, Schedule, Watcher, evaluate, run
from cocofl.engine.workers import Workers
from cocofl.errors import InvalidExperiment, TableMismatch
from cocofl.fl.devices import (
    PAPER_GROUPS,
    Devices,
    Group,
    groups_from,
    limited_groups,
    make_devices,
)
from cocofl.fl.evaluation import class_densities
from cocofl.fl.faults import Faults
from cocofl.fl.federation import Federation
from cocofl.fl.local import STATISTICS, Materials, Workshop
from cocofl.fl.recipe import Recipe
from cocofl.fl.strategies import STRATEGIES, Strategy
from cocofl.freeze import KernelPlan, State, chain_state, check_state
from cocofl.named import lookup, names_in, nearest, refuse_untrusted
from cocofl.profiling import ProfileTable, shipped
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.subject import Subject
from cocofl.profiling.workspace import Settings
from cocofl.runlog import RunFolder, only_writer, read_state
from cocofl.source import source_commit

CENTRAL_SPEEDUP = 10
"""Centralized training takes this many times fewer rounds, each an epoch over all data."""


@dataclass(frozen=True)
class Run:
    """A run in its folder: what it was, and what came out."""

    folder: RunFolder

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """A run that was made before, complete or not."""
        return cls(RunFolder.open(Path(path)))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @cached_property
    def experiment(self) -> Experiment:
        """What was run."""
        return Experiment.load(self.path / "experiment.toml")

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """One record per round, as in ``metrics.jsonl``."""
        return self.folder.metrics()

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The records of rounds after which the model was tested."""
        return [record for record in self.rounds if "accuracy" in record]

    @property
    def final(self) -> dict[str, Any]:
        """The last record with an accuracy."""
        found = self.evaluated
        if not found:
            raise InvalidExperiment(f"{self.path} has not been evaluated yet")
        return found[-1]

    @property
    def final_by_statistics(self) -> dict[str, dict[str, Any]]:
        """The last evaluation with each kind of norm statistics that the end was tested with."""
        final, own = self.final, self.experiment.evaluation.statistics
        others = {kind: final.get(f"{kind}_statistics") for kind in STATISTICS if kind != own}
        return {own: final} | {kind: found for kind, found in others.items() if found}

    @property
    def state(self) -> State:
        """The final weights, by the model's own keys, with scales beside them."""
        return self.folder.model()


def simulate(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    watchers: Sequence[Watcher] = (),
) -> Run:
    """Run an experiment (by default the quick start) into a folder.

    ``out`` is ``runs/<name>`` by default. With ``resume`` a run that was interrupted goes on, and
    its experiment must be the same. An ``executor`` that is given stays open.
    """
    experiment = experiment or Experiment()
    path = Path(out) if out is not None else experiment.folder
    # Whatever is wrong with the experiment is found before a folder is made for it.
    setup = Setup(experiment)
    job = setup.job()
    if executor is None and engine_kind(experiment) == "cohort":
        make_executor(experiment)  # also a GPU that is not there
    with open_folder(path, experiment, resume=resume) as folder:
        if folder.is_complete:
            return Run(folder)
        own = executor or make_executor(experiment)
        try:
            folder.write_about(setup.about())
            run(job, own, folder, machine_plan(), watchers)
            remember_plan(KernelPlan.load(folder.path / "plan.json"))
        finally:
            if executor is None:
                own.close()
        return Run(folder)


def evaluate_run(
    path: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Test a run's model, also on other data or with other statistics (``changes``)."""
    found = Run.open(path)
    # No strategy is played, and the run's tables may lie on the machine that made it.
    # So may the GPU that it was made with.
    places = {"tables.spans": "auto", "tables.widths": "auto", "engine.device": "auto"}
    neutral = {**places, "engine.kind": "auto", **(changes or {})}
    experiment = found.experiment.with_strategy("fedavg-full").changed(neutral)
    refuse_untrusted(*names_in(experiment.by_key()))  # also for the worker processes
    job = Setup(experiment).job()
    own = executor or make_executor(experiment)
    try:
        own.prepare(job.materials, KernelPlan())
        return evaluate(job, own, found.state)
    finally:
        if executor is None:
            own.close()


def make_executor(experiment: Experiment) -> Executor:
    """The executor that the experiment asks for."""
    settings, kind = experiment.engine, engine_kind(experiment)
    if kind == "cohort":
        return CohortExecutor(_cohort_device(experiment), precision=settings.precision)
    if kind == "serial":
        return Workers(settings.workers or None)
    assert kind == "flower"
    raise InvalidExperiment(
        "engine.kind flower runs inside Flower: use `cocofl run --engine flower`, or "
        "cocofl.flower.simulation.simulate(experiment)"
    )


def engine_kind(experiment: Experiment) -> str:
    """The engine that the experiment runs on here."""
    kind = experiment.engine.kind
    if kind != "auto":
        return kind
    recipe = Recipe(optimizer=experiment.training.optimizer)
    return "cohort" if torch.cuda.is_available() and has_optimizer(recipe) else "serial"


def rounds_of(experiment: Experiment) -> int:
    """How many rounds its run has: with all data in one place fewer than it says."""
    central = experiment.strategy.name == "centralized"
    return max(1, experiment.rounds // (CENTRAL_SPEEDUP if central else 1))


def load_data(experiment: Experiment) -> DataSet:
    """The data set that the experiment names."""
    settings = experiment.data
    return data.load(settings.name, data_dir=settings.dir or None, preset=settings.preset)


class Setup:
    """An experiment with everything that its names stand for."""

    def __init__(self, experiment: Experiment, dataset: DataSet | None = None) -> None:
        self.experiment = experiment
        self.data: DataSet = dataset or load_data(experiment)
        self.subject = Subject(
            experiment.model.name,
            experiment.training.batch,
            self.data.facts.num_classes,
            tuple(experiment.model.options.items()),
        )
        self.materials = Materials(
            self.subject, self._recipe(), self.data.train, self.data.test, experiment.engine.kernels
        )
        self.chain: BlockChain = Workshop(self.materials).chain()
        self._check_shapes()
        self.tables = Tables(self)
        self.strategy = self._strategy()

    def job(self) -> Job:
        """All that the round loop needs."""
        experiment = self.experiment
        training, central = experiment.training, self.strategy.central
        slower = CENTRAL_SPEEDUP if central else 1
        federation = self._central() if central else self.federation
        table = self.tables.spans()
        step_s = (table.full_step_s or 1.0) * training.batch / (table.batch or training.batch)
        return Job(
            strategy=self.strategy,
            federation=federation,
            materials=self.materials,
            initial=self._initial_state(),
            rounds=max(1, experiment.rounds // slower),
            seed=experiment.seed,
            schedule=Schedule(
                training.lr,
                tuple(max(1, decay // slower) for decay in training.decay_rounds),
                training.decay_factor,
            ),
            faults=Faults() if central else Faults(**vars(experiment.faults)),
            evaluation=self._evaluation(max(1, experiment.evaluation.every // slower)),
            deadline_s=federation.mean_steps * step_s,
            checkpoint_every=experiment.engine.checkpoint_every,
        )

    @cached_property
    def devices(self) -> Devices:
        """The devices and their groups."""
        return make_devices(
            self.experiment.devices.count, self._groups(), seed=self.experiment.seed
        )

    @cached_property
    def partition(self) -> Partition:
        """Who holds which samples."""
        settings = self.experiment.data
        rule = Rule(settings.split, settings.alpha, settings.equal)
        count, seed = self.experiment.devices.count, self.experiment.seed
        return data.divide(self.data.train, count, seed, rule, self.devices.group_of)

    @cached_property
    def federation(self) -> Federation:
        """The devices with their data."""
        recipe, per_round = self.materials.recipe, self.experiment.devices.per_round
        return Federation(self.devices, self.partition, recipe, per_round, self.experiment.seed)

    def about(self) -> dict[str, Any]:
        """What a result must say about where it comes from."""
        return {
            "command": shlex.join(["cocofl", *sys.argv[1:]]),
            "cocofl": version("cocofl"),
            "commit": source_commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "hardware": _machine(self.experiment),
            "engine": engine_kind(self.experiment),
            "strategy": self.experiment.strategy.name,
            "tables": dict(self.tables.served),
            "model_blocks": len(self.chain),
            "samples_left_over": len(self.partition.remainder),
        }

    def _recipe(self) -> Recipe:
        training = self.experiment.training
        recipe = Recipe(
            epochs=training.epochs,
            batch=training.batch,
            last_batch=training.last_batch,
            optimizer=training.optimizer,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            clip=training.clip if np.isfinite(training.clip) else None,
            loss=training.loss,
        )
        recipe.check()
        return recipe

    def _check_shapes(self) -> None:
        example = self.chain.example
        inputs = self.data.train.inputs
        if example is None or self.data.facts.task != "image":
            return
        height, width, channels = inputs.shape[1:]
        if tuple(example[0].shape[1:]) != (channels, height, width):
            raise InvalidExperiment(
                f"the model {self.experiment.model.name} takes images of "
                f"{'×'.join(map(str, example[0].shape[1:]))} (channels, height, width), but "
                f"{self.experiment.data.name} has {channels}×{height}×{width}"
            )

    def _strategy(self) -> Strategy:
        settings = self.experiment.strategy
        make = lookup(settings.name, STRATEGIES, "strategy", InvalidExperiment)
        known = {
            name: parameter.default
            for name, parameter in inspect.signature(make).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        for key, value in settings.options.items():
            if key not in known:
                raise InvalidExperiment(
                    f"unknown key strategy.{key}{nearest(key, known)}; {settings.name} takes "
                    f"{', '.join(known) or 'no options'}"
                )
            _check_option(f"strategy.{key}", value, known[key])
        made: Strategy = make(self.tables, **settings.options)
        return made

    def _groups(self) -> Sequence[Group]:
        groups = self.experiment.devices.groups
        if groups == "paper":
            return PAPER_GROUPS
        if isinstance(groups, str) and groups.startswith("limited:"):
            try:
                return limited_groups(float(groups.removeprefix("limited:")))
            except ValueError as error:
                raise InvalidExperiment(f"devices.groups is {groups!r}: {error}") from error
        if isinstance(groups, list) and groups and all(isinstance(g, Mapping) for g in groups):
            return groups_from(groups)
        raise InvalidExperiment(
            f'devices.groups is {groups!r}; expected "paper", "limited:0.25", or a list of tables '
            "with name, share, time, memory, upload or trace"
        )

    def _central(self) -> Federation:
        """One device with all the data."""
        everything = np.arange(len(self.data.train))
        whole = Partition(everything, np.array([0, len(everything)]), everything[:0])
        devices = make_devices(1, [Group("all")], self.experiment.seed)
        return Federation(devices, whole, self.materials.recipe, 1, self.experiment.seed)

    def _evaluation(self, every: int) -> Evaluation:
        settings, classes = self.experiment.evaluation, self.data.facts.num_classes
        labels, group_of = self.data.train.labels, np.asarray(self.devices.group_of)
        each = np.arange(len(self.devices))
        return Evaluation(
            every=every,
            batch=settings.batch,
            statistics=settings.statistics,
            group_names=tuple(group.name for group in self.devices.groups),
            group_densities=class_densities(labels, group_of, self.partition, classes),
            device_densities=class_densities(labels, each, self.partition, classes),
        )

    def _initial_state(self) -> State:
        init = self.experiment.model.init
        if init:
            _, state = read_state(Path(init))
            check_state(self.chain, state, None)
            return {key: t for key, t in state.items() if not key.endswith("num_batches_tracked")}
        model, _ = self.subject.build(seed=self.experiment.seed)
        fresh = model.state_dict()
        return {key: fresh[key].clone() for key in chain_state(self.chain)}


class Tables:
    """The profile tables of an experiment, loaded when a strategy asks; it notes who served."""

    def __init__(self, setup: Setup) -> None:
        self._experiment, self._subject = setup.experiment, setup.subject
        self.n_blocks = len(setup.chain)
        self.is_text = setup.data.facts.task == "text"
        self.served: dict[str, str] = {}
        self._loaded: dict[str, ProfileTable] = {}

    def spans(self, variant: str | None = None) -> ProfileTable:
        """The costs of spans; without a variant any table that knows what full training costs."""
        table = self._get(self._experiment.tables.spans, variant or "qff")
        table.check_fits(self.n_blocks)
        if variant is not None and table.variant != variant:
            raise TableMismatch(
                f"{table.name} is for variant {table.variant}, but the strategy freezes with "
                f"{variant}; give tables.spans a table of that variant, or analytic"
            )
        return table

    def widths(self) -> ProfileTable:
        """The costs of widths."""
        table = self._get(self._experiment.tables.widths, "width")
        if table.method != "width":
            raise TableMismatch(
                f"{table.name} holds spans; tables.widths needs one made with "
                "`cocofl profile MODEL --method width`"
            )
        return table

    def _get(self, source: str, kind: str) -> ProfileTable:
        if kind not in self._loaded:
            self._loaded[kind] = table = self._load(source, kind)
            self.served[kind] = table.describe()
        return self._loaded[kind]

    def _load(self, source: str, kind: str) -> ProfileTable:
        model = self._experiment.model
        if source == "auto":
            ready = [name for name in shipped() if name.endswith(f"-{model.name}/{kind}")]
            source = ready[0] if ready and not model.options else "analytic"
        if source != "analytic":
            named = source.startswith("measured:") and "/" not in source
            return ProfileTable.load(f"{source}/{kind}" if named else source)
        method, variant = ("width", "qff") if kind == "width" else ("span", kind)
        subject = self._subject
        settings = Settings(
            subject.model,
            method,
            variant,
            batch=subject.batch,
            num_classes=subject.num_classes,
            options=subject.options,
        )
        return _analytic(settings, f"analytic {model.name} {kind}")


@lru_cache(maxsize=16)
def _analytic(settings: Settings, name: str) -> ProfileTable:
    """Counted once for all runs of a comparison."""
    return replace(analytic_table(settings), name=name)


def model_with(run_: Run) -> nn.Module:
    """The run's network with its final weights, ready to use."""
    setup = Setup(run_.experiment)
    model, _ = setup.subject.build()
    wanted: dict[str, Tensor] = {
        key: t for key, t in run_.state.items() if key in model.state_dict()
    }
    model.load_state_dict(wanted, strict=False)
    return model.eval()


@contextmanager
def open_folder(path: Path, experiment: Experiment, *, resume: bool) -> Iterator[RunFolder]:
    """A new run folder, or with ``resume`` one that holds this very experiment.

    It may have been begun on another machine, with another engine and data elsewhere. No other
    process gets it meanwhile.
    """
    with only_writer(path):
        is_new = path.is_dir() and not any(path.iterdir())
        if resume and not is_new:
            yield _begun_before(path, experiment)
        else:
            yield RunFolder.create(path, experiment.to_toml())


def _begun_before(path: Path, experiment: Experiment) -> RunFolder:
    folder = RunFolder.open(path)
    begun = Experiment.load(path / "experiment.toml").without_places()
    wanted = experiment.without_places()
    if begun != wanted:
        theirs, ours = begun.by_key(), wanted.by_key()
        changed = [
            f"{key} is {ours.get(key)!r} (there: {theirs.get(key)!r})"
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        ]
        raise InvalidExperiment(
            f"{path} holds another experiment, which cannot be continued as this one: "
            f"{'; '.join(changed[:3])}. Name another folder with --out"
        )
    if folder.is_complete:
        folder.check_model()
    return folder


def _check_option(key: str, value: Any, default: Any) -> None:
    """A switch must be true or false, and a number a number; texts are the strategy's to check."""
    is_switch, is_number = isinstance(value, bool), isinstance(value, int | float)
    if isinstance(default, bool) and not is_switch:
        raise InvalidExperiment(f"{key} is {value!r}; expected true or false")
    if isinstance(default, float) and (is_switch or not is_number):
        raise InvalidExperiment(f"{key} is {value!r}; expected a number")


def _cohort_device(experiment: Experiment) -> str:
    device = experiment.engine.device
    return device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def _machine(experiment: Experiment) -> str:
    """The processor, and the GPU where a cohort is computed on one."""
    on_gpu = engine_kind(experiment) == "cohort" and _cohort_device(experiment) != "cpu"
    return f"{torch.cuda.get_device_name()}; {Hardware.here()}" if on_gpu else str(Hardware.here())


def _plan_path() -> Path:
    name = hashlib.sha256(str(Hardware.here()).encode()).hexdigest()[:12]
    return cache_dir() / "kernels" / f"{name}.json"


def machine_plan() -> KernelPlan:
    """The kernels that earlier runs on this machine chose: two runs must choose the same."""
    path = _plan_path()
    return KernelPlan.load(path, fixed=False) if path.exists() else KernelPlan()


def remember_plan(plan: KernelPlan) -> None:
    """Keep a run's choice of kernels for later runs on this machine."""
    path = _plan_path()
    chosen, known = plan.choices, machine_plan().choices
    if not chosen.keys() <= known.keys():
        path.parent.mkdir(parents=True, exist_ok=True)
        KernelPlan({**chosen, **known}).save(path)
