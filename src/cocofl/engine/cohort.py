"""The cohort executor: the devices of a round as one computation, on a GPU where there is one.

It trains the same devices on the same mini-batches as workers do. Parameters stay on the GPU from
round to round: the state that the round loop carries is a copy for checkpoints and tests.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.engine.examiner import Examiner
from cocofl.engine.narrow import Narrowed, NarrowNetworks, WidthTrial
from cocofl.engine.resident import ResidentSplit
from cocofl.errors import InvalidSetting
from cocofl.fl.batches import Ints
from cocofl.fl.local import Materials, Task, Work, Workshop, one_sample_refused
from cocofl.fl.merge import Contribution, Places, State, merge, merge_nested
from cocofl.fl.recipe import Loss, Recipe, cross_entropy
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies import Merge
from cocofl.fl.widths import OrderedWork
from cocofl.freeze import KernelPlan
from cocofl.models import MODELS
from cocofl.span import Blocks
from cocofl.vector import (
    Adam,
    Cohort,
    DeviceWork,
    Optimizer,
    Precision,
    Program,
    Rows,
    Sgd,
    devices_that_fit,
    disagreement,
    losses,
)

_SCALE_BYTES = 4

Asked = tuple[Sequence[Task], State]
"""What a run wants trained, and what its devices begin with."""


class _Participant(NamedTuple):
    """A device and the number of its run."""

    run: int
    task: Task


@dataclass(frozen=True)
class _Sent(Contribution):
    """What a device of a cohort sends; its tensors are copied only if someone asks for them."""

    size_bytes: int = 0
    sound: bool = True

    @property
    def nbytes(self) -> int:
        """The upload volume."""
        return self.size_bytes

    @property
    def is_finite(self) -> bool:
        """Whether training went well."""
        return self.sound


class _LazyTensors(Mapping[str, Tensor]):
    """A device's update as a mapping, made when somebody looks into it."""

    def __init__(self, make: Callable[[], State]) -> None:
        self._make, self._made = make, State()

    def _all(self) -> State:
        if not self._made:
            self._made = self._make()
        return self._made

    def __getitem__(self, key: str) -> Tensor:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class _RowTensors(_LazyTensors):
    """Of a device with the whole network."""

    def __init__(self, make: Callable[[], State], rows: Rows) -> None:
        super().__init__(make)
        self.rows = rows


class _NarrowTensors(_LazyTensors):
    """Of a device with a narrower network."""

    def __init__(self, make: Callable[[], State], own: Narrowed) -> None:
        super().__init__(make)
        self.own = own


class TrainedAlone(UserWarning):
    """A network whose devices cannot be trained as one computation."""


