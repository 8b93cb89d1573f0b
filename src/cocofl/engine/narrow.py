"""Devices with networks of unequal width in a cohort: HeteroFL and FjORD."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.fl.local import Task, Work, Workshop
from cocofl.fl.merge import State
from cocofl.fl.widths import (
    OrderedWork,
    WidthWork,
    classifier_keys,
    scaled_layers,
    statistics_key,
)
from cocofl.models import MODELS
from cocofl.models.widths import Place
from cocofl.vector import (
    WHOLE,
    Cohort,
    DeviceWork,
    Narrowing,
    RowLayout,
    Rows,
    factor_row,
    score_count,
)


@dataclass(frozen=True, eq=False)
class Narrowed:
    """What the merge needs to know of one device's update."""

    level: int
    samples: int
    parameters: Tensor
    statistics: Mapping[int, Tensor]
    """By level; of those at which it took steps."""
    classes: tuple[int, ...] | None = None
    """Of the classifier only their rows count; None for all."""

    def clone(self) -> Narrowed:
        """A copy, which stays when the cohort trains again."""
        statistics = {level: row.clone() for level, row in self.statistics.items()}
        return replace(self, parameters=self.parameters.clone(), statistics=statistics)


@dataclass(frozen=True)
class _Level:
    width: float
    scaled: bool


