"""Running what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher
from cocofl.errors import DataNotFound
from cocofl.experiment import load_data, make_executor, rounds_of, simulate_together
from cocofl.reproduction.plans import Planned
from cocofl.runlog import RunFolder


def missing(planned: Sequence[Planned], out: Path) -> list[Planned]:
    """Those that have not been run to their end."""
    return [one for one in planned if not RunFolder(out / str(one.name)).is_complete]


def play(
    planned: Sequence[Planned],
    out: Path,
    *,
    watchers: Sequence[Watcher] = (),
    announce: Callable[[str, int], None] = lambda _name, _rounds: None,
) -> list[str]:
    """Run what is missing, continue what was interrupted; why some could not be run.

    An interrupted run may have been begun on another machine.
    """
    todo, problems = _with_data(missing(planned, out))
    if not todo:
        return problems
    executor = make_executor(todo[0].experiment)
    try:
        for some in _at_once(todo, executor):
            names = [str(one.name) for one in some]
            announce(", ".join(names), rounds_of(some[0].experiment))
            several = {out / str(one.name): one.experiment for one in some}
            simulate_together(several, resume=True, executor=executor, watchers=watchers)
    finally:
        executor.close()
    return problems


def _at_once(planned: Sequence[Planned], executor: Executor) -> list[list[Planned]]:
    """A cohort plays the seeds of one experiment at once, other executors one after the other."""
    groups: dict[tuple[object, ...], list[Planned]] = {}
    for i, one in enumerate(planned):
        name = one.name
        together = isinstance(executor, CohortExecutor)
        groups.setdefault((name.row, name.label, name.rounds) if together else (i,), []).append(one)
    return list(groups.values())


def _with_data(planned: Sequence[Planned]) -> tuple[list[Planned], list[str]]:
    """Those whose data is here, and one line for each row of which it is not."""
    problems: dict[str, str] = {}
    looked_at: set[str] = set()
    for one in planned:
        row = one.name.row
        if row not in looked_at:
            looked_at.add(row)
            try:
                load_data(one.experiment)
            except DataNotFound as error:
                problems[row] = f"{row} was not run: {error}"
    return [one for one in planned if one.name.row not in problems], list(problems.values())
