"""Which engine executes an experiment here, and with which kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cocofl.config import Experiment
from cocofl.data.origin import cache_dir
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import Executor
from cocofl.engine.workers import Workers
from cocofl.errors import InvalidExperiment
from cocofl.files import locked
from cocofl.freeze import KernelPlan
from cocofl.profiling.hardware import Hardware


def make_executor(experiment: Experiment, place: str = "") -> Executor:
    """The executor that the experiment asks for, a cohort's at ``place`` where that is said."""
    settings, kind = experiment.engine, engine_kind(experiment)
    if kind == "cohort":
        on = place or _cohort_device(experiment)
        return CohortExecutor(on, precision=settings.precision)
    if kind == "serial":
        return Workers(settings.workers or None)
    assert kind == "flower"
    raise InvalidExperiment(
        "engine.kind flower runs inside Flower: use `cocofl run --engine flower`, or "
        "cocofl.flower.simulation.simulate(experiment)"
    )


@contextmanager
def executor_for(experiment: Experiment, given: Executor | None = None) -> Iterator[Executor]:
    """The executor that is given, which stays open; else the one that the experiment asks for."""
    own = given or make_executor(experiment)
    try:
        yield own
    finally:
        if given is None:
            own.close()


def engine_kind(experiment: Experiment) -> str:
    """The engine that the experiment runs on here."""
    kind = experiment.engine.kind
    if kind != "auto":
        return kind
    can = torch.cuda.is_available() and experiment.training.stacked_optimizer() is not None
    return "cohort" if can else "serial"


def places_of(experiment: Experiment) -> list[str]:
    """Where groups of runs can be played beside each other: on every GPU, unless one is named.

    Processes that train devices one by one have all cores already: then there is one place.
    """
    device = _cohort_device(experiment) if engine_kind(experiment) == "cohort" else "cpu"
    if device != "cuda":
        return [device]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _cohort_device(experiment: Experiment) -> str:
    device = experiment.engine.device
    return device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def machine(experiment: Experiment) -> str:
    """The processor, and the GPU where a cohort is computed on one."""
    on_gpu = engine_kind(experiment) == "cohort" and _cohort_device(experiment) != "cpu"
    return f"{torch.cuda.get_device_name()}; {Hardware.here()}" if on_gpu else str(Hardware.here())


def _plan_path() -> Path:
    name = hashlib.sha256(str(Hardware.here()).encode()).hexdigest()[:12]
    return cache_dir() / "kernels" / f"{name}.json"


def machine_plan(*, regions: bool = False) -> KernelPlan:
    """The kernels that earlier runs on this machine chose: two runs must choose the same."""
    path = _plan_path()
    if not path.exists():
        return KernelPlan(regions=regions)
    return KernelPlan.load(path, fixed=False, regions=regions)


def remember_plan(plan: KernelPlan) -> None:
    """Keep a run's choice of kernels for later runs on this machine."""
    path, chosen = _plan_path(), plan.choices
    if chosen.keys() <= machine_plan().choices.keys():
        return
    with locked(path.parent, wait=True):  # others may add theirs at the same time
        KernelPlan({**chosen, **machine_plan().choices}).save(path)
