"""A process that plays groups of runs on one GPU, while others play on theirs.

:mod:`cocofl.experiment.spreading` starts it as ``python -m cocofl.experiment.player`` and tells it
what to play; it sends back what watchers would be told here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cocofl.config import Experiment
from cocofl.engine.executor import Executor
from cocofl.engine.rounds import Watcher
from cocofl.engine.worker import serve_parent
from cocofl.experiment.engines import make_executor
from cocofl.experiment.runs import play_group
from cocofl.experiment.spreading import Begun, Ended, News, Round, Warned
from cocofl.runlog import RoundRecord

Tell = Callable[[News], None]


class _Teller(Watcher):
    """Passes on what a run's watchers are told."""

    def __init__(self, tell: Tell, path: Path) -> None:
        self._tell, self._path = tell, path

    def on_round(self, record: RoundRecord) -> None:
        """A round has been written down."""
        self._tell(Round(self._path, record))

    def on_end(self) -> None:
        """The run is complete."""
        self._tell(Ended(self._path))


class Player:
    """Plays one group after the other, on one GPU."""

    _executor: Executor | None = None

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def begin(
        self, place: str, share: float, threads: int, path: Sequence[str], command: Sequence[str]
    ) -> None:
        """Know where to compute and with how much of its memory.

        And where the user's modules are, and what the user has typed.
        """
        self._place = place
        if share < 1:
            torch.cuda.set_per_process_memory_fraction(share, place)
        torch.set_num_threads(threads)
        sys.path[:], sys.argv[:] = path, command
        warnings.showwarning = self._pass_on

    def play(self, experiments: Mapping[Path, Mapping[str, Any]], resume: bool) -> None:
        """Play runs as one computation, each into its folder."""
        group = {path: Experiment.parse(content) for path, content in experiments.items()}
        if self._executor is None:
            self._executor = make_executor(next(iter(group.values())), self._place)
        play_group(group, self._executor, (), self._watch, resume=resume)

    def _watch(self, path: Path, _experiment: Experiment) -> list[Watcher]:
        self._tell(Begun(path))
        return [_Teller(self._tell, path)]

    def _pass_on(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        self._tell(Warned(str(message), category))


if __name__ == "__main__":
    serve_parent(Player)
