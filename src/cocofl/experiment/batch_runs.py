"""Many experiments; on a GPU those that share a network are one computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cocofl.config import Experiment
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher, run
from cocofl.errors import InvalidExperiment
from cocofl.experiment.engines import engine_kind, machine_plan, make_executor
from cocofl.experiment.runs import Run, open_folder, simulate
from cocofl.experiment.setup import Setup, load_data, rounds_of
from cocofl.fl.strategies import facts_of

DEVICES_AT_ONCE = 40
"""More gain little (docs/cohort.md), and the more runs share a GPU, the later the first ends."""

_COMMON = (
    *("model.", "training.", "engine.", "upload.", "evaluation.metrics"),
    *("data.name", "data.dir", "data.preset"),
)
# The learning rate is a device's own.
_OWN = ("training.lr", "training.decay_rounds", "training.decay_factor")

Announce = Callable[[Sequence[Path], int], None]
"""Is told which folders' runs begin, and how many rounds the first has."""


def simulate_batch(
    experiments: Mapping[Path, Experiment],
    *,
    resume: bool = False,
    executor: Executor | None = None,
    watchers: Sequence[Watcher] = (),
    announce: Announce = lambda _paths, _rounds: None,
) -> list[Run]:
    """Run experiments, each into its folder; watchers are told of the first of those at once.

    A cohort plays seeds, strategies and splits at once that share model, data set and training.
    Elsewhere one run follows another.
    """
    first = next(iter(experiments.values()))
    if any(
        one.engine != first.engine or engine_kind(one) != engine_kind(first)
        for one in experiments.values()
    ):
        raise InvalidExperiment("experiments that run together must have the same engine")
    own = executor or make_executor(first)
    found: dict[Path, Run] = {}
    try:
        at_once = DEVICES_AT_ONCE if isinstance(own, CohortExecutor) else 0
        for some in batch_groups(experiments, at_once):
            announce(list(some), rounds_of(next(iter(some.values()))))
            if len(some) > 1:
                assert isinstance(own, CohortExecutor)
                found |= _play_at_once(some, own, watchers, resume=resume)
            else:
                ((path, one),) = some.items()
                found[path] = simulate(
                    one, out=path, resume=resume, executor=own, watchers=watchers
                )
    finally:
        if executor is None:
            own.close()
    return [found[path] for path in experiments]


def in_short(names: Sequence[str]) -> str:
    """What to call runs that are played at once; what is shown of them is the first's.

    >>> in_short(["cocofl/seed0"]), in_short(["cocofl/seed0", "cocofl/seed1", "fjord/seed0"])
    ('cocofl/seed0', 'cocofl/seed0 and 2 more')
    """
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def batch_groups(
    experiments: Mapping[Path, Experiment], at_once: int = DEVICES_AT_ONCE
) -> list[dict[Path, Experiment]]:
    """Which of them a cohort plays together: never more devices than may be ``at_once``."""
    found: list[dict[Path, Experiment]] = []
    for path, one in experiments.items():
        for group in found:
            members = [*group.values(), one]
            devices = sum(member.devices.per_round for member in members)
            if devices <= at_once and _common_ground(members[0]) == _common_ground(one):
                group[path] = one
                break
        else:
            found.append({path: one})
    return found


def _common_ground(experiment: Experiment) -> dict[str, Any]:
    """What those have in common that are one computation."""
    values = experiment.by_key().items()
    common = {key: v for key, v in values if key.startswith(_COMMON) and key not in _OWN}
    # Who has all data has many times the mini-batches: everybody else would wait.
    return common | {"central": facts_of(experiment.strategy.name).all_data_in_one_place}


def _play_at_once(
    experiments: Mapping[Path, Experiment],
    executor: CohortExecutor,
    watchers: Sequence[Watcher],
    *,
    resume: bool,
) -> dict[Path, Run]:
    data = load_data(next(iter(experiments.values())))
    setups = [Setup(one, data) for one in experiments.values()]
    jobs = [setup.job() for setup in setups]
    with ExitStack() as until_the_end:
        folders = [
            until_the_end.enter_context(open_folder(path, one, resume=resume))
            for path, one in experiments.items()
        ]
        for folder, setup in zip(folders, setups, strict=True):
            if not folder.is_complete:
                folder.write_about(setup.about() | {"together": list(map(str, experiments))})
        run(list(zip(jobs, folders, strict=True)), executor, machine_plan(), watchers)
    return {folder.path: Run(folder) for folder in folders}