class WidthTrial:
    """Which works with narrower networks a cohort can do.

    Widths of networks that are not built in are tried out, each once.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._narrowing = Narrowing(workshop.chain())
        self._agrees = cache(self._agrees_at)

    def can(self, work: Work) -> bool:
        """Whether the stacked computation does what the work asks for.

        Masked losses of anything but scores, and networks in which a width changes what the
        cohort does not know of, are left to the serial code.
        """
        if isinstance(work, WidthWork):
            return (not work.masked or self._gives_scores) and self._agrees(work.width)
        if isinstance(work, OrderedWork):
            return all(map(self._agrees, work.widths))
        return False

    @cached_property
    def _gives_scores(self) -> bool:
        classes = self._workshop.materials.train.facts.num_classes
        return (score_count(self._workshop.chain()) or 0) >= classes

    def _agrees_at(self, width: float) -> bool:
        shop = self._workshop
        if width == 1.0 or shop.materials.subject.model in MODELS:
            return True  # of built-in networks the tests say so
        return self._narrowing.agrees(shop.chain(width), shop.places(width))


class NarrowNetworks:
    """The narrower networks of a cohort: as levels of it, and as parts of the server's state."""

    def __init__(self, workshop: Workshop, cohort: Cohort) -> None:
        self._workshop, self._cohort = workshop, cohort
        self._numbers: dict[_Level, int] = {}
        self._left: dict[int, tuple[Mapping[str, Tensor], dict[float, Tensor]]] = {}
        # Not methods, so that nothing here refers to itself, and a cohort's memory is free at once.
        self._parameter_bytes = cache(partial(_parameter_bytes, workshop))
        tracked = cohort.program.layout.statistics.by_key.keys()
        self._statistic_bytes = cache(partial(_statistic_bytes, workshop, tracked))
        self._fresh = cache(partial(_statistics_row, workshop, cohort))

    def level(self, width: float, *, scaled: bool = False) -> int:
        """The number of a width in the cohort."""
        wanted = _Level(width, scaled and width < 1.0)
        if wanted not in self._numbers:
            factors = {}
            if wanted.scaled:
                model, _ = self._workshop.materials.subject.build(width)
                names = scaled_layers(model, self._workshop.model())
                tensors = ("weight", "bias")
                factors = {f"{name}.{t}": 1.0 / width for name in names for t in tensors}
            program, shop = self._cohort.program, self._workshop
            row = factor_row(program.layout.parameters, shop.places(width), factors)
            channels = program.channels_in(shop.chain(width))
            self._numbers[wanted] = self._cohort.add_level(row, channels)
        return self._numbers[wanted]

    def work(self, task: Task) -> DeviceWork:
        """What a device does, in the cohort's terms."""
        work, everything = task.work, self._cohort.everything
        if isinstance(work, WidthWork):
            level = self.level(work.width, scaled=work.scaler)
            present = work.present(self._workshop, task)
            classes = None if present is None else tuple(present.tolist())
            return DeviceWork(everything, "f", task.lr, level=level, classes=classes)
        assert isinstance(work, OrderedWork)
        level = self.level(work.widths[-1])
        return DeviceWork(everything, "f", task.lr, level=level, distillation=work.distillation)

    def schedule(self, tasks: Sequence[Task], steps: int) -> NDArray[np.int64] | None:
        """At which level each step is taken; None where all steps are at what a device holds."""
        levels = np.full((steps, len(tasks)), WHOLE, np.int64)
        varies = False
        for d, task in enumerate(tasks):
            if isinstance(task.work, OrderedWork):
                drawn = task.work.draws(task)
                own = [self.level(width) for _, width in zip(range(steps), drawn, strict=False)]
                levels[:, d] = own
                varies = True
            elif isinstance(task.work, WidthWork):
                levels[:, d] = self.level(task.work.width, scaled=task.work.scaler)
                varies |= task.work.scaler
        return levels if varies else None

    def statistics_of(self, states: Sequence[Mapping[str, Tensor]], rows: Rows) -> Tensor:
        """The server's statistics, (state, level, place): its own, or fresh ones."""
        self._left = {id(state): (state, self._by_width(state)) for state in states}
        widths, found = [level.width for level in self._numbers], []
        for state, whole in zip(states, rows.statistics, strict=True):
            by_width = self._left[id(state)][1] | {1.0: whole}
            found.append(torch.stack([by_width[width] for width in widths]))
        return torch.stack(found)

    def _by_width(self, state: Mapping[str, Tensor]) -> dict[float, Tensor]:
        """Rows of narrower statistics; usually they are where the last merge left them."""
        _, known = self._left.get(id(state), (state, {}))
        missing = {level.width for level in self._numbers} - known.keys() - {1.0}
        return known | {width: self._row_at(state, width) for width in missing}

    def _row_at(self, state: Mapping[str, Tensor], width: float) -> Tensor:
        keys = self._cohort.program.layout.statistics.by_key
        own = {key: state.get(statistics_key(key, width)) for key in keys}
        there = {key: t for key, t in own.items() if t is not None}
        if not there:
            return self._fresh(width)
        return _statistics_row(self._workshop, self._cohort, width, there)

    def narrowed(
        self,
        task: Task,
        work: DeviceWork,
        device: int,
        schedule: NDArray[np.int64] | None,
        valid: NDArray[np.int64],
    ) -> Narrowed:
        """A device's update; its tensors stay valid until the cohort trains again."""
        levels, statistics = self._cohort.levels, {}
        level, parameters = work.level, self._cohort.parameters[device]
        assert level is not None
        if isinstance(task.work, OrderedWork) and schedule is not None and levels is not None:
            ran = set(schedule[valid > 0, device].tolist())
            if task.work.distillation and ran:
                ran.add(level)  # as a teacher
            statistics = {one: levels.statistics[device, one] for one in sorted(ran)}
        return Narrowed(level, len(task.indices), parameters, statistics, work.classes)

    def width(self, level: int) -> float:
        """How wide a level is."""
        return list(self._numbers)[level].width

    def sent_bytes(self, own: Narrowed) -> int:
        """The size of what a device sends."""
        statistics = (self._statistic_bytes(self.width(level)) for level in own.statistics)
        return self._parameter_bytes(self.width(own.level)) + sum(statistics)

    def tensors(self, own: Narrowed) -> State:
        """What a device sends, by key."""
        kinds, width = self._cohort.program.layout, self.width(own.level)
        found = _at_places(kinds.parameters, own.parameters, self._workshop.places(width))
        for level, row in own.statistics.items():
            places = self._workshop.places(self.width(level))
            sent = _at_places(kinds.statistics, row, places)
            found |= {statistics_key(key, self.width(level)): t for key, t in sent.items()}
        return found

    def voting_rows(self, own: Narrowed) -> dict[str, NDArray[np.int64]]:
        """What :class:`cocofl.fl.merge.Contribution` calls rows."""
        if own.classes is None:
            return {}
        return dict.fromkeys(classifier_keys(self._workshop), np.array(own.classes))

    def _votes(self, own: Narrowed) -> Tensor:
        """By place of a row of parameters, how many samples a device speaks for."""
        assert self._cohort.levels is not None
        votes = self._cohort.levels.there([own.level])[0] * float(own.samples)
        slots = self._cohort.program.layout.parameters.by_key
        places = self._workshop.places(self.width(own.level))
        for key, rows in self.voting_rows(own).items():
            if key in slots:
                place, there = places[key], slots[key].of(votes[None])[0]
                held = there[place].clone()
                silent = np.setdiff1d(np.arange(len(held)), rows)
                held[torch.from_numpy(silent)] = 0.0
                there[place] = held
        return votes

    def merge(
        self, state: Mapping[str, Tensor], old: Rows, sent: Iterable[Narrowed]
    ) -> tuple[State, Rows]:
        """What :func:`cocofl.fl.merge.merge_nested` gives, from rows; and the new rows."""
        cohort = self._cohort
        sums = torch.zeros_like(old.parameters[0], dtype=torch.float64)
        weights = torch.zeros_like(sums)
        tracked: dict[int, tuple[Tensor, int]] = {}
        for one in sent:
            votes = self._votes(one)
            sums += one.parameters.double() * votes
            weights += votes
            for level, statistics in one.statistics.items():
                total, seen = tracked.get(level, (0.0, 0))
                tracked[level] = total + statistics.double() * one.samples, seen + one.samples
        mean = sums / weights.clamp_min(1e-300)
        mean = torch.where(weights > 0, mean, old.parameters[0].double()).to(old.parameters.dtype)
        averaged = {
            self.width(level): (total / n).to(old.statistics.dtype)
            for level, (total, n) in tracked.items()
        }
        statistics = averaged[1.0][None] if 1.0 in averaged else old.statistics
        rows = Rows(mean[None], statistics, old.scales)
        merged = dict(state) | cohort.state_of(rows.on_the_host())
        for width, row in averaged.items():
            kind, places = cohort.program.layout.statistics, self._workshop.places(width)
            narrower = _at_places(kind, row.cpu(), places)
            merged |= {statistics_key(key, width): t for key, t in narrower.items()}
        if known := self._left.get(id(state), (state, {}))[1] | averaged:
            self._left[id(merged)] = merged, known
        return merged, rows


def _statistics_row(
    workshop: Workshop, cohort: Cohort, width: float, own: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Statistics of a narrower network at their places in the full one; fresh ones by default."""
    slots, found = cohort.program.layout.statistics, {}
    there, places = workshop.model(width).state_dict() | dict(own or {}), workshop.places(width)
    for key, slot in slots.by_key.items():
        found[key] = torch.zeros(slot.shape)
        found[key][places[key]] = there[key].float()
    return slots.pack(found, torch.zeros(0)).to(cohort.statistics)


def _parameter_bytes(workshop: Workshop, width: float) -> int:
    named = workshop.model(width).named_parameters(remove_duplicate=False)
    return sum(parameter.nbytes for _, parameter in named)


def _statistic_bytes(workshop: Workshop, tracked: Container[str], width: float) -> int:
    buffers = workshop.model(width).state_dict().items()
    return sum(t.nbytes for key, t in buffers if key in tracked)


def _at_places(slots: RowLayout, row: Tensor, places: Mapping[str, Place]) -> State:
    return {
        key: slot.of(row[None])[0][places[key]].clone().cpu() for key, slot in slots.by_key.items()
    }
