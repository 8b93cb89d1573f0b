"""Works and states in the terms of a cohort, where many devices are one computation.

A work says how it looks there (:class:`StackedWork`), or why it cannot (:class:`NotStacked`).
A state's tensors lie there as a few long rows (:class:`StackedLayout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cocofl.fl.batches import Ints
from cocofl.fl.state import (
    Contribution,
    Group,
    Layout,
    Part,
    Piece,
    Tensors,
    kind_of,
    votes_of_rows,
)
from cocofl.fl.trainer import Task, Trainer, scaled_layers
from cocofl.models import MODELS
from cocofl.models.widths import places
from cocofl.span import Blocks, Span
from cocofl.vector import WHOLE, Cohort, DeviceWork, Program, Rows, Segments, factor_row, narrows

PARAMETERS, STATISTICS, SCALES = "parameters", "statistics", "scales"
_SCALE_BYTES = 4
# The keys of norm statistics that belong to a narrower network: widths.0.4.layer1.norm.running_var
_WIDTH_KEY = re.compile(r"widths\.(0\.\d+|\d+e-\d+)\.(.+)")


class Window(NamedTuple):
    """Channels of the full network: those of a width, from the channel ``roll`` on."""

    width: float
    roll: int


class NotStacked(Exception):
    """A work that a cohort cannot do; the message says why."""


@dataclass(frozen=True, eq=False)
class StackedWork:
    """What a device of a cohort does, and what of it is sent."""

    device: DeviceWork
    steps_at: Sequence[int] | None = None
    """The level of each step, the last one for all that follow; None for the level it holds."""
    sends_parameters: bool = True
    """Else norm statistics are measured, and nothing is trained."""
    sends_statistics: bool = False
    """Whether it sends statistics of every level that it was at."""
    window: Window | None = None
    """Where its level's channels lie, if they are not the leading ones."""

    def schedule(self, steps: int) -> list[int]:
        """The level of each of so many steps."""
        held = WHOLE if self.device.level is None else self.device.level
        known = list(self.steps_at if self.steps_at is not None else [held])
        return (known + known[-1:] * steps)[:steps]


def stacked(networks: StackedNetworks, task: Task) -> StackedWork:
    """A task's work in the terms of a cohort, as its method ``stacked`` says.

    A subclass does not inherit that: it may train otherwise than the class that it is made of.
    """
    kind = type(task.work)
    if "stacked" not in vars(kind):
        raise NotStacked(f"{kind.__name__} has no method `stacked` of its own")
    found: StackedWork = task.work.stacked(networks, task)  # type: ignore[attr-defined]
    margins = networks.trainer.margins(task)
    if margins is None:
        return found
    if not networks.gives_scores:
        raise NotStacked("calibrated losses need a network that returns scores of classes")
    return replace(found, device=found.device._replace(margins=tuple(margins.tolist())))


class StackedNetworks:
    """The network of a cohort and its narrower ones, which are levels of it."""

    def __init__(self, trainer: Trainer, program: Program) -> None:
        self.trainer, self.program = trainer, program
        self.everything = Span(0, program.n_blocks)
        self._numbers: dict[tuple[float, bool], int] = {}
        self._levels: list[tuple[Tensor, Mapping[str, int]]] = []
        self._agrees = cache(partial(_agrees, trainer))

    def check_widths(self, widths: Iterable[float]) -> None:
        """Raise :class:`NotStacked` where a width changes what a cohort does not know of."""
        for width in widths:
            if not self._agrees(width):
                raise NotStacked(f"at width {width:g} the network differs in more than its sizes")

    @property
    def gives_scores(self) -> bool:
        """Whether the network returns scores of classes and nothing else."""
        return (self.program.scores or 0) >= self.trainer.spec.train.facts.num_classes

    def level(self, width: float, *, scaled: bool = False) -> int:
        """The number of a width."""
        wanted = width, scaled and width < 1.0
        if wanted not in self._numbers:
            trainer, factors = self.trainer, {}
            if wanted[1]:
                names = scaled_layers(trainer.model(width), trainer.model())
                factors = {f"{name}.{t}": 1.0 / width for name in names for t in ("weight", "bias")}
            row = factor_row(self.program.layout.parameters, trainer.places(width), factors)
            self._levels.append((row, self.program.channels_in(trainer.chain(width))))
            self._numbers[wanted] = len(self._levels) - 1
        return self._numbers[wanted]

    @property
    def widths(self) -> list[float]:
        """Of the levels, in order."""
        return [width for width, _ in self._numbers]

    def enter(self, cohort: Cohort) -> None:
        """Make a cohort know all levels."""
        for row, channels in self._levels[cohort.n_levels :]:
            cohort.add_level(row, channels)

    def has(self, level: int) -> Tensor:
        """By place of a row of parameters, whether the network of a level has it."""
        return self._levels[level][0] != 0


