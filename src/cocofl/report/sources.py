"""What a run was made from, looked up again: who holds what data, and what configurations cost.

A run folder names its data and its tables; it does not hold them. Where they cannot be had any
more (the data is on another machine, a strategy was never saved), the report says so instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cocofl import data
from cocofl.config import Experiment
from cocofl.data.data_files import is_path
from cocofl.data.partition import COUNTED
from cocofl.errors import DataNotFound, InvalidSetting, OtherHardware
from cocofl.experiment import Setup
from cocofl.fl.strategies import NEEDS_NOTHING
from cocofl.freeze import VARIANTS
from cocofl.named import refuse_untrusted
from cocofl.profiling import ProfileTable
from cocofl.report.runs import Scene


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds what: samples per device and class, and the group of each device."""

    counts: NDArray[np.int64]
    group_of: NDArray[np.int64]
    class_names: tuple[str, ...]
    group_names: tuple[str, ...]
    seed: int

    @classmethod
    def of(
        cls,
        split: data.Samples,
        partition: data.Partition,
        group_of: Sequence[int] | NDArray[np.int64],
        group_names: Iterable[str],
        seed: int,
    ) -> Holdings:
        """Count what a partition gives to each device."""
        facts = split.facts
        if facts.labels not in COUNTED:
            raise InvalidSetting(f"the labels are {facts.labels}: only classes can be shown")
        counts = data.partition.class_counts(partition, split.labels, facts.num_classes)
        names = tuple(facts.class_names), tuple(group_names)
        return cls(counts, np.asarray(group_of), *names, seed)

    def shown(self, at_most: int) -> NDArray[np.int64]:
        """The devices by group; evenly spaced ones where there are too many to be told apart."""
        order = np.argsort(self.group_of, kind="stable")
        if len(order) <= at_most:
            return order
        return order[np.linspace(0, len(order) - 1, at_most).astype(np.int64)]


def printable(class_name: str) -> str:
    """Characters are classes too, and some (newline, space) do not print."""
    return class_name if class_name.strip() and class_name.isprintable() else repr(class_name)


class Sources:
    """The data and the tables of a scene."""

    def __init__(self, scene: Scene) -> None:
        self._lines = scene.lines
        # No strategy is played here and nothing tested, and the run's own may have been the user's.
        neutral = scene.lines[0].runs[0].experiment.with_strategy(NEEDS_NOTHING)
        self._experiment: Experiment = neutral.changed({"evaluation.metrics": ["loss"]})

    @property
    def are_on_devices(self) -> bool:
        """Whether only the devices of a deployment have the data."""
        return any(run.is_deployed for line in self._lines for run in line.runs)

    def holdings(self) -> Holdings:
        """Who held what in the scene's first run."""
        setup, devices = self._setup, self._setup.devices
        names = (group.name for group in devices.groups)
        seed = self._experiment.seed
        return Holdings.of(setup.data.train, setup.partition, devices.group_of, names, seed)

    def tables(self) -> list[ProfileTable]:
        """The tables that served its strategies: of spans, one per variant, and of widths.

        Counting one takes seconds, so nobody waits for one that served none.
        """
        abouts = [line.runs[0].folder.about for line in self._lines]
        served = {kind for about in abouts for kind in about.get("tables", {})}
        found = [self._setup.tables.spans(one) for one in VARIANTS if one in served]
        return [*found, self._setup.tables.widths()] if "width" in served else found

    @cached_property
    def _setup(self) -> Setup:
        settings = self._experiment.data
        refuse_untrusted(*self._experiment.names())
        # A report is no reason to download a data set.
        if not (is_path(settings.name) or ":" in settings.name):
            listed = data.listing(settings.name, data_dir=settings.dir or None)
            if listed.state not in ("ready", "here"):
                raise DataNotFound(f"the data set {settings.name} is not on this machine")
        with warnings.catch_warnings():
            # Said in the table's own description, which the report shows.
            warnings.simplefilter("ignore", OtherHardware)
            return Setup(self._experiment)
