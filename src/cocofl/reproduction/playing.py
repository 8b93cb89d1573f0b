"""Running what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cocofl.engine.rounds import Watcher
from cocofl.errors import DataNotFound
from cocofl.experiment import in_short, load_data, simulate_batch
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
    experiments = {out / str(one.name): one.experiment for one in todo}

    def say(paths: Sequence[Path], rounds: int) -> None:
        announce(in_short([path.name for path in paths]), rounds)

    simulate_batch(experiments, resume=True, watchers=watchers, announce=say)
    return problems


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
