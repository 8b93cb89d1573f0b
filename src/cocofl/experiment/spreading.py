"""Groups of runs on several GPUs at once: one process for each GPU, and a queue of groups.

A run's folder is what it is if the group is played in this process. What a process tells of its
runs reaches the same watchers here.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch

from cocofl.engine.channels import Channel, Channels, WorkerFailed
from cocofl.engine.rounds import Watcher
from cocofl.errors import CocoflError
from cocofl.experiment.groups import Announce, Group, Watch, in_short
from cocofl.experiment.setup import rounds_of
from cocofl.runlog import RoundRecord


class Begun(NamedTuple):
    """A run begins, or goes on."""

    path: Path


class Round(NamedTuple):
    """A round has been written down."""

    path: Path
    record: RoundRecord


class Ended(NamedTuple):
    """A run is complete."""

    path: Path


class Warned(NamedTuple):
    """Something that the user should know."""

    message: str
    category: type[Warning]


News = Begun | Round | Ended | Warned
"""What a process tells while it plays a group."""


@dataclass(eq=False)
class _Place:
    """A GPU, the process that computes there, and the group that it plays."""

    name: str
    channel: Channel
    group: Group = field(default_factory=dict)
    watchers: dict[Path, Sequence[Watcher]] = field(default_factory=dict)
    works: bool = True
    """Whether nothing broke there so far."""


def play_on_each(
    groups: Sequence[Group],
    places: Sequence[str],
    *,
    resume: bool,
    watchers: Sequence[Watcher] = (),
    watch: Watch,
    announce: Announce,
) -> None:
    """Play all groups; each place takes the next one when it is done with its last.

    ``watchers`` are told of one run at a time, the one that was announced last. It is announced
    again where it is all that goes on. What goes wrong with a group is raised when all others have
    been played. A place where something broke, be it the process or the GPU, is not used again.
    """
    _Spread(groups, resume, watchers, watch, announce).play(places)


def memory_share(place: str) -> float:
    """Of the memory of a GPU, what this process was told to take at most: others are told, too."""
    is_limited = place.startswith("cuda") and torch.cuda.is_initialized()  # a limit does that
    return torch.cuda.get_per_process_memory_fraction(place) if is_limited else 1.0


class _Spread:
    def __init__(
        self,
        groups: Sequence[Group],
        resume: bool,
        watchers: Sequence[Watcher],
        watch: Watch,
        announce: Announce,
    ) -> None:
        self._waiting, self._resume = deque(groups), resume
        self._watchers, self._watch, self._announce = watchers, watch, announce
        self._shown: Group = {}
        self._failures: list[tuple[str, CocoflError | WorkerFailed]] = []

    def play(self, names: Sequence[str]) -> None:
        channels = Channels("cocofl.experiment.player", min(len(names), len(self._waiting)))
        try:
            places = [_Place(n, channel) for n, channel in zip(names, channels, strict=False)]
            for place in places:
                mine = memory_share(place.name), torch.get_num_threads(), sys.path, sys.argv
                place.channel.ask("begin", place.name, *mine)
            for place in places:
                place.channel.answer()
                self._give(place)
            while busy := {place.channel.replies: place for place in places if place.group}:
                for ready in wait(list(busy)):
                    self._hear(busy[ready])  # type: ignore[index]
                    self._show_one(places)
        finally:
            channels.close()
        self._complain()

    def _give(self, place: _Place) -> None:
        """The next group, to a place that has none."""
        place.group, place.watchers = {}, {}
        if not (self._waiting and place.works):
            return
        place.group = self._waiting.popleft()
        self._show(place.group)
        content = {path: one.to_dict() for path, one in place.group.items()}
        try:
            place.channel.ask("play", content, self._resume)
        except WorkerFailed as error:
            self._fail(place, error)

    def _hear(self, place: _Place) -> None:
        """What a process says next: of its group, or that it is done with that."""
        try:
            message = place.channel.message()
        except (CocoflError, WorkerFailed) as error:
            self._fail(place, error)
            return
        if message.is_news:
            self._pass_on(message.content, place)
        else:
            self._give(place)

    def _fail(self, place: _Place, error: CocoflError | WorkerFailed) -> None:
        """Go on with the next group, there only if the user's mistake was all that was wrong."""
        runs = in_short([str(path) for path in place.group])
        self._failures.append((f"{runs}, on {place.name}: {error}", error))
        place.works = isinstance(error, CocoflError)
        self._give(place)

    def _pass_on(self, news: News, place: _Place) -> None:
        if isinstance(news, Warned):
            warnings.warn(news.message, news.category, stacklevel=2)
            return
        if isinstance(news, Begun):
            place.watchers[news.path] = self._watch(news.path, place.group[news.path])
            return
        is_shown = place.group is self._shown and news.path == next(iter(place.watchers))
        shown = self._watchers if is_shown else ()
        for watcher in (*shown, *place.watchers[news.path]):
            if isinstance(news, Round):
                watcher.on_round(news.record)
            else:
                watcher.on_end()

    def _show(self, group: Group) -> None:
        self._shown = group
        self._announce(list(group), rounds_of(next(iter(group.values()))))

    def _show_one(self, places: Sequence[_Place]) -> None:
        """Another group that goes on, where the one that was shown is over."""
        groups = [place.group for place in places if place.group]
        if groups and not any(group is self._shown for group in groups):
            self._show(groups[0])

    def _complain(self) -> None:
        """Raise what went wrong, if anything did."""
        if not self._failures:
            return
        said, first = [text for text, _ in self._failures], self._failures[0][1]
        if self._waiting:
            said.append(f"no GPU was left for {len(self._waiting)} more; --resume goes on")
        is_mistake = all(isinstance(error, CocoflError) for _, error in self._failures)
        kind = type(first) if is_mistake else WorkerFailed
        raise kind("; ".join(said)) from first
