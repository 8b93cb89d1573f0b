"""Running experiments, and what came out of them.

On a GPU those that share a network are one computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cocofl.config import Experiment
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher, evaluate, refuse_if_nobody_can_train, run
from cocofl.errors import InvalidExperiment
from cocofl.experiment.engines import (
    engine_kind,
    executor_for,
    machine_plan,
    places_of,
    remember_plan,
)
from cocofl.experiment.groups import DEVICES_AT_ONCE, Announce, Group, Watch, batch_groups
from cocofl.experiment.setup import Setup, load_data, rounds_of
from cocofl.experiment.spreading import play_on_each
from cocofl.fl.metrics import MetricFacts, recorded_metric
from cocofl.fl.strategies import NEEDS_NOTHING
from cocofl.fl.strategies.learning import OPTIONS as LEARNING
from cocofl.freeze import KernelPlan, State
from cocofl.named import refuse_untrusted
from cocofl.runlog import PLAN, RoundRecord, RunFolder, Scores, metric_names, only_writer


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; no deviation for a single one."""

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value per seed."""
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), std)

    def text(self, metric: MetricFacts) -> str:
        """For a table, below the metric's heading.

        >>> Spread.of([0.5, 0.7]).text(MetricFacts("f1", is_share=True))
        '60.0 ± 14.1'
        """
        spread = "" if self.std is None else f" ± {metric.number(self.std)}"
        return f"{metric.number(self.mean)}{spread}"


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
    def rounds(self) -> list[RoundRecord]:
        """One record per round, as in ``metrics.jsonl``."""
        return self.folder.rounds()

    @cached_property
    def fates(self) -> Counter[str]:
        """How many updates were merged, late, lost, rejected, infeasible."""
        return Counter(one.fate for record in self.rounds for one in record.devices)

    @property
    def is_deployed(self) -> bool:
        """Whether its devices are on a network, and not simulated."""
        return any(record.reasons is not None for record in self.rounds)

    @cached_property
    def evaluated(self) -> list[RoundRecord]:
        """The records of rounds after which the model was tested."""
        return [record for record in self.rounds if record.scores]

    @property
    def final(self) -> RoundRecord:
        """The last round after which the model was tested."""
        found = self.evaluated
        if not found:
            raise InvalidExperiment(f"{self.path} has not been evaluated yet")
        return found[-1]

    @property
    def final_by_statistics(self) -> dict[str, Scores]:
        """The last evaluation with each kind of norm statistics that the end was tested with."""
        return {self.experiment.evaluation.statistics: self.final.scores, **self.final.other_scores}

    @property
    def averaged(self) -> Scores:
        """The last evaluation of the mean over rounds; empty where none is kept."""
        return self.final.averaged_scores.get(self.experiment.evaluation.statistics, {})

    @cached_property
    def metrics(self) -> list[MetricFacts]:
        """What its model was tested for, by what is compared first; nothing is imported."""
        return self.facts_of(self.final.scores)

    def facts_of(self, scores: Scores) -> list[MetricFacts]:
        """The metrics among scores of this run's model, as its folder describes them."""
        known = self.folder.about.get("metrics")
        kept = known if isinstance(known, dict) else {}
        return [recorded_metric(name, kept.get(name)) for name in metric_names(scores)]

    @property
    def state(self) -> State:
        """The final weights, by the model's own keys, with scales beside them."""
        return self.folder.model()

    @property
    def averaged_state(self) -> State:
        """The mean of the weights over rounds, where ``evaluation.average`` keeps one."""
        return self.folder.average()


def simulate(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    watchers: Sequence[Watcher] = (),
    watch: Watch = lambda _path, _experiment: (),
) -> Run:
    """Run an experiment (by default the quick start) into a folder.

    ``out`` is ``runs/<name>`` by default. With ``resume`` a run that was interrupted goes on, and
    its experiment must be the same. An ``executor`` that is given stays open. ``watch`` makes more
    watchers, once it is sure that there is something to run.
    """
    experiment = experiment or Experiment()
    path = Path(out) if out is not None else experiment.folder
    play_group({path: experiment}, executor, watchers, watch, resume=resume)
    return Run.open(path)