def _agrees(trainer: Trainer, width: float) -> bool:
    """Whether a narrower network is the full one with smaller sizes, as far as a trial says."""
    if width == 1.0 or trainer.spec.subject.model in MODELS:
        return True  # of built-in networks the tests say so
    return narrows(trainer.chain(), trainer.chain(width), trainer.places(width))


def statistics_key(key: str, width: float) -> str:
    """Under which name the server has a norm statistic of a width."""
    return key if width == 1.0 else f"widths.{width:g}.{key}"


def classifier_keys(trainer: Trainer) -> list[str]:
    """The tensors of the last layer with one row per class."""
    classes = trainer.spec.train.facts.num_classes
    layers = [
        name
        for name, module in trainer.model().named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == classes
    ]
    return [f"{layers[-1]}.weight", f"{layers[-1]}.bias"] if layers else []


class StackedLayout(Layout):
    """A network's tensors as rows: parameters, statistics (of narrower networks, too), scales.

    Tensors that are none of these stay under their keys.
    """

    def __init__(self, networks: StackedNetworks, on: torch.device) -> None:
        self.networks, self._trainer = networks, networks.trainer
        self._sites, slots = networks.program.sites, networks.program.layout
        self._slots = {PARAMETERS: slots.parameters, STATISTICS: slots.statistics}
        self._like = torch.zeros(0, dtype=slots.dtype, device=on)
        own = self._trainer.chain().state_dict()
        self._constants = {key: own[key] for key in slots.constants}
        by_kind = (kind.by_key.items() for kind in self._slots.values())
        rows = {key: slot.block for slots_of in by_kind for key, slot in slots_of}
        self.block_of = dict(slots.constants) | rows
        self._fresh_statistics = cache(partial(self._statistics_row, tensors={}))
        self._places_of_level = cache(lambda level: networks.has(level).double().to(on))
        self._bytes, self._pieces = cache(self._bytes_of), cache(self._pieces_of)
        self._sizes = cache(self._sizes_of)
        self._row_blocks = cache(lambda kind: self._slots[kind].blocks().to(on))
        self._orders = lru_cache(maxsize=16)(self._orders_of)

    def is_learned(self, name: str) -> bool:
        """One row holds all parameters."""
        return name == PARAMETERS

    def pieces(self, name: str) -> Sequence[Piece]:
        """One for each tensor; of what has no row, one that is all of it."""
        return self._pieces(name)

    def _pieces_of(self, name: str) -> list[Piece]:
        kind, _, width = name.partition("@")
        if kind not in self._slots:
            kind_of_values = "scales" if name == SCALES else kind_of(name)
            group = Group(self.block_of.get(name, -1), learned=False)
            return [Piece(group, slice(None), kind_of_values)]
        found: dict[int, Piece] = {}
        for key, slot in self._slots[kind].by_key.items():
            # Statistics of a narrower network are in no block, as under their keys.
            group = Group(-1 if width else slot.block, kind == PARAMETERS)
            where = slice(slot.start, slot.stop)
            found.setdefault(slot.start, Piece(group, where, kind_of(key)))
        return list(found.values())

    # From keys to rows, and back

    def from_keys(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Rows of all that has a place in one."""
        parts, rest = Tensors(), dict(tensors)
        for kind, slots in self._slots.items():
            if own := {key: rest.pop(key) for key in slots.by_key if key in rest}:
                parts[kind] = slots.pack(own, self._like)
        if scales := {key: rest.pop(key) for key in self._sites.place if key in rest}:
            parts[SCALES] = self._scale_row(scales)
        by_width: dict[float, Tensors] = {}
        for key in list(rest):
            if match := _WIDTH_KEY.fullmatch(key):
                by_width.setdefault(float(match[1]), {})[match[2]] = rest.pop(key)
        for width, own in by_width.items():
            parts[statistics_part(width)] = self._statistics_row(width, own)
        return parts | rest

    def by_key(self, parts: Mapping[str, Tensor]) -> Tensors:
        """Views of the rows."""
        found = Tensors()
        for name, part in parts.items():
            kind, _, width = name.partition("@")
            if kind == SCALES:
                found |= self._known_scales(part)
            elif width:
                places = self._trainer.places(float(width))
                for key, tensor in _unpacked(self._slots[kind], part).items():
                    found[statistics_key(key, float(width))] = tensor[places[key]]
            elif kind in self._slots:
                found |= _unpacked(self._slots[kind], part)
            else:
                found[name] = part
        return found

    def _scale_row(self, scales: Mapping[str, Tensor]) -> Tensor:
        row = torch.full((len(self._sites.keys),), torch.nan)
        for key, scale in scales.items():
            row[self._sites.place[key]] = scale.item()
        return row.to(self._like.device)

    def _known_scales(self, row: Tensor) -> Tensors:
        row = row.cpu()
        known, parts = (~row.isnan()).tolist(), row.unbind()
        return {key: parts[place] for key, place in self._sites.place.items() if known[place]}

    def _statistics_row(self, width: float, tensors: Mapping[str, Tensor]) -> Tensor:
        """A narrower network's statistics at their places in the full one; fresh where unknown."""
        own = self._trainer.model(width).state_dict() | dict(tensors)
        return self._slots[STATISTICS].pack(own, self._like, self._trainer.places(width))

    # What a cohort needs of states

    def rows(self, parts: Mapping[str, Tensor], window: Window | None = None) -> Rows:
        """A state as a cohort takes it.

        With a window its channels come first, so that levels, which have the leading ones, hold it.
        """
        scales = parts[SCALES] if SCALES in parts else self._scale_row({})
        found = [parts[PARAMETERS], parts.get(STATISTICS, self._like)]
        if window is not None:
            orders = self._orders(window)
            found = [row[order] for row, order in zip(found, orders, strict=True)]
        return Rows(*(row[None] for row in (*found, scales)))

    def _orders_of(self, window: Window) -> list[Tensor]:
        """By place of a row of parameters and of statistics, which of the state's comes there."""
        full, narrow = self._trainer.model(), self._trainer.model(window.width)
        where = places(full, narrow, window.roll, whole=True)
        return [slots.order(where).to(self._like.device) for slots in self._slots.values()]

    def _put_back(self, parameters: Tensor, window: Window | None) -> Tensor:
        """A row of parameters, or of votes on them, with channels where the state has them."""
        if window is None:
            return parameters
        return torch.empty_like(parameters).index_copy_(0, self._orders(window)[0], parameters)

    def known_scales(self, parts: Mapping[str, Tensor]) -> frozenset[str]:
        """The scales that somebody has measured."""
        return frozenset(self._known_scales(parts[SCALES])) if SCALES in parts else frozenset()

    def statistics_by_level(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The statistics that devices begin with at each level."""
        rows = []
        for width in self.networks.widths:
            name = statistics_part(width)
            rows.append(parts[name] if name in parts else self._fresh_statistics(width))
        return torch.stack(rows)

    # What devices sent

    def parts_of(self, contribution: Contribution) -> Iterator[Part]:
        """The rows of a device of a cohort, or rows made of what another one sent."""
        if contribution.stacked is not None:
            yield from contribution.stacked
            return
        sent = contribution.tensors
        places = self._trainer.places(contribution.width, contribution.roll)
        for kind, slots in self._slots.items():
            own = {key: sent[key] for key in slots.by_key if key in sent}
            votes = {key: votes_of_rows(t, contribution.rows.get(key)) for key, t in own.items()}
            if own:
                exact = self._like.double()
                row = slots.pack(own, exact, places)
                yield Part(kind, row, votes=slots.pack(votes, exact, places))
        rest = {key: tensor for key, tensor in sent.items() if key not in places}
        for name, row in self.from_keys(rest).items():
            yield _measured(name, row)

    def trained(self, part: Part) -> Tensor:
        """A row holds the blocks that a device did not train, too."""
        found = super().trained(part)
        if part.blocks is None:
            return found
        is_trained = torch.tensor([block in part.blocks for block in self.networks.everything])
        blocks = self._row_blocks(part.name)
        return found & is_trained.to(blocks.device)[blocks]

    def sent(self, work: StackedWork, task: Task, trained: Trained) -> Contribution:
        """What a device of a cohort sends; its tensors are made when someone looks at them."""
        device, blocks, widths = work.device, work.device.blocks, self.networks.widths
        is_whole = device.level is None
        width = 1.0 if device.level is None else widths[device.level]
        roll = 0 if work.window is None else work.window.roll
        rows = {}
        if device.classes is not None:
            rows = dict.fromkeys(classifier_keys(self._trainer), np.array(device.classes))
        memory = {name: {PARAMETERS: row} for name, row in trained.memory.items()}
        parameters, statistics, scales = (row[0] for row in trained.rows)
        parts, constants = [_measured(SCALES, scales)], Tensors()
        size = _SCALE_BYTES * trained.n_scales
        size += len(memory) * self._bytes(PARAMETERS, width, blocks)
        if work.sends_parameters:
            votes = None if device.level is None else self._votes(device.level, rows)
            parameters = self._put_back(parameters, work.window)
            votes = votes if votes is None else self._put_back(votes, work.window)
            parts.append(Part(PARAMETERS, parameters, votes=votes, blocks=blocks))
            size += self._bytes(PARAMETERS, width, blocks)
            size -= trained.n_staying * self._like.element_size()
            constants = self._constants if is_whole else {}
        if is_whole and self._slots[STATISTICS].size:
            parts.append(Part(STATISTICS, statistics, blocks=blocks))
            size += self._bytes(STATISTICS, width, blocks)
        levels = trained.statistics if self._slots[STATISTICS].size else {}
        for at, row in levels.items():
            parts.append(Part(statistics_part(widths[at]), row, measured=widths[at] < 1.0))
            size += self._bytes(STATISTICS, widths[at], blocks)
        size += sum(t.nbytes for key, t in constants.items() if self.block_of[key] in blocks)

        def tensors() -> Tensors:
            own = {part.name: part.values for part in parts} | {SCALES: scales}
            places, learned = self._trainer.places(width, roll), self._slots[PARAMETERS].by_key
            return {
                key: tensor[places[key] if key in learned else ...].cpu().clone()
                for key, tensor in (self.by_key(own) | constants).items()
                if key not in self.block_of or self.block_of[key] in blocks
            }

        return Contribution(
            _MadeWhenAsked(tensors),
            samples=len(task.indices),
            loss=trained.loss,
            width=width,
            rows=rows,
            device=task.device,
            memory=memory,
            sent_bytes=size,
            stacked=tuple(parts),
            known_finite=trained.sound,
            roll=roll,
        )

    def _votes(self, level: int, rows: Mapping[str, Ints]) -> Tensor:
        """By place of a row of parameters, whether a device knows anything about it."""
        votes, slots = self._places_of_level(level), self._slots[PARAMETERS].by_key
        votes = votes.clone() if rows else votes
        for key in rows.keys() & slots.keys():
            there = slots[key].of(votes[None])[0]
            there *= votes_of_rows(there, rows[key])
        return votes

    def _bytes_of(self, kind: str, width: float, blocks: Blocks) -> int:
        sizes, slots = self._sizes(width), self._slots[kind].by_key
        return sum(sizes[key] for key, slot in slots.items() if slot.block in blocks)

    def _sizes_of(self, width: float) -> dict[str, int]:
        return {key: t.nbytes for key, t in self._trainer.model(width).state_dict().items()}


class Trained(NamedTuple):
    """What a cohort knows of a device that it has trained."""

    rows: Rows
    statistics: Mapping[int, Tensor]
    """By level, of those at which it took steps."""
    memory: Mapping[str, Tensor]
    loss: float
    sound: bool
    """Whether all numbers are finite."""
    n_scales: int
    n_staying: int = 0
    """How many parameters are as the server has them, and are not sent."""

    def clone(self) -> Trained:
        """A copy, which stays when the cohort trains again."""
        statistics = {level: row.clone() for level, row in self.statistics.items()}
        memory = {name: row.clone() for name, row in self.memory.items()}
        return self._replace(rows=self.rows.clone(), statistics=statistics, memory=memory)


def _measured(name: str, row: Tensor) -> Part:
    """A row whose numbers are measurements, NaN where there are none."""
    known = ~row.isnan()
    return Part(name, torch.where(known, row, 0.0), None, known.double(), measured=True)


class _MadeWhenAsked(Mapping[str, Tensor]):
    """Tensors that cost nothing until somebody looks at them."""

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = cache(make)

    def __getitem__(self, key: str) -> Tensor:
        return self._make()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def statistics_part(width: float) -> str:
    """The row of norm statistics of a width."""
    return STATISTICS if width == 1.0 else f"{STATISTICS}@{width:g}"  # as in their keys


def _unpacked(slots: Segments, row: Tensor) -> Tensors:
    """Views of a row; a tied weight's second key gets a copy, so that it can be saved."""
    found, seen = Tensors(), set()
    for key, slot in slots.by_key.items():
        part = slot.of(row[None])[0]
        found[key] = part.clone() if slot in seen else part
        seen.add(slot)
    return found
