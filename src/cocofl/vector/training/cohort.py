"""The devices of a round as one computation.

A :class:`Cohort` has room for a number of devices and runs any devices, blocks and variants in
it: what differs between them are masks and numbers in its tensors, never the computation. So
the step can be captured once as a CUDA graph and replayed for all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting
from cocofl.freeze import Network, State
from cocofl.local_rule import LocalRule
from cocofl.span import Blocks, Role, Span
from cocofl.vector.kernels.compiling import compiling_only
from cocofl.vector.program.program import Program
from cocofl.vector.program.row_layout import Rows, Segment
from cocofl.vector.program.stacked_layers import Beside
from cocofl.vector.program.step_context import Roles, StepContext
from cocofl.vector.rounding.points import RoundingPoint
from cocofl.vector.rounding.table import CohortRounding
from cocofl.vector.training.execution import Graphs, Precision
from cocofl.vector.training.frozen_weights import FrozenWeights
from cocofl.vector.training.levels import WHOLE, Levels
from cocofl.vector.training.losses import StackedLoss, cross_entropy, distance, lowered, of_classes
from cocofl.vector.training.optimizer import Optimizer, Sgd
from cocofl.vector.training.rules import RuleMemory, RuleRows

Source = Callable[[Tensor], tuple[tuple[Tensor, ...], Tensor]]
"""From sample numbers (device, sample) to the model's inputs and the labels."""


class DeviceWork(NamedTuple):
    """What one device does in a round."""

    blocks: Blocks
    variant: str
    lr: float
    state: int = 0
    """Which of the round's states it begins with."""
    level: int | None = None
    """Which of the cohort's narrower networks it holds; None for the whole one."""
    classes: tuple[int, ...] | None = None
    """Whose scores count in its loss; None for all."""
    distillation: float = 0.0
    """Of the loss at a narrower level, the part that the network it holds decides, as a teacher."""
    rule: LocalRule | None = None
    """What is done to its gradients."""
    margins: tuple[float, ...] | None = None
    """By how much the scores of each class are lowered in its loss; None where they are not."""


@dataclass(frozen=True)
class _Traits:
    """What decides which computation a step is; all else are numbers in tensors."""

    folds: bool
    points: frozenset[RoundingPoint]
    on_the_fly: frozenset[RoundingPoint]
    narrow: bool = False
    """Whether devices have networks of unequal width."""
    levels: bool = False
    """Whether each step is taken at a level of its own."""
    distils: bool = False
    """Whether what devices hold runs beside narrower networks, and teaches them."""
    averages: bool = False
    """Whether norms take plain means over mini-batches, whatever their momentum."""
    masked: bool = False
    """Whether some scores do not count in the losses."""
    calibrated: bool = False
    """Whether some scores are lowered in the losses."""
    rules: tuple[LocalRule, ...] = ()
    """What is done to the gradients of some devices, in the order of their masks."""