class CohortExecutor:
    """Trains devices together; what has no stacked form, one after the other."""

    def __init__(
        self,
        on: str | torch.device = "cuda",
        *,
        precision: str = "tf32",
        devices: int | None = None,
    ) -> None:
        """``devices`` is how many train at once; by default as many as fit the GPU's memory."""
        self._on, self._precision = torch.device(on), precision
        self._devices = devices
        if self._on.type == "cuda" and not torch.cuda.is_available():
            raise InvalidSetting("the cohort engine was asked for a GPU, but there is none here")

    def prepare(self, materials: Materials, plan: KernelPlan) -> None:
        """Bring the data to the GPU and the chain into its stacked form."""
        self._workshop = Workshop(materials, plan)
        self._source = ResidentSplit(materials.train, self._on)
        self._tests = ResidentSplit(materials.test, self._on)
        self._cohort: Cohort | None = None
        self._narrow: NarrowNetworks | None = None
        self._room_for = 0, False  # so many devices; whether they distil
        self._alone = self._must_train_alone()
        self._widths = WidthTrial(self._workshop)
        self._held: dict[int, tuple[Mapping[str, Tensor], Rows]] = {}
        self._examiner: Examiner | None = None
        self._sizes: dict[Blocks, int] = {}

    def _must_train_alone(self) -> bool:
        """Whether the network has no stacked form; built-in ones have, as the tests say."""
        name = self._workshop.materials.subject.model
        reason = None if name in MODELS else disagreement(self._workshop.chain())
        if reason is not None:
            warnings.warn(
                f"the devices of {name} train one after the other, on the CPU: {reason}",
                TrainedAlone,
                stacklevel=2,
            )
        return reason is not None

    def resolve_plan(self, state: State) -> KernelPlan:
        """Nothing to choose: a cohort computes the reference arithmetic."""
        del state
        return self._workshop.plan

    def train(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """All devices at once, as far as memory goes."""
        return (sent for _, sent in self._train([(tasks, state)]))

    def train_together(self, asked: Sequence[Asked]) -> list[Iterable[Contribution]]:
        """The devices of several runs at once, as far as memory goes."""
        answers: list[list[Contribution]] = [[] for _ in asked]
        for run, sent in self._train(asked, keep=True):
            answers[run].append(sent)
        return list(answers)

    def _train(
        self, asked: Sequence[Asked], *, keep: bool = False
    ) -> Iterator[tuple[int, Contribution]]:
        """Each device's contribution with the number of its run.

        It is good until the cohort runs again, be it for statistics, unless told to ``keep`` it.
        """
        states = [state for _, state in asked]
        everyone: list[_Participant] = []
        for run, (tasks, state) in enumerate(asked):
            if not self._alone and all(self._can(task.work) for task in tasks):
                everyone += (_Participant(run, task) for task in tasks)
            else:
                yield from ((run, self._workshop.train(task, state)) for task in tasks)
        if not everyone:
            return
        works = [one.task.work for one in everyone]
        distils = any(isinstance(work, OrderedWork) and work.distillation > 0 for work in works)
        cohort = self._cohort_for(len(everyone), distils=distils)
        rows = Rows.below_each_other([self._rows(cohort, state) for state in states])
        self._held = {id(state): self._held[id(state)] for state in states}
        for first in range(0, len(everyone), cohort.devices):
            some = everyone[first : first + cohort.devices]
            sent = self._train_some(cohort, some, rows, states, keep)
            yield from ((one.run, own) for one, own in zip(some, sent, strict=True))

    def _can(self, work: Work) -> bool:
        return isinstance(work, SpanWork) or self._widths.can(work)

    def _train_some(
        self,
        cohort: Cohort,
        some: Sequence[_Participant],
        rows: Rows,
        states: Sequence[State],
        keep: bool,
    ) -> Iterator[Contribution]:
        narrow, tasks = self._narrow, [task for _, task in some]
        assert narrow is not None
        works = [_device_work(task, narrow)._replace(state=run) for run, task in some]
        known = [
            frozenset(key for key in cohort.program.sites.keys if key in state) for state in states
        ]
        indices, valid = self._mini_batches(cohort, some, works)
        schedule, levels = narrow.schedule(tasks, len(indices)), None
        if schedule is not None:
            levels = schedule, narrow.statistics_of(states, rows)[[run for run, _ in some]]
        cohort.train(rows, known, works, indices, valid, levels)
        means, sound = cohort.losses.tolist(), _are_finite(cohort)
        scales = (~cohort.measured.isnan()).sum(1).tolist()
        for d, (task, work) in enumerate(zip(tasks, works, strict=True)):
            common: dict[str, Any] = {
                "samples": len(task.indices),
                "loss": means[d],
                "sound": sound[d] and bool(np.isfinite(means[d])),
            }
            if work.level is None:
                of_device = cohort.rows_now(d).clone() if keep else cohort.rows_now(d)
                yield _Sent(
                    tensors=_RowTensors(partial(_update, cohort, of_device, work), of_device),
                    size_bytes=self._tensor_bytes(cohort, work.blocks) + _SCALE_BYTES * scales[d],
                    **common,
                )
            else:
                own = narrow.narrowed(task, work, d, schedule, valid[:, d])
                yield _narrow_sent(narrow, own.clone() if keep else own, common)

    def _mini_batches(
        self, cohort: Cohort, some: Sequence[_Participant], works: Sequence[DeviceWork]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        # Dropout draws from PyTorch's global generator: the same for the same devices.
        torch.manual_seed(int(some[0].task.rng("dropout").integers(2**63)))
        batches = [self._workshop.batches(task) for _, task in some]
        for (_, task), work, own in zip(some, works, batches, strict=True):
            if any(len(batch) == 1 for batch in own) and cohort.needs_two_samples(work):
                raise one_sample_refused(task.device)
        return _mini_batches(batches, self._workshop.recipe.batch)

    def merger(self, strategy_merge: Merge) -> Merge:
        """Merge rows on the GPU."""
        return {merge: self._merge, merge_nested: self._merge_nested}.get(
            strategy_merge, strategy_merge
        )

    def _merge(
        self, state: Mapping[str, Tensor], contributions: Iterable[Contribution], places: Places
    ) -> State:
        """What :func:`cocofl.fl.merge.merge` gives, from rows instead of tensors by key."""
        are_rows, everyone = _peeked(contributions, _RowTensors)
        if not are_rows:
            return merge(state, everyone, places)
        cohort = self._cohort
        assert cohort is not None
        old = self._rows(cohort, state)
        changes = [torch.zeros_like(rows[0], dtype=torch.float64) for rows in old[:2]]
        sums = torch.zeros_like(old.scales[0], dtype=torch.float64)
        weights, samples = torch.zeros_like(sums), 0
        for sent in everyone:
            assert isinstance(sent.tensors, _RowTensors)
            own, samples = sent.tensors.rows, samples + sent.samples
            for change, new, before in zip(changes, own[:2], old[:2], strict=True):
                change.add_(new[0].double() - before[0].double(), alpha=sent.samples)
            told = ~torch.isnan(own.scales[0])
            sums += torch.where(told, own.scales[0].double(), 0.0) * sent.samples
            weights += told * sent.samples
        moved = [
            (before[0].double() + change / samples).to(before.dtype)[None]
            for before, change in zip(old[:2], changes, strict=True)
        ]
        scales = torch.where(weights > 0, (sums / weights).float(), old.scales[0])
        rows = Rows(moved[0], moved[1], scales[None])
        merged = dict(state) | cohort.state_of(rows.on_the_host())
        self._held[id(merged)] = merged, rows
        return merged

    def _merge_nested(
        self, state: Mapping[str, Tensor], contributions: Iterable[Contribution], places: Places
    ) -> State:
        """What :func:`cocofl.fl.merge.merge_nested` gives, from rows instead of tensors by key."""
        are_narrow, everyone = _peeked(contributions, _NarrowTensors)
        if not are_narrow:
            return merge_nested(state, everyone, places)
        assert self._cohort is not None
        assert self._narrow is not None
        old = self._rows(self._cohort, state)
        sent = (one.tensors.own for one in everyone)
        merged, rows = self._narrow.merge(state, old, sent)
        self._held[id(merged)] = merged, rows
        return merged

    def _rows(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Rows:
        """The state as rows; usually they are where the last merge left them."""
        if id(state) not in self._held:
            self._held[id(state)] = state, cohort.rows_of([state])
        return self._held[id(state)][1]

    def statistics(self, tasks: Sequence[Task], state: State) -> Iterator[Contribution]:
        """All devices at once, where nothing in the network runs device by device."""
        cohort = None if self._alone else self._cohort_for(len(tasks))
        if cohort is None or not cohort.program.is_capturable:
            yield from (self._workshop.statistics(task, state) for task in tasks)
            return
        rows = self._rows(cohort, state)
        for first in range(0, len(tasks), cohort.devices):
            some = tasks[first : first + cohort.devices]
            batches = [self._workshop.batches(task) for task in some]
            cohort.measure_statistics(rows, *_mini_batches(batches, cohort.batch))
            slots, found = cohort.program.layout.statistics, cohort.statistics.cpu()
            for d, task in enumerate(some):
                sent = {key: slot.of(found)[d] for key, slot in slots.by_key.items()}
                yield Contribution(sent, len(task.indices))

    def confusion(self, state: State, chunks: Sequence[Ints], statistics: str) -> NDArray[np.int64]:
        """All of the test data on the GPU."""
        if self._examiner is None:
            model, _ = self._workshop.materials.subject.build()
            # Where devices train together in a captured graph, their model can be tested so.
            capture = self._cohort is not None and self._cohort.program.is_capturable
            precision = Precision.named(self._precision)
            self._examiner = Examiner(model, self._tests, self._on, precision, capture=capture)
        return self._examiner.confusion(state, chunks, statistics)

    def close(self) -> None:
        """Let go of the GPU's memory."""
        self._cohort = self._narrow = self._examiner = None
        self._held = {}

    def _cohort_for(self, wanted: int, *, distils: bool = False) -> Cohort:
        most, distilled = self._room_for
        if self._cohort is None or wanted > most or distils > distilled:
            self._room_for = max(wanted, most), distils or distilled
            chain, recipe = self._workshop.chain(), self._workshop.recipe
            program = Program(chain, self._on) if self._cohort is None else self._cohort.program
            self._cohort = self._narrow = None  # their memory is for the next

            def make(devices: int) -> Cohort:
                return Cohort(
                    chain,
                    self._source,
                    devices=devices,
                    batch=recipe.batch,
                    on=self._on,
                    optimizer=_stacked_optimizer(recipe),
                    loss=_stacked_loss(self._workshop.loss),
                    precision=self._precision,
                    # A loss of one's own is told on the host which samples count.
                    capture=self._workshop.loss is cross_entropy,
                    program=program,
                )

            most, distilled = self._room_for
            fitting = self._devices or devices_that_fit(make, most, self._on, distils=distilled)
            self._cohort = make(min(most, fitting))
            self._narrow = NarrowNetworks(self._workshop, self._cohort)
        return self._cohort

    def _tensor_bytes(self, cohort: Cohort, span: Blocks) -> int:
        if span not in self._sizes:
            work = DeviceWork(span, "f", 0.0)
            sent = cohort.update(cohort.rows_now(0), work).items()
            self._sizes[span] = sum(
                t.nbytes for key, t in sent if key not in cohort.program.sites.place
            )
        return self._sizes[span]


def _device_work(task: Task, narrow: NarrowNetworks) -> DeviceWork:
    work = task.work
    if isinstance(work, SpanWork):
        return DeviceWork(work.span, work.variant, task.lr)
    return narrow.work(task)


def _narrow_sent(narrow: NarrowNetworks, own: Narrowed, common: Mapping[str, Any]) -> _Sent:
    return _Sent(
        tensors=_NarrowTensors(partial(narrow.tensors, own), own),
        width=narrow.width(own.level),
        rows=narrow.voting_rows(own),
        size_bytes=narrow.sent_bytes(own),
        **common,
    )


def _mini_batches(
    devices: Sequence[Sequence[Ints]], batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(step, device, sample) and how many of those count; what is missing repeats what is there."""
    steps = max(map(len, devices))
    indices = np.zeros((steps, len(devices), batch), np.int64)
    valid = np.zeros((steps, len(devices)), np.int64)
    for d, own in enumerate(devices):
        for step, samples in enumerate(own):
            indices[step, d] = np.resize(samples, batch)
            valid[step, d] = len(samples)
    return indices, valid


def has_optimizer(recipe: Recipe) -> bool:
    """Whether many devices can descend together as a recipe says."""
    return recipe.optimizer_class() in (torch.optim.SGD, torch.optim.Adam)


def _stacked_optimizer(recipe: Recipe) -> Optimizer:
    recipe.check()
    if not has_optimizer(recipe):
        raise InvalidSetting(
            f"the cohort engine knows the optimizers sgd and adam, not {recipe.optimizer!r}; "
            'use engine.kind = "serial"'
        )
    decay, clip = recipe.weight_decay, recipe.clip
    if recipe.optimizer_class() is torch.optim.Adam:
        return Adam(weight_decay=decay, clip=clip)
    return Sgd(momentum=recipe.momentum, weight_decay=decay, clip=clip)


def _stacked_loss(loss: Loss) -> losses.StackedLoss:
    return losses.cross_entropy if loss is cross_entropy else losses.one_by_one(loss)


def _are_finite(cohort: Cohort) -> list[bool]:
    rows = (cohort.parameters, cohort.statistics)
    sound = torch.stack([torch.isfinite(r.sum(1)) for r in rows]).all(0)
    found: list[bool] = sound.tolist()
    return found


def _update(cohort: Cohort, rows: Rows, work: DeviceWork) -> State:
    return {key: tensor.cpu() for key, tensor in cohort.update(rows, work).items()}


def _peeked(
    contributions: Iterable[Contribution], kind: type[_LazyTensors]
) -> tuple[bool, Iterator[Any]]:
    """Whether they are of a kind (all are, or none), and all of them still."""
    iterator = iter(contributions)
    first = list(itertools.islice(iterator, 1))
    return any(isinstance(one.tensors, kind) for one in first), itertools.chain(first, iterator)
