"""The cohort executor: the devices of a round as one computation, on a GPU where there is one.

It trains the same devices on the same mini-batches as workers do. The server's state stays on the
GPU from round to round, as rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cocofl.engine.executor import Answer, Asked, Executor, RoundPlan, added
from cocofl.engine.gpu_evaluation import GpuEvaluator, GpuSamples
from cocofl.errors import InvalidSetting
from cocofl.fl.batches import Ints
from cocofl.fl.exit_scores import depths_in
from cocofl.fl.metrics import Sums
from cocofl.fl.stacked import (
    PARAMETERS,
    NotStacked,
    StackedLayout,
    StackedNetworks,
    StackedWork,
    Trained,
    Window,
    stacked,
)
from cocofl.fl.state import Memory, ServerState
from cocofl.fl.trainer import Task, Trainer, one_sample_refused
from cocofl.freeze import KernelPlan
from cocofl.models import MODELS
from cocofl.vector import (
    Cohort,
    Precision,
    Program,
    Rows,
    RuleMemory,
    devices_that_fit,
    disagreement,
    load_libraries,
    losses,
)

_Start = tuple[int, Window | None]
"""The number of a run, and the channels of its state that come first."""


class _Participant(NamedTuple):
    """A device, the number of its run, and its work in the cohort's terms."""

    run: int
    task: Task
    work: StackedWork

    @property
    def start(self) -> _Start:
        """What it begins with."""
        return self.run, self.work.window


class TrainedAlone(UserWarning):
    """Devices that cannot be trained as one computation."""