class Cohort:
    """Room for ``devices`` devices with mini-batches of ``batch`` samples of one chain."""

    def __init__(
        self,
        chain: BlockChain | Network,
        source: Source,
        *,
        devices: int,
        batch: int,
        on: torch.device | str = "cpu",
        optimizer: Optimizer | None = None,
        loss: StackedLoss = cross_entropy,
        precision: str = "tf32",
        capture: bool = True,
        program: Program | None = None,
    ) -> None:
        self.on = torch.device(on)
        self.devices, self.batch = devices, batch
        self._optimizer = Sgd() if optimizer is None else optimizer
        self._loss, self._source = loss, source
        self._precision = Precision(precision)
        network = Network.of(chain)
        self.program = Program(network, self.on) if program is None else program
        layout, held = self.program.layout, network.chain.state_dict()
        self._constants = {key: held[key] for key in layout.constants}

        def zeros(*shape: int, dtype: torch.dtype = layout.dtype) -> Tensor:
            return torch.zeros(devices, *shape, dtype=dtype, device=self.on)

        self.parameters = zeros(layout.parameters.size)
        self.statistics = zeros(layout.statistics.size)
        self._remembered = self._optimizer.memory(self.parameters)
        self._rules = RuleRows(self.parameters)
        self._leaves = layout.parameters.leaves(self.parameters)
        self._tracked = layout.statistics.views(self.statistics)
        self.levels: Levels | None = None
        self._block_of = layout.parameters.blocks().to(self.on)
        narrow = self._precision.cast(self.parameters[:0]).dtype
        self._frozen = FrozenWeights(self.program, devices, self.on, narrow)
        self.measured = zeros(len(self.program.sites.keys), dtype=torch.float32).fill_(torch.nan)
        flags = torch.zeros(3, self.program.n_blocks, devices, dtype=torch.bool, device=self.on)
        self._roles = Roles(*flags)
        self._modes: list[list[str]] = []
        self._counts: list[int] = []
        self._learns = zeros(layout.parameters.size, dtype=torch.bool)
        self._own = torch.zeros_like(self._learns)
        self._nothing = zeros(64)
        self._unused: set[Segment] = set()
        self._present = zeros(self.program.scores or 0).fill_(1.0)
        self._margins = zeros(self.program.scores or 0)
        self._lr, self._steps_done = zeros(), zeros()
        self._indices = zeros(batch, dtype=torch.long)
        self._valid = zeros(dtype=torch.int32)
        self._last = zeros(dtype=torch.bool)
        self.losses = zeros(dtype=torch.float64)
        self.n_staying = [0] * devices
        """Of each device's parameters, how many its rule keeps as the server sent them."""
        self._beside = Beside() if self.on.type == "cuda" else None
        self._rounding = CohortRounding(self.program.rounding_points, devices, self.on)
        self._graphs = Graphs(capture and self.on.type == "cuda" and self.program.is_capturable)

    @property
    def everything(self) -> Span:
        """The span of all blocks."""
        return Span(0, self.program.n_blocks)

    # States as rows

    def rows_of(self, states: Sequence[Mapping[str, Tensor]]) -> Rows:
        """States as rows on the cohort's device."""
        layout, sites = self.program.layout, self.program.sites
        scales = torch.full((len(states), len(sites.keys)), torch.nan)
        for row, state in zip(scales, states, strict=True):
            for key, place in sites.place.items():
                if key in state:
                    row[place] = state[key].item()
        return Rows(
            torch.stack([layout.parameters.pack(state, self.parameters) for state in states]),
            torch.stack([layout.statistics.pack(state, self.statistics) for state in states]),
            scales.to(self.on),
        )

    @property
    def n_levels(self) -> int:
        """How many narrower networks it knows."""
        return 0 if self.levels is None else self.levels.count

    def add_level(self, factors: Tensor, channels: Mapping[str, int]) -> int:
        """A narrower network, as factors on the places of a row of parameters; its number.

        ``channels`` are what :meth:`Program.channels_in` finds in it.
        """
        if self.levels is None:
            self.levels = Levels(self.program, self.devices, self.parameters)
        if self.levels.is_full:
            self._graphs.forget()
        return self.levels.add(factors, channels)

    def rows_now(self, device: int) -> Rows:
        """What a device has learned, (1, place); until the cohort trains again."""
        here = slice(device, device + 1)
        return Rows(self.parameters[here], self.statistics[here], self.measured[here])

    def update(self, rows: Rows, work: DeviceWork) -> State:
        """What a device with these rows sends: tensors and scales of the blocks it trained."""
        layout = self.program.layout
        sent: State = {
            key: segment.of(own)[0].clone()
            for kind, own in zip((layout.parameters, layout.statistics), rows, strict=False)
            for key, segment in kind.by_key.items()
            if segment.block in work.blocks
        }
        for key, block in layout.constants.items():
            if block in work.blocks:
                sent[key] = self._constants[key].clone()
        scales = rows.scales[0].cpu()
        found = {key: scales[place] for key, place in self.program.sites.place.items()}
        return sent | {key: scale for key, scale in found.items() if not scale.isnan()}

    def statistics_at(self, levels: Sequence[int], device: int) -> dict[int, Tensor]:
        """By level, the statistics of a device's narrower networks; until the next training."""
        return {at: self.levels.statistics[device, at] for at in levels if self.levels is not None}

    def remembered(self, device: int) -> dict[str, Tensor]:
        """What the rule of a device's work lets it remember, as rows; until the next training."""
        return {name: rows[device] for name, rows in self._rules.kept.items()}

    def needs_two_samples(self, work: DeviceWork) -> bool:
        """Whether a mini-batch of one sample would leave a norm without a variance."""
        return any(
            work.variant == "f" or one.block in work.blocks or (one.norm and one.norm.mean is None)
            for one in self.program.lone_norms
        )

    # A round

    def train(
        self,
        states: Rows,
        known: Sequence[frozenset[str]],
        works: Sequence[DeviceWork],
        indices: NDArray[np.int64],
        valid: NDArray[np.int64],
        levels: tuple[NDArray[np.int64], Tensor] | None = None,
        memories: Sequence[RuleMemory] = (),
    ) -> None:
        """Train all devices on their mini-batches: (step, device, sample) and (step, device).

        ``known`` are the scales that each state has. There may be fewer works than room. With
        ``levels`` each step is taken at one of the narrower networks or the whole one: at which,
        (step, device), and the statistics that the narrower begin with, (device, level, place).
        ``memories`` are what the rules of the works read, by device.
        """
        works = self._with_idle(works)
        begin = partial(self._begin_training, states, known, works, levels, memories)
        traits = begin()
        counts = np.pad(valid, ((0, 0), (0, self.devices - valid.shape[1])))
        finishing = (counts > 0) & (np.cumsum((counts > 0)[::-1], 0)[::-1] == 1)
        finishing &= np.array([work.variant == "qff" for work in works])
        finishing_on_device = torch.from_numpy(finishing).to(self.on)
        measures = finishing.any(1).tolist()
        if self._compile(traits, {*measures}, indices, counts):
            begin()
        for step in self._load(indices, counts):
            self._last.copy_(finishing_on_device[step])
            if traits.levels and self.levels is not None:
                self.levels.go_to(step)
            kind = traits, measures[step]
            self._graphs.run(kind, partial(self._step, *kind))
        taken = torch.from_numpy(np.maximum((counts > 0).sum(0), 1)).to(self.on)
        self.losses /= taken
        self._rules.end(traits.rules, self.parameters, self._lr, taken, self._learns)

    def _begin_training(
        self,
        states: Rows,
        known: Sequence[frozenset[str]],
        works: Sequence[DeviceWork],
        levels: tuple[NDArray[np.int64], Tensor] | None,
        memories: Sequence[RuleMemory],
    ) -> _Traits:
        """Set all that steps change to what a round begins with."""
        traits = self._begin(states, known, works)
        rules = self._rules.begin(self.parameters, [work.rule for work in works], memories)
        traits = replace(traits, rules=rules)
        staying = self._rules.staying(rules, self.parameters, self._lr, self._learns)
        self.n_staying = [0] * self.devices if staying is None else staying.sum(1).tolist()
        if staying is not None:
            self._learns.logical_and_(~staying)
        if levels is not None:
            assert self.levels is not None
            distillation = [work.distillation for work in works]
            traits = replace(traits, levels=True, distils=any(distillation))
            room = self.devices - levels[0].shape[1]
            schedule = np.pad(levels[0], ((0, 0), (0, room)), constant_values=WHOLE)
            self.levels.begin(schedule, levels[1], self.statistics, distillation)
        return traits

    def _compile(
        self,
        traits: _Traits,
        measures: set[bool],
        indices: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> bool:
        """Compile the kernels of steps that are new; whether there were any.

        What steps change is then to be set again.
        """
        new = [m for m in measures if not self._graphs.knows((traits, m))]
        if not (new and self.program.kernels.has_triton):
            return False
        next(self._load(indices, counts))
        if traits.levels and self.levels is not None:
            self.levels.go_to(0)
        on_gpu = [self.on] if self.on.type == "cuda" else []
        with torch.random.fork_rng(on_gpu), compiling_only(self.on):
            for measures_now in new:
                self._step(traits, measures_now)
        return True

    def _mark_present(self, works: Sequence[DeviceWork]) -> None:
        present = torch.ones(self._present.shape)
        for row, work in zip(present, works, strict=False):
            if work.classes is not None:
                row.zero_()
                row[list(work.classes)] = 1.0
        self._present.copy_(present)

    def _set_margins(self, works: Sequence[DeviceWork]) -> None:
        margins = torch.zeros(self._margins.shape, dtype=self._margins.dtype)
        for row, work in zip(margins, works, strict=False):
            if work.margins is not None:
                row[: len(work.margins)] = torch.tensor(work.margins, dtype=row.dtype)
        self._margins.copy_(margins)

    def measure_statistics(
        self, states: Rows, indices: NDArray[np.int64], valid: NDArray[np.int64]
    ) -> None:
        """Each norm's statistics as plain means over a device's mini-batches; nothing learns."""
        room = self.devices - valid.shape[1]
        traits = self._begin(states, [frozenset()], self._with_idle([]))
        traits = replace(traits, averages=True)
        for _ in self._load(indices, np.pad(valid, ((0, 0), (0, room)))):
            self._graphs.run(traits, partial(self._look, traits))

    def _load(self, indices: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[int]:
        """Set one step's mini-batches after the other; the number of the step."""
        room = self.devices - indices.shape[1]
        samples = torch.from_numpy(np.pad(indices, ((0, 0), (0, room), (0, 0)))).to(self.on)
        valid = torch.from_numpy(counts.astype(np.int32)).to(self.on)
        for step in range(len(indices)):
            self._indices.copy_(samples[step])
            self._valid.copy_(valid[step])
            self._counts = counts[step].tolist()
            yield step

    def _look(self, traits: _Traits) -> None:
        with self._precision.active(), torch.no_grad():
            inputs, _ = self._source(self._indices)
            step = self._context(self._leaves, traits, False)
            self.program(tuple(self._precision.cast(x) for x in inputs), step)
        self._steps_done += 1

    def _with_idle(self, works: Sequence[DeviceWork]) -> list[DeviceWork]:
        """All places of the cohort: a device without samples does nothing."""
        if len(works) > self.devices:
            raise InvalidSetting(f"{len(works)} devices in a cohort with room for {self.devices}")
        idle = DeviceWork(self.everything, "f", 0.0)
        return [*works, *[idle] * (self.devices - len(works))]

    def _begin(
        self, states: Rows, known: Sequence[frozenset[str]], works: Sequence[DeviceWork]
    ) -> _Traits:
        of_device = torch.tensor([work.state for work in works], device=self.on)
        self.parameters.copy_(states.parameters[of_device])
        self.statistics.copy_(states.statistics[of_device])
        self.measured.fill_(torch.nan)
        self.losses.zero_()
        self._steps_done.zero_()
        for tensor in self._remembered:
            tensor.zero_()
        self._lr.copy_(torch.tensor([work.lr for work in works], dtype=self._lr.dtype))
        with_batch = self._set_roles(works)
        self._learns.copy_(self._roles.trained.t()[:, self._block_of])
        self._own.copy_(self._roles.with_batch.t()[:, self._block_of])
        for segment in self._unused:
            self._learns[:, segment.start : segment.stop] = False
        if self.levels is not None:
            there = self.levels.hold([work.level for work in works])
            self.parameters.mul_(there)
            self._learns.logical_and_(there)

        masked = any(work.classes is not None for work in works)
        if masked:
            self._mark_present(works)
        calibrated = any(work.margins is not None for work in works)
        if calibrated:
            self._set_margins(works)
        folds = not bool(with_batch.all())
        if folds:
            picks = [(w.state, w.variant == "qff") for w in works]
            self._frozen.fill(states, picks, self._graphs)
        if folds or self._frozen.is_narrow:
            self._frozen.take(self.parameters, self._own)
        rounding = [(w.blocks if w.variant == "qff" else None, known[w.state]) for w in works]
        points, on_the_fly = self._rounding.begin(rounding, states.scales[of_device])
        narrow = any(work.level is not None for work in works)
        return _Traits(
            folds, points, on_the_fly, narrow=narrow, masked=masked, calibrated=calibrated
        )

    def _set_roles(self, works: Sequence[DeviceWork]) -> NDArray[np.bool_]:
        """Tell who trains what; by block and device, whether norms use the mini-batch."""
        n_blocks = self.program.n_blocks
        roles = np.array([[r.value for r in work.blocks.roles(n_blocks)] for work in works]).T
        trained = roles == Role.TRAINED.value
        with_batch: NDArray[np.bool_] = trained | np.array([work.variant == "f" for work in works])
        masks = Roles(*map(torch.from_numpy, (with_batch, trained, roles != Role.FROZEN.value)))
        for own, mask in zip(self._roles, masks, strict=True):
            own.copy_(mask)
        self._modes = np.select([trained, with_batch], ["trained", "still"], "frozen").tolist()
        return with_batch

    # A step

    def _step(self, traits: _Traits, measures: bool) -> None:
        levels = self.levels if traits.levels else None
        with self._precision.active(), torch.enable_grad():
            inputs, labels = self._source(self._indices)
            inputs = tuple(self._precision.cast(x) for x in inputs)
            leaves = self._leaves
            if levels is not None:
                leaves = levels.narrowed(self.parameters, self.statistics)
            step = self._context(leaves, traits, measures)
            outputs = self.program(inputs, step)
            if traits.masked:
                outputs = of_classes(outputs, self._present)
            losses = self._losses_of(outputs, labels, traits)
            segments, read = list(leaves), list(leaves.values())
            if traits.distils:
                losses = self._taught(losses, outputs, inputs, labels, step, traits)
                read += self._leaves.values()
            found = torch.autograd.grad(losses.sum(), read, allow_unused=True)
        if self._beside is not None:
            self._beside.join()
        gradients = self._flat(segments, found[: len(segments)])
        if levels is not None:
            levels.settle(gradients, self.statistics)
            if traits.distils:
                levels.settle_held()
                gradients += self._flat(segments, found[len(segments) :])
        self.losses += torch.where(self._valid > 0, losses.detach().double(), 0.0)
        gradients = self._rules.corrected(
            traits.rules, gradients, self.parameters, self._lr, self._steps_done
        )
        self._optimizer.step(
            self.parameters,
            gradients,
            self._remembered,
            self._lr,
            self._learns,
            self._valid,
            self.program.kernels,
            () if traits.levels else self._used(traits) or (),
        )
        self._steps_done += 1

    def _losses_of(self, outputs: Any, labels: Tensor, traits: _Traits) -> Tensor:
        if traits.calibrated:
            outputs = lowered(outputs, self._margins)
        return self._loss(outputs, labels, self._valid, self._counts)

    def _taught(
        self,
        losses: Tensor,
        outputs: Tensor,
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        step: StepContext,
        traits: _Traits,
    ) -> Tensor:
        """The losses with what teachers say about ``outputs``, and with those of the teachers."""
        assert self.levels is not None
        teaching = replace(
            step,
            leaves=self._leaves,
            weights=self._frozen.weights(self._leaves, self._roles, None),
            statistics=self.levels.statistics_of_held(),
            steps_done=self.levels.steps_done(of_held=True),
            channels=self.levels.channels(of_held=True) if step.channels else {},
            table=None,
            measured=None,  # a teacher says nothing about scales
        )
        teacher = self.program(inputs, teaching)
        part = self.levels.distillation()
        apart = distance(outputs, teacher, self._valid, part > 0)
        own = self._losses_of(teacher, labels, traits)
        return (1 - part) * losses + part * apart + torch.where(part > 0, own, 0.0)

    def _flat(self, segments: list[Segment], found: Sequence[Tensor | None]) -> Tensor:
        parts, size = [], self.parameters.shape[1]
        ends = [segment.start for segment in segments[1:]] + [size]
        for segment, gradient, end in zip(segments, found, ends, strict=True):
            if gradient is None:
                # Like PyTorch's optimizers, leave alone what no gradient reaches: no decay either.
                self._unused.add(segment)
                self._learns[:, segment.start : segment.stop] = False
                parts.append(self.parameters.new_zeros(self.devices, segment.stop - segment.start))
            else:
                parts.append(gradient.reshape(self.devices, -1))
            if segment.stop < end:
                parts.append(self._nothing[:, : end - segment.stop])
        return torch.cat(parts, 1)

    def _used(self, traits: _Traits) -> tuple[Tensor, ...] | None:
        """What layers compute with, as rows; None where that is what learns."""
        if traits.levels:
            # Each step has other parameters, in place of those that were taken.
            own, narrowed = self._own, self.levels.parameters if self.levels else self.parameters
            used = (torch.where(own, narrowed, row) for row in self._frozen.used)
            return tuple(used) if traits.folds else None
        return self._frozen.used if traits.folds or self._frozen.is_narrow else None

    def _context(
        self, leaves: Mapping[Segment, Tensor], traits: _Traits, measures: bool
    ) -> StepContext:
        at_levels = self.levels if traits.levels else None
        return StepContext(
            kernels=self.program.kernels,
            roles=self._roles,
            valid=self._valid,
            batch=self.batch,
            leaves=leaves,
            weights=self._frozen.weights(leaves, self._roles, self._used(traits)),
            statistics=self._tracked,
            frozen_norms=self._frozen.norms,
            steps_done=self._steps_done if at_levels is None else at_levels.steps_done(),
            late=None if self._beside is None else (self._beside, self.program.read_once),
            averages=traits.averages,
            table=self._rounding.table(traits.points),
            on_the_fly=traits.on_the_fly,
            channels=self.levels.channels() if traits.narrow and self.levels is not None else {},
            modes=self._modes,
            counts=self._counts,
            measured=self.measured if measures else None,
            places=self.program.sites.place,
            measures=self._last if measures else None,
        )