def simulate_batch(
    experiments: Group,
    *,
    resume: bool = False,
    executor: Executor | None = None,
    places: Sequence[str] | None = None,
    watchers: Sequence[Watcher] = (),
    watch: Watch = lambda _path, _experiment: (),
    announce: Announce = lambda _paths, _rounds: None,
) -> list[Run]:
    """Run experiments, each into its folder; watchers are told of the first of those at once.

    Those that ``watch`` makes are told of one run each.

    A cohort plays seeds, strategies and splits at once that share model, data set and training.
    Elsewhere one run follows another. With several ``places``, by default the GPUs that there are,
    each plays a part of the runs in a process of its own, unless an ``executor`` is given.
    """
    first = next(iter(experiments.values()))
    if any(
        one.engine != first.engine or engine_kind(one) != engine_kind(first)
        for one in experiments.values()
    ):
        raise InvalidExperiment("experiments that run together must have the same engine")
    if executor is not None:
        places = ["here"]
    elif places is None:
        places = places_of(first)
    is_cohort = isinstance(executor, CohortExecutor) if executor else engine_kind(first) == "cohort"
    groups = batch_groups(experiments, DEVICES_AT_ONCE if is_cohort else 0, len(places))
    if len(places) > 1 and len(groups) > 1:
        refuse_untrusted(*(name for one in experiments.values() for name in one.names()))
        play_on_each(
            groups, places, resume=resume, watchers=watchers, watch=watch, announce=announce
        )
    else:
        with executor_for(first, executor) as own:
            for group in groups:
                announce(list(group), rounds_of(next(iter(group.values()))))
                play_group(group, own, watchers, watch, resume=resume)
    return [Run.open(path) for path in experiments]


def play_group(
    experiments: Group,
    executor: Executor | None,
    watchers: Sequence[Watcher],
    watch: Watch,
    *,
    resume: bool,
) -> None:
    """Run experiments at once; several are one computation of a cohort."""
    # Whatever is wrong with an experiment is found before a folder is made for it.
    first = next(iter(experiments.values()))
    refuse_untrusted(*(name for one in experiments.values() for name in one.names()))
    together = {"together": list(map(str, experiments))} if len(experiments) > 1 else {}
    with ExitStack() as until_the_end:
        if engine_kind(first) == "cohort":  # a GPU gets ready while all else is put together
            executor = until_the_end.enter_context(executor_for(first, executor))
        data = load_data(first)
        setups = [Setup(one, data) for one in experiments.values()]
        jobs = [setup.job() for setup in setups]
        for job in jobs:
            refuse_if_nobody_can_train(job)
        folders = [
            until_the_end.enter_context(open_folder(path, one, resume=resume))
            for path, one in experiments.items()
        ]
        every = zip(folders, setups, jobs, strict=True)
        if todo := [one for one in every if not one[0].is_complete]:
            own = until_the_end.enter_context(executor_for(first, executor))
            for folder, setup, _ in todo:
                folder.write_about(setup.about() | together)
            watched = [
                [*(watchers if i == 0 else ()), *watch(folder.path, setup.experiment)]
                for i, (folder, setup, _) in enumerate(todo)
            ]
            jobs_to_do = [
                (job, folder, of) for (folder, _, job), of in zip(todo, watched, strict=True)
            ]
            run(jobs_to_do, own, machine_plan())
            remember_plan(KernelPlan.load(todo[0][0].path / PLAN))


def evaluate_run(
    path: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    average: bool = False,
    executor: Executor | None = None,
) -> Scores:
    """Test a run's model, also on other data or with other statistics (``changes``).

    With ``average`` the mean of the model over rounds is tested instead.
    """
    found = Run.open(path)
    tensors = found.averaged_state if average else found.state
    # No strategy is played, nothing is merged, and the run's tables may lie on the machine that
    # made it. So may the GPU that it was made with.
    tables = dict.fromkeys(("tables.spans", "tables.checkpointed", "tables.widths"), "auto")
    places = {**tables, "engine.device": "auto"}
    neutral = {**places, "engine.kind": "auto", "merge": {}, "server": {}, **(changes or {})}
    if isinstance(width := found.folder.about.get("width"), float):
        neutral["model.options"] = {**found.experiment.model.options, "width": width}
    options = found.experiment.strategy.options
    same = {key: options[key] for key in LEARNING if key in options}
    experiment = found.experiment.with_strategy(NEEDS_NOTHING, **same).changed(neutral)
    refuse_untrusted(*experiment.names())  # also for the worker processes
    job = Setup(experiment).job()
    with executor_for(experiment, executor) as own:
        own.prepare(job.trainer, KernelPlan())
        return evaluate(job, own, job.trainer.server_state(tensors))


def model_with(run_: Run, *, average: bool = False) -> nn.Module:
    """The run's network with its final weights, or with their mean over rounds, ready to use."""
    setup = Setup(run_.experiment)
    model, _ = setup.subject.build()
    state = run_.averaged_state if average else run_.state
    model.load_state_dict(setup.trainer.merged(state), strict=False)
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