class CohortExecutor(Executor):
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
        if self._on.type == "cuda" and self._on.index is not None:
            torch.cuda.set_device(self._on)  # where our own kernels are launched
        self._loading = Thread(target=load_libraries, args=(self._on,), daemon=True)
        self._loading.start()

    def prepare(self, trainer: Trainer, plan: KernelPlan) -> None:
        """Bring the data to the GPU."""
        self._loading.join()
        trainer.kernels = plan
        self._trainer, spec = trainer, trainer.spec
        self._source = GpuSamples(spec.train, self._on)
        self._tests = GpuSamples(spec.test, self._on)
        self._cohort: Cohort | None = None
        self._room_for = 0, False  # so many devices; whether they distil
        self._evaluator: GpuEvaluator | None = None
        self._warned: set[str] = set()
        self._layout = cache(self._stacked_layout)

    def _stacked_layout(self) -> StackedLayout | None:
        """The network for many devices, and how its states lie; None where it has no such form."""
        name = self._trainer.spec.subject.model
        reason = None
        if self._trainer.chain().learned is not None:
            reason = "low-rank adapters have no stacked form"
        elif name not in MODELS:  # built-in networks have one, as the tests say
            reason = disagreement(self._trainer.chain())
        if reason is not None:
            self._warn(f"the devices of {name} train one after the other, on the CPU: {reason}")
            return None
        program = Program(self._trainer.chain(), self._on)
        return StackedLayout(StackedNetworks(self._trainer, program), self._on)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, TrainedAlone, stacklevel=2)

    def choose_kernels(self, state: ServerState) -> KernelPlan:
        """Nothing to choose: a cohort computes the reference arithmetic."""
        del state
        return self._trainer.kernels

    def placed(self, state: ServerState) -> ServerState:
        """As rows on the GPU."""
        layout = self._layout()
        return state if layout is None else state.placed(layout)

    # Training

    def collect(self, plan: RoundPlan, state: ServerState) -> Iterable[Answer]:
        """The devices of one run."""
        return (answer for _, answer in self._answers([(plan, state)]))

    def collect_runs(self, asked: Asked) -> list[Iterable[Answer]]:
        """The devices of all runs at once, as far as memory goes."""
        if len(asked) == 1:
            return super().collect_runs(asked)
        found: list[list[Answer]] = [[] for _ in asked]
        for run, answer in self._answers(asked, keep=True):
            found[run].append(answer)
        return list(found)

    def _answers(self, asked: Asked, *, keep: bool = False) -> Iterator[tuple[int, Answer]]:
        """Each device's answer with the number of its run; those who train alone come first.

        It is good until the cohort runs again, unless told to ``keep`` it.
        """
        together: list[_Participant] = []
        for run, (plan, state) in enumerate(asked):
            for task in plan.tasks:
                if (work := self._stacked(task)) is not None:
                    together.append(_Participant(run, task, work))
                else:
                    alone = self._trainer.train(task, state)
                    yield run, Answer(task.device, alone)
        states = [state for _, state in asked]
        for trains in (True, False):
            some = [one for one in together if one.work.sends_parameters is trains]
            if some:
                yield from self._in_cohort(some, states, keep=keep)

    def _stacked(self, task: Task) -> StackedWork | None:
        """The task's work in the cohort's terms; None where it has to be done alone."""
        layout = self._layout()
        if layout is None:
            return None
        try:
            return stacked(layout.networks, task)
        except NotStacked as reason:
            kind = type(task.work).__name__
            self._warn(f"devices with {kind} train one after the other, on the CPU: {reason}")
            return None

    def _in_cohort(
        self, everyone: Sequence[_Participant], states: Sequence[ServerState], *, keep: bool
    ) -> Iterator[tuple[int, Answer]]:
        """Of devices that all train, or all measure norm statistics."""
        layout = self._layout()
        assert layout is not None
        distils = any(one.work.device.distillation > 0 for one in everyone)
        cohort = self._cohort_for(len(everyone), distils=distils)
        layout.networks.enter(cohort)
        starts = list(dict.fromkeys(one.start for one in everyone))
        each = [layout.rows(states[run].parts, window) for run, window in starts]
        rows = Rows.below_each_other(each)
        for first in range(0, len(everyone), cohort.devices):
            some = everyone[first : first + cohort.devices]
            if everyone[0].work.sends_parameters:
                found = self._train(cohort, some, starts, rows, states, layout)
            else:
                found = self._measure(cohort, some, rows)
            for one, trained in zip(some, found, strict=True):
                sent = layout.sent(one.work, one.task, trained.clone() if keep else trained)
                sent = self._trainer.transmitted(sent, one.task, states[one.run])
                yield one.run, Answer(one.task.device, sent)

    def _train(
        self,
        cohort: Cohort,
        some: Sequence[_Participant],
        starts: Sequence[_Start],
        rows: Rows,
        states: Sequence[ServerState],
        layout: StackedLayout,
    ) -> Iterator[Trained]:
        works = [one.work for one in some]
        known = [layout.known_scales(states[run].parts) for run, _ in starts]
        indices, valid = self._mini_batches(cohort, some)
        schedule = np.array([work.schedule(len(indices)) for work in works]).T
        levels = None
        if any(work.steps_at is not None for work in works):
            by_state = [layout.statistics_by_level(state.parts) for state in states]
            levels = schedule, torch.stack([by_state[one.run] for one in some])
        device_works = [one.work.device._replace(state=starts.index(one.start)) for one in some]
        memories = [_memory(states[one.run], one.task) for one in some]
        cohort.train(rows, known, device_works, indices, valid, levels, memories)
        sums = cohort.parameters.sum(1) + cohort.statistics.sum(1)
        means, sound = cohort.losses.tolist(), sums.isfinite().tolist()
        scales = (~cohort.measured.isnan()).sum(1).tolist()
        for d, work in enumerate(works):
            at: set[int] = set()
            if work.sends_statistics:
                at = set(schedule[valid[:, d] > 0, d].tolist())
                if work.device.distillation and at and work.device.level is not None:
                    at.add(work.device.level)  # as a teacher
            yield Trained(
                rows=cohort.rows_now(d),
                statistics=cohort.statistics_at(sorted(at), d),
                memory=cohort.remembered(d) if work.device.rule is not None else {},
                loss=means[d],
                sound=sound[d],
                n_scales=scales[d],
                n_staying=cohort.n_staying[d],
            )

    def _measure(
        self, cohort: Cohort, some: Sequence[_Participant], rows: Rows
    ) -> Iterator[Trained]:
        """Norm statistics, nothing trained."""
        batches = [self._trainer.batches(one.task) for one in some]
        cohort.measure_statistics(rows, *_padded(batches, cohort.batch))
        for d in range(len(some)):
            yield Trained(cohort.rows_now(d), {}, {}, 0.0, True, 0)

    def _mini_batches(
        self, cohort: Cohort, some: Sequence[_Participant]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        # Dropout draws from PyTorch's global generator: the same for the same devices.
        torch.manual_seed(int(some[0].task.rng("dropout").integers(2**63)))
        batches = [self._trainer.batches(one.task) for one in some]
        for one, own in zip(some, batches, strict=True):
            if any(len(b) == 1 for b in own) and cohort.needs_two_samples(one.work.device):
                raise one_sample_refused(one.task.device)
        return _padded(batches, self._trainer.training.batch)

    # Testing

    def test(self, state: ServerState, chunks: Sequence[Ints], statistics: str) -> list[Sums]:
        """All of the test data on the GPU; a network with several exits on the CPU."""
        if depths_in(state.parts):
            return added(self._trainer.test(state, chunks, statistics))
        if self._evaluator is None:
            # Where devices train together in a captured graph, their model can be tested so.
            capture = self._cohort is not None and self._cohort.program.is_capturable
            precision = Precision(self._precision)
            self._evaluator = GpuEvaluator(self._trainer, self._tests, precision, capture=capture)
        return self._evaluator.test(state, chunks, statistics)

    @property
    def devices_at_once(self) -> int:
        """How many devices have trained at a time so far, at most."""
        return 0 if self._cohort is None else self._cohort.devices

    def close(self) -> None:
        """Let go of the GPU's memory."""
        self._loading.join()  # a process that ends meanwhile would crash
        self._cohort = self._evaluator = None

    def _cohort_for(self, wanted: int, *, distils: bool = False) -> Cohort:
        most, distilled = self._room_for
        if self._cohort is None or wanted > most or distils > distilled:
            self._room_for = max(wanted, most), distils or distilled
            layout, training = self._layout(), self._trainer.training
            assert layout is not None
            loss = training.stacked_loss()
            optimizer = training.stacked_optimizer()
            if optimizer is None:
                raise InvalidSetting(
                    "the cohort engine knows the optimizers sgd and adam, not "
                    f'{training.optimizer!r}; use engine.kind = "serial"'
                )
            self._cohort = None  # its memory is for the next

            def make(devices: int) -> Cohort:
                return Cohort(
                    self._trainer.chain(),
                    self._source,
                    devices=devices,
                    batch=training.batch,
                    on=self._on,
                    optimizer=optimizer,
                    loss=loss or losses.one_by_one(self._trainer.loss),
                    precision=self._precision,
                    # A loss of one's own is told on the host which samples count.
                    capture=loss is not None,
                    program=layout.networks.program,
                )

            most, distilled = self._room_for
            fitting = self._devices or devices_that_fit(
                make, most, self._on, chain=self._trainer.chain(), distils=distilled
            )
            self._cohort = make(min(most, fitting))
        return self._cohort


def _memory(state: ServerState, task: Task) -> RuleMemory:
    """What the rule of a device's work may read."""

    def rows(memory: Memory) -> dict[str, torch.Tensor]:
        return {n: own[PARAMETERS] for n, own in memory.items() if PARAMETERS in own}

    return RuleMemory(rows(state.memory), rows(task.memory))


def _padded(
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
