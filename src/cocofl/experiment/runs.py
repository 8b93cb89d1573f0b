"""Running an experiment, and what came out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from cocofl.config import Experiment
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher, evaluate, run
from cocofl.errors import InvalidExperiment
from cocofl.experiment.engines import engine_kind, machine_plan, make_executor, remember_plan
from cocofl.experiment.setup import Setup
from cocofl.fl.metrics import MetricFacts, recorded_metric
from cocofl.fl.strategies import NEEDS_NOTHING
from cocofl.freeze import KernelPlan, State
from cocofl.named import names_in, refuse_untrusted
from cocofl.runlog import RoundRecord, RunFolder, Scores, metric_names, only_writer


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

    @property
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
            run([(job, folder)], own, machine_plan(), watchers)
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
) -> Scores:
    """Test a run's model, also on other data or with other statistics (``changes``)."""
    found = Run.open(path)
    # No strategy is played, and the run's tables may lie on the machine that made it.
    # So may the GPU that it was made with.
    places = {"tables.spans": "auto", "tables.widths": "auto", "engine.device": "auto"}
    neutral = {**places, "engine.kind": "auto", **(changes or {})}
    experiment = found.experiment.with_strategy(NEEDS_NOTHING).changed(neutral)
    refuse_untrusted(*names_in(experiment.by_key()))  # also for the worker processes
    job = Setup(experiment).job()
    own = executor or make_executor(experiment)
    try:
        own.prepare(job.workshop, KernelPlan())
        return evaluate(job, own, job.workshop.server_state(found.state))
    finally:
        if executor is None:
            own.close()


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
