"""The devices of a round as one computation.

A :class:`Cohort` has room for a number of devices and runs any devices, blocks and variants in
it: what differs between them are masks and numbers in its tensors, never the computation. So
the step can be captured once as a CUDA graph and replayed for all rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting
from cocofl.freeze import State
from cocofl.local_rule import LocalRule, LocalStep
from cocofl.numerics import HEADROOM
from cocofl.span import Blocks, Role, Span
from cocofl.vector.folding import FoldedLayer, fold_layers
from cocofl.vector.graphs import Graphs
from cocofl.vector.instructions import Layer
from cocofl.vector.levels import WHOLE, Levels
from cocofl.vector.losses import StackedLoss, cross_entropy, distance, of_classes
from cocofl.vector.maps import Weights
from cocofl.vector.optimizer import Optimizer, Sgd
from cocofl.vector.precision import Precision
from cocofl.vector.program import Program
from cocofl.vector.rounding import RoundingPlan, RoundingTable, Tap, region_ends
from cocofl.vector.run import Roles, Run
from cocofl.vector.slots import Slot
from cocofl.vector.streams import Beside

# Rounds after which the scales that are known count as settled.
_SETTLED = 3

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


class Rows(NamedTuple):
    """States as rows: (state, place). Scales are NaN where nobody has measured them."""

    parameters: Tensor
    statistics: Tensor
    scales: Tensor

    def clone(self) -> Rows:
        """A copy."""
        return Rows(*(rows.clone() for rows in self))

    def on_the_host(self) -> Rows:
        """The same in the memory of the CPU."""
        if not self.parameters.is_cuda:
            return self
        # A GPU writes to pinned memory by itself, and many times as fast.
        copies = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in self)
        host = Rows(
            *(copy.copy_(x, non_blocking=True) for copy, x in zip(copies, self, strict=True))
        )
        torch.cuda.current_stream().synchronize()
        return host

    @classmethod
    def below_each_other(cls, several: Sequence[Rows]) -> Rows:
        """All states of several."""
        return several[0] if len(several) == 1 else cls(*map(torch.cat, zip(*several, strict=True)))


@dataclass(frozen=True)
class _Traits:
    """What decides which computation a step is; all else are numbers in tensors."""

    folds: bool
    taps: frozenset[Tap]
    on_the_fly: frozenset[Tap]
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
    rules: tuple[LocalRule, ...] = ()
    """What is done to the gradients of some devices, in the order of their masks."""


class Cohort:
    """Room for ``devices`` devices with mini-batches of ``batch`` samples of one chain."""

    def __init__(
        self,
        chain: BlockChain,
        source: Source,
        *,
        devices: int,
        batch: int,
        on: torch.device | str = "cpu",
        optimizer: Optimizer | None = None,
        loss: StackedLoss = cross_entropy,
        precision: str = "tf32",
        headroom: float = HEADROOM,
        capture: bool = True,
        program: Program | None = None,
    ) -> None:
        self.on = torch.device(on)
        self.devices, self.batch = devices, batch
        self._optimizer = Sgd() if optimizer is None else optimizer
        self._loss, self._source, self._headroom = loss, source, headroom
        self._precision = Precision.named(precision)
        self.program = Program(chain, self.on) if program is None else program
        self._constants = {key: chain.state_dict()[key] for key in self.program.slots.constants}
        slots, d = self.program.slots, devices

        def rows(width: int, value: float = 0.0, dtype: torch.dtype = slots.dtype) -> Tensor:
            return torch.full((d, width), value, dtype=dtype, device=self.on)

        self.parameters = rows(slots.parameters.size)
        self.statistics = rows(slots.statistics.size)
        self._remembered = self._optimizer.memory(self.parameters)
        self._rules = _RuleRows(self.parameters)
        self._leaves = {
            slot: slot.of(self.parameters).detach().requires_grad_()
            for slot in slots.parameters.all()
        }
        self._tracked = {slot: slot.of(self.statistics) for slot in slots.statistics.all()}
        self.levels: Levels | None = None
        self._block_of = slots.parameters.blocks().to(self.on)
        self._frozen = _FrozenRows(self.program, devices, self.on)
        self.measured = rows(len(self.program.sites.keys), torch.nan, torch.float32)

        def flags() -> Tensor:
            return torch.zeros(self.program.n_blocks, d, dtype=torch.bool, device=self.on)

        self._roles = Roles(flags(), flags(), flags(), flags())
        self._learns = torch.zeros(self.parameters.shape, dtype=torch.bool, device=self.on)
        self._own = torch.zeros_like(self._learns)
        self._nothing = rows(64)
        self._unused: set[Slot] = set()
        self._present = rows(self.program.scores or 0, 1.0)
        self._lr = torch.zeros(d, dtype=slots.dtype, device=self.on)
        self._indices = torch.zeros(d, batch, dtype=torch.long, device=self.on)
        self._valid = torch.zeros(d, dtype=torch.int32, device=self.on)
        self._last = torch.zeros(d, dtype=torch.bool, device=self.on)
        self._steps_done = torch.zeros(d, dtype=slots.dtype, device=self.on)
        self.losses = torch.zeros(d, dtype=torch.float64, device=self.on)
        self._beside = Beside() if self.on.type == "cuda" else None
        self._tables: dict[frozenset[Tap], RoundingTable] = {}
        self._region_ends = frozenset[int]()
        self._seen_known: Counter[tuple[frozenset[str], ...]] = Counter()
        self._graphs = Graphs(capture and self.on.type == "cuda" and self.program.is_capturable)

    @property
    def everything(self) -> Span:
        """The span of all blocks."""
        return Span(0, self.program.n_blocks)

    # States as rows

    def rows_of(self, states: Sequence[Mapping[str, Tensor]]) -> Rows:
        """States as rows on the cohort's device."""
        slots, sites = self.program.slots, self.program.sites
        scales = torch.full((len(states), len(sites.keys)), torch.nan)
        for row, state in zip(scales, states, strict=True):
            for key, place in sites.place.items():
                if key in state:
                    row[place] = state[key].item()
        return Rows(
            torch.stack([slots.parameters.pack(state, self.parameters) for state in states]),
            torch.stack([slots.statistics.pack(state, self.statistics) for state in states]),
            scales.to(self.on),
        )

    def state_of(self, rows: Rows, index: int = 0) -> State:
        """A state as ``freeze`` takes it; its tensors are parts of the rows."""
        slots, found = self.program.slots, State()
        for kind, own in ((slots.parameters, rows.parameters), (slots.statistics, rows.statistics)):
            seen: set[Slot] = set()
            for key, slot in kind.by_key.items():
                part = slot.of(own)[index]
                found[key] = part.clone() if slot in seen else part  # tied keys can be saved so
                seen.add(slot)
        return found | self._constants | self._scales_of(rows.scales[index])

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

    def _scales_of(self, row: Tensor) -> State:
        row = row.cpu()
        values, parts = row.tolist(), row.unbind()
        return {
            key: parts[place]
            for key, place in self.program.sites.place.items()
            if values[place] == values[place]
        }

    def rows_now(self, device: int) -> Rows:
        """What a device has learned, (1, place); until the cohort trains again."""
        here = slice(device, device + 1)
        return Rows(self.parameters[here], self.statistics[here], self.measured[here])

    def update(self, rows: Rows, work: DeviceWork) -> State:
        """What a device with these rows sends: tensors and scales of the blocks it trained."""
        slots, sent = self.program.slots, State()
        for kind, own in ((slots.parameters, rows.parameters), (slots.statistics, rows.statistics)):
            for key, slot in kind.by_key.items():
                if slot.block in work.blocks:
                    sent[key] = slot.of(own)[0].clone()
        for key, block in slots.constants.items():
            if block in work.blocks:
                sent[key] = self._constants[key].clone()
        return sent | self._scales_of(rows.scales[0])

    def statistics_at(self, levels: Sequence[int], device: int) -> dict[int, Tensor]:
        """By level, the statistics of a device's narrower networks; until the next training."""
        assert self.levels is not None or not levels
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
        traits = self._begin(states, known, works)
        traits = replace(traits, rules=self._rules.begin(self.parameters, works, memories))
        room = self.devices - len(works)
        traits = replace(
            traits,
            narrow=any(work.level is not None for work in works),
            masked=any(work.classes is not None for work in works),
        )
        if traits.masked:
            self._mark_present(works)
        if levels is not None:
            assert self.levels is not None
            distillation = [*(work.distillation for work in works), *[0.0] * room]
            traits = replace(traits, levels=True, distils=any(distillation))
            schedule = np.pad(levels[0], ((0, 0), (0, room)), constant_values=WHOLE)
            self.levels.begin(schedule, levels[1], self.statistics, distillation)
        counts = np.pad(valid, ((0, 0), (0, room)))
        finishing = (counts > 0) & (np.cumsum((counts > 0)[::-1], 0)[::-1] == 1)
        finishing &= np.array([*(work.variant == "qff" for work in works), *[False] * room])
        finishing_on_device = torch.from_numpy(finishing).to(self.on)
        modes = _modes(works, self.program.n_blocks, room)
        for step, host in self._load(indices, counts):
            self._last.copy_(finishing_on_device[step])
            if traits.levels and self.levels is not None:
                self.levels.go_to(step)
            measures = bool(finishing[step].any())
            self._graphs.run((traits, measures), partial(self._step, traits, measures, modes, host))
        taken = torch.from_numpy(np.maximum((counts > 0).sum(0), 1)).to(self.on)
        self.losses /= taken
        self._rules.end(traits.rules, self.parameters, self._lr, taken, self._learns)

    def _mark_present(self, works: Sequence[DeviceWork]) -> None:
        present = torch.ones(self._present.shape)
        for row, work in zip(present, works, strict=False):
            if work.classes is not None:
                row.zero_()
                row[list(work.classes)] = 1.0
        self._present.copy_(present)

    def measure_statistics(
        self, states: Rows, indices: NDArray[np.int64], valid: NDArray[np.int64]
    ) -> None:
        """Each norm's statistics as plain means over a device's mini-batches; nothing learns."""
        n = indices.shape[1]
        works = [DeviceWork(self.everything, "f", 0.0)] * n
        traits = replace(self._begin(states, [frozenset()], works), averages=True)
        room = self.devices - n
        modes = _modes(works, self.program.n_blocks, room)
        for _, host in self._load(indices, np.pad(valid, ((0, 0), (0, room)))):
            self._graphs.run(traits, partial(self._look, traits, modes, host))

    def _load(
        self, indices: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Iterator[tuple[int, list[int]]]:
        """Set one step's mini-batches after the other; its number, and the samples that count."""
        room = self.devices - indices.shape[1]
        samples = torch.from_numpy(np.pad(indices, ((0, 0), (0, room), (0, 0)))).to(self.on)
        valid = torch.from_numpy(counts.astype(np.int32)).to(self.on)
        for step in range(len(indices)):
            self._indices.copy_(samples[step])
            self._valid.copy_(valid[step])
            yield step, counts[step].tolist()

    def _look(self, traits: _Traits, modes: list[list[str]], counts: list[int]) -> None:
        with self._precision.active(), torch.no_grad():
            inputs, _ = self._source(self._indices)
            run = self._run(self._leaves, traits, False, modes, counts)
            self.program(tuple(self._precision.cast(x) for x in inputs), run)
        self._steps_done += 1

    def _begin(
        self, states: Rows, known: Sequence[frozenset[str]], works: Sequence[DeviceWork]
    ) -> _Traits:
        if len(works) > self.devices:
            raise InvalidSetting(f"{len(works)} devices in a cohort with room for {self.devices}")
        idle = DeviceWork(self.everything, "f", 0.0)
        everyone = [*works, *[idle] * (self.devices - len(works))]
        of_device = torch.tensor([work.state for work in everyone], device=self.on)
        self.parameters.copy_(states.parameters[of_device])
        self.statistics.copy_(states.statistics[of_device])
        self.measured.fill_(torch.nan)
        self.losses.zero_()
        self._steps_done.zero_()
        self._optimizer.begin(self._remembered)
        self._lr.copy_(torch.tensor([work.lr for work in everyone], dtype=self._lr.dtype))
        roles = _role_masks(everyone, self.program.n_blocks)
        for kind, mask in roles.items():
            getattr(self._roles, kind).copy_(torch.from_numpy(mask))
        self._learns.copy_(self._roles.trained.t()[:, self._block_of])
        self._own.copy_(self._roles.with_batch.t()[:, self._block_of])
        for slot in self._unused:
            self._learns[:, slot.start : slot.stop] = False
        if self.levels is not None:
            there = self.levels.hold([work.level for work in everyone])
            self.parameters.mul_(there)
            self._learns.logical_and_(there)

        folds = not bool(roles["with_batch"].all())
        if folds:
            self._frozen.fill(states, everyone, self._graphs)
        if not any(map(self._rounds, works)):
            return _Traits(folds, frozenset(), frozenset())
        return self._begin_rounding(states, known, everyone, folds)

    def _rounds(self, work: DeviceWork) -> bool:
        """Whether a device rounds anything at all."""
        return work.variant == "qff" and len(work.blocks) < self.program.n_blocks

    def _begin_rounding(
        self,
        states: Rows,
        known: Sequence[frozenset[str]],
        works: Sequence[DeviceWork],
        folds: bool,
    ) -> _Traits:
        rounder = self.program.rounder
        settled = tuple(dict.fromkeys(known[work.state] for work in works if self._rounds(work)))
        self._seen_known[settled] += 1
        if self._seen_known[settled] < _SETTLED:
            # In the first rounds new scales become known every time. One computation that can
            # scale anything on the fly serves them all, so that not each has to be captured.
            settled = (frozenset(), frozenset(self.program.sites.keys), *settled)
        for work in works:
            self._region_ends |= region_ends(work.blocks, self.program.n_blocks)
        possible = [rounder.possible(one, self._region_ends) for one in settled]
        taps = frozenset[Tap]().union(*(taps for taps, _ in possible))
        on_the_fly = frozenset[Tap]().union(*(fly for _, fly in possible))
        if taps not in self._tables:
            self._tables[taps] = RoundingTable(taps, self.devices, self.on, self.program.sites)
        table = self._tables[taps]
        plans = [
            table.plan(rounder, work.blocks if work.variant == "qff" else None, known[work.state])
            for work in works
        ]
        of_device = torch.tensor([work.state for work in works], device=self.on)
        table.fill(RoundingPlan.stack(plans), states.scales[of_device], self._headroom)
        return _Traits(folds, taps, on_the_fly)

    # A step

    def _step(
        self, traits: _Traits, measures: bool, modes: list[list[str]], counts: list[int]
    ) -> None:
        with self._precision.active(), torch.enable_grad():
            inputs, labels = self._source(self._indices)
            inputs = tuple(self._precision.cast(x) for x in inputs)
            leaves = self._leaves
            if traits.levels and self.levels is not None:
                leaves = self.levels.narrowed(self.parameters, self.statistics)
            run = self._run(leaves, traits, measures, modes, counts)
            outputs = self.program(inputs, run)
            if traits.masked:
                outputs = of_classes(outputs, self._present)
            losses = self._loss(outputs, labels, self._valid, counts)
            slots, read = list(leaves), list(leaves.values())
            if traits.distils:
                losses = self._taught(losses, outputs, inputs, labels, run)
                read += self._leaves.values()
            found = torch.autograd.grad(losses.sum(), read, allow_unused=True)
        if self._beside is not None:
            self._beside.join()
        gradients = self._flat(slots, found[: len(slots)])
        if traits.levels and self.levels is not None:
            self.levels.settle(gradients, self.statistics)
        if traits.distils and self.levels is not None:
            self.levels.settle_held()
            gradients += self._flat(slots, found[len(slots) :])
        self.losses += torch.where(self._valid > 0, losses.detach().double(), 0.0)
        gradients = self._rules.corrected(
            traits.rules, gradients, self.parameters, self._lr, self._steps_done
        )
        self._optimizer.step(
            self.parameters, gradients, self._remembered, self._lr, self._learns, self._valid
        )
        self._steps_done += 1

    def _taught(
        self,
        losses: Tensor,
        outputs: Tensor,
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        run: Run,
    ) -> Tensor:
        """The losses with what teachers say about ``outputs``, and with those of the teachers."""
        assert self.levels is not None
        teaching = replace(
            run,
            leaves=self._leaves,
            weights=self._frozen.weights(self.parameters, self._leaves, self._roles, None),
            statistics=self.levels.statistics_of_held(),
            steps_done=self.levels.steps_done_by_held(),
            channels=self.levels.channels_of_held() if run.channels else {},
            table=None,
            measured=None,  # a teacher says nothing about scales
        )
        teacher = self.program(inputs, teaching)
        part = self.levels.distillation()
        apart = distance(outputs, teacher, self._valid, part > 0)
        own = self._loss(teacher, labels, self._valid, run.counts)
        return (1 - part) * losses + part * apart + torch.where(part > 0, own, 0.0)

    def _flat(self, slots: list[Slot], found: Sequence[Tensor | None]) -> Tensor:
        parts, size = [], self.parameters.shape[1]
        ends = [slot.start for slot in slots[1:]] + [size]
        for slot, gradient, end in zip(slots, found, ends, strict=True):
            if gradient is None:
                # Like PyTorch's optimizers, leave alone what no gradient reaches: no decay either.
                self._unused.add(slot)
                self._learns[:, slot.start : slot.stop] = False
                parts.append(self.parameters.new_zeros(self.devices, slot.stop - slot.start))
            else:
                parts.append(gradient.reshape(self.devices, -1))
            if slot.stop < end:
                parts.append(self._nothing[:, : end - slot.stop])
        return torch.cat(parts, 1)

    def _run(
        self,
        leaves: Mapping[Slot, Tensor],
        traits: _Traits,
        measures: bool,
        modes: list[list[str]],
        counts: list[int],
    ) -> Run:
        own = self._own if traits.folds else None
        at_levels = self.levels if traits.levels else None
        parameters = self.parameters if at_levels is None else at_levels.parameters
        return Run(
            roles=self._roles,
            valid=self._valid,
            batch=self.batch,
            leaves=leaves,
            weights=self._frozen.weights(parameters, leaves, self._roles, own),
            statistics=self._tracked,
            frozen_factors=self._frozen.factors,
            frozen_offsets=self._frozen.offsets,
            steps_done=self._steps_done if at_levels is None else at_levels.steps_done(),
            late=None if self._beside is None else (self._beside, self.program.read_once),
            averages=traits.averages,
            table=self._tables[traits.taps] if traits.taps else None,
            on_the_fly=traits.on_the_fly,
            channels=self.levels.channels() if traits.narrow and self.levels is not None else {},
            modes=modes,
            counts=counts,
            measured=self.measured if measures else None,
            places=self.program.sites.place,
            measures=self._last if measures else None,
        )


class RuleMemory(NamedTuple):
    """What a rule reads on one device, by name: rows of parameters."""

    server: Mapping[str, Tensor]
    device: Mapping[str, Tensor]


class _RuleRows:
    """What rules of local training read and write, in tensors that stay where they are."""

    def __init__(self, parameters: Tensor) -> None:
        self._like = parameters
        self._start: Tensor | None = None
        self._masks: dict[LocalRule, Tensor] = {}
        self._server: dict[str, Tensor] = {}
        self._device: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    def begin(
        self, start: Tensor, works: Sequence[DeviceWork], memories: Sequence[RuleMemory]
    ) -> tuple[LocalRule, ...]:
        """Set up a round; the rules that some device has."""
        rules = tuple(dict.fromkeys(work.rule for work in works if work.rule is not None))
        self.kept = {}
        if not rules:
            return rules
        if self._start is None:
            self._start = torch.empty_like(start)
        self._start.copy_(start)
        for rule in rules:
            has_it = torch.tensor([work.rule == rule for work in works], device=start.device)
            mask = self._masks.setdefault(rule, has_it.new_zeros(len(start), 1))
            mask.zero_()
            mask[: len(works), 0] = has_it
            for names, kind in ((rule.server_memory, "server"), (rule.device_memory, "device")):
                for name in names:
                    self._fill(kind, name, [getattr(memory, kind) for memory in memories])
        return rules

    def _fill(self, kind: str, name: str, memories: Sequence[Mapping[str, Tensor]]) -> None:
        rows = (self._server if kind == "server" else self._device).setdefault(
            name, torch.zeros_like(self._like)
        )
        rows.zero_()
        for row, memory in zip(rows, memories, strict=False):
            if name in memory:
                row.copy_(memory[name])

    def corrected(
        self,
        rules: Sequence[LocalRule],
        gradients: Tensor,
        parameters: Tensor,
        lr: Tensor,
        steps: Tensor,
    ) -> Tensor:
        """The gradients that devices go by."""
        for rule in rules:
            step = self._step(gradients, parameters, lr, steps)
            gradients = torch.where(self._masks[rule], rule.correct(step), gradients)
        return gradients

    def end(
        self,
        rules: Sequence[LocalRule],
        parameters: Tensor,
        lr: Tensor,
        steps: Tensor,
        learns: Tensor,
    ) -> None:
        """Let devices remember; of what they did not train, what they knew."""
        for rule in rules:
            end = self._step(torch.zeros_like(parameters), parameters, lr, steps)
            for name, value in rule.remember(end).items():
                before = self.kept.get(name, self._device[name])
                self.kept[name] = torch.where(self._masks[rule] & learns, value, before)

    def _step(self, gradients: Tensor, parameters: Tensor, lr: Tensor, steps: Tensor) -> LocalStep:
        assert self._start is not None
        columns = lr[:, None], steps.to(parameters.dtype)[:, None]
        return LocalStep(
            parameters, self._start, gradients, *columns, server=self._server, device=self._device
        )


class _FrozenRows:
    """What the devices' frozen layers compute with, in tensors that stay where they are."""

    def __init__(self, program: Program, devices: int, on: torch.device) -> None:
        self._program, self._devices = program, devices
        slots = program.slots
        layers = [i for i in program.layers if isinstance(i, Layer) and i.weight is not None]
        users: dict[Slot, list[Layer]] = {}
        for layer in layers:
            assert layer.weight is not None
            users.setdefault(layer.weight, []).append(layer)
        self._layers = layers
        shape = devices, slots.parameters.size
        self._forward = torch.zeros(shape, dtype=slots.dtype, device=on)
        self._backward = torch.zeros(shape, dtype=slots.dtype, device=on)
        # A weight that several layers share is folded differently for each.
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        for slot, sharing in users.items():
            for layer in sharing[1:]:
                made = [
                    torch.zeros(devices, *slot.shape, dtype=slots.dtype, device=on) for _ in "fb"
                ]
                self._shared[layer.name] = made[0], made[1]
        self._states: dict[int, Rows] = {}  # where captured folding finds them
        self._picks = torch.zeros(devices, dtype=torch.long, device=on)
        self.factors: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        for normed in program.layers:
            if normed.norm is not None:
                channels = _channels(normed.norm.mean, normed.norm.weight)
                self.factors[normed.name] = torch.ones(
                    devices, channels, dtype=slots.dtype, device=on
                )
                self.offsets[normed.name] = torch.zeros(
                    devices, channels, dtype=slots.dtype, device=on
                )

    def fill(self, states: Rows, works: Sequence[DeviceWork], graphs: Graphs) -> None:
        """Fold, quantize, and give each device what its variant asks for."""
        quantized = any(work.variant == "qff" for work in works)
        n = len(states.parameters)
        if n not in self._states:
            self._states[n] = Rows(*(torch.empty_like(rows) for rows in states))
        own = self._states[n]
        own.parameters.copy_(states.parameters)
        own.statistics.copy_(states.statistics)
        picks = [work.state + n * (work.variant == "qff") for work in works]
        self._picks.copy_(torch.tensor(picks))
        graphs.run(("fold", n, quantized), partial(self._fold, own, quantized))

    def _fold(self, states: Rows, quantized: bool) -> None:
        folded = fold_layers(
            self._program.layers, states.parameters, states.statistics, quantized=quantized
        )
        index = self._picks
        self._fill_weights(folded, states, index)
        for name, own in self.factors.items():
            one = folded[name]
            if one.floats.factor is not None and one.codes.factor is not None:
                own.copy_(torch.cat([one.floats.factor, one.codes.factor])[index])
        for name, own in self.offsets.items():
            one = folded[name]
            if one.floats.offset is not None and one.codes.offset is not None:
                own.copy_(torch.cat([one.floats.offset, one.codes.offset])[index])

    def _fill_weights(self, folded: dict[str, FoldedLayer], states: Rows, index: Tensor) -> None:
        # All layers into one row per state and variant first: two gathers instead of two a layer.
        forward = states.parameters.repeat(2, 1)
        backward = forward.clone()
        n = len(states.parameters)
        for layer in self._layers:
            one = folded[layer.name]
            pairs = ((one.floats, slice(0, n)), (one.codes, slice(n, 2 * n)))
            if layer.name in self._shared:
                for own, way in zip(self._shared[layer.name], ("forward", "backward"), strict=True):
                    own.copy_(torch.cat([getattr(f, way) for f, _ in pairs])[index])
                continue
            assert layer.weight is not None
            for f, rows in pairs:
                assert f.forward is not None
                assert f.backward is not None
                layer.weight.of(forward)[rows] = f.forward
                layer.weight.of(backward)[rows] = f.backward
        self._forward.copy_(forward[index])
        self._backward.copy_(backward[index])

    def weights(
        self,
        parameters: Tensor,
        leaves: Mapping[Slot, Tensor],
        roles: Roles,
        own: Tensor | None,
    ) -> dict[str, Weights]:
        """Each layer's weights: a device's own where ``own``, else what was folded for it."""
        found = {}
        if own is not None:
            forward = torch.where(own, parameters, self._forward)
            backward = torch.where(own, parameters, self._backward)
        for layer in self._layers:
            assert layer.weight is not None
            leaf = leaves[layer.weight]
            if own is None:
                found[layer.name] = Weights(leaf, leaf.detach(), leaf.detach())
            elif layer.name in self._shared:
                mine = roles.with_batch[layer.block].view(-1, *[1] * (leaf.ndim - 1))
                used = [torch.where(mine, leaf.detach(), f) for f in self._shared[layer.name]]
                found[layer.name] = Weights(leaf, used[0], used[1])
            else:
                found[layer.name] = Weights(
                    leaf, layer.weight.of(forward), layer.weight.of(backward)
                )
        return found


def _channels(*slots: Slot | None) -> int:
    for slot in slots:
        if slot is not None:
            return slot.shape[0]
    return 1


def _role_masks(works: Sequence[DeviceWork], n_blocks: int) -> dict[str, NDArray[np.bool_]]:
    """The fields of :class:`Roles`, by block and device."""
    roles = np.array([[r.value for r in work.blocks.roles(n_blocks)] for work in works]).T
    trained, reached = roles == Role.TRAINED.value, roles != Role.FROZEN.value
    variants = np.array([work.variant for work in works])
    return {
        "trained": trained,
        "reached": reached,
        "with_batch": trained | (variants == "f"),
        "quantized": ~trained & (variants == "qff"),
    }


def _modes(works: Sequence[DeviceWork], n_blocks: int, room: int) -> list[list[str]]:
    """How blocks that run device by device are set: trained, with still statistics, or frozen."""

    def mode(work: DeviceWork, block: int) -> str:
        if work.blocks.role(block) is Role.TRAINED:
            return "trained"
        return "still" if work.variant == "f" else "frozen"

    return [[*(mode(w, block) for w in works), *["frozen"] * room] for block in range(n_blocks)]
