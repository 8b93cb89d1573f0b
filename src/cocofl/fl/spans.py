"""Training some blocks: what CoCoFL's devices do, and, with all blocks, FedAvg's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor, nn

from cocofl.errors import InvalidSetting
from cocofl.fl.stacked import StackedNetworks, StackedWork
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.trainer import Task, Trainer
from cocofl.freeze import FLOAT32, FrozenNet, freeze
from cocofl.local_rule import LocalRule, LocalStep
from cocofl.span import Blocks
from cocofl.vector import DeviceWork


@dataclass(frozen=True)
class SpanWork:
    """Train ``blocks``; freeze the others as ``variant`` says; descend as ``rule`` says, if any.

    ``steps`` is how many mini-batches it trains on, if not all.
    """

    blocks: Blocks
    variant: str = "qff"
    rule: LocalRule | None = None
    _: KW_ONLY
    lr_factor: float = 1.0
    """By what the round's learning rate is multiplied."""
    steps: int | None = None
    checkpoint: bool = False
    """Whether trained blocks are computed again in backward; a cohort, whose numbers are the same,
    does not."""
    precision: str = FLOAT32
    """Or ``bfloat16``, in which trained blocks are computed on a CPU."""

    def __str__(self) -> str:
        return str(self.blocks)

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends the trained blocks only."""
        task = replace(task, lr=self.lr_factor * task.lr)
        net = freeze(
            trainer.chain(),
            self.blocks,
            variant=self.variant,
            backend=trainer.spec.backend,
            state=state.tensors,
            plan=trainer.kernels,
            calibrate=trainer.calibrates,
            checkpoint=self.checkpoint,
            precision=self.precision,
            state_is_checked=True,
        )
        net.train()
        named = {
            key: p
            for block in net.trained
            for key, p in block.named_parameters()
            if p.requires_grad
        }
        ruled = None if self.rule is None else RuleAtWork(self.rule, named, task, state)
        losses = self._losses(net, trainer, task)
        hooks = () if ruled is None else (ruled.correct, ruled.settle)
        loss = trainer.training.descend(named.values(), losses, task.lr, *hooks)
        sent, samples = net.update().tensors, len(task.indices)
        if ruled is None:
            return Contribution(sent, samples, loss)
        kept = len(ruled.rule.device_memory) * sum(p.nbytes for p in named.values())
        size = kept + sum(t.nbytes for t in sent.values()) - ruled.unsent_bytes
        return Contribution(sent, samples, loss, memory=ruled.remembered(), sent_bytes=size)

    def _losses(self, net: FrozenNet, trainer: Trainer, task: Task) -> Iterator[Tensor]:
        last = len(trainer.batches(task)) - 1
        for i, (inputs, labels) in enumerate(trainer.load(task)):
            if i == last and self.variant == "qff":
                net.measure_scales()  # for those who will have these blocks frozen
            yield trainer.loss(net(inputs), labels)

    def stacked(self, networks: StackedNetworks, task: Task) -> StackedWork:
        """Every cohort can do this; it has a precision of its own."""
        del networks
        if self.precision != FLOAT32:
            raise InvalidSetting(
                f"strategy.precision is {self.precision!r}, which is for processes on CPUs; leave "
                'it out and say engine.precision = "bf16", or set engine.kind to serial'
            )
        lr = self.lr_factor * task.lr
        return StackedWork(DeviceWork(self.blocks, self.variant, lr, rule=self.rule))


class RuleAtWork:
    """A :class:`~cocofl.local_rule.LocalRule` on the parameters of one device, one by one."""

    def __init__(
        self, rule: LocalRule, named: dict[str, nn.Parameter], task: Task, state: ServerState
    ) -> None:
        self.rule, self._named, self._lr, self._steps = rule, named, task.lr, 0
        self._start = {key: p.detach().clone() for key, p in named.items()}
        server = {name: state.memory.get(name, {}) for name in rule.server_memory}
        device = {name: task.memory.get(name, {}) for name in rule.device_memory}
        self._server, self._device = server, device
        self._stays: Tensors = {}
        for key, parameter in named.items():
            stays = rule.stays(self._step(key, torch.zeros_like(parameter)))
            if stays is not None:
                self._stays[key] = stays.expand_as(parameter)

    def correct(self) -> None:
        """Put right the gradients of a step that is about to be taken."""
        for key, parameter in self._named.items():
            if parameter.grad is not None:
                parameter.grad = self.rule.correct(self._step(key, parameter.grad))
                if key in self._stays:  # it is not to count where gradients are clipped
                    parameter.grad = parameter.grad.masked_fill(self._stays[key], 0.0)
        self._steps += 1

    def settle(self) -> None:
        """Put back what is to stay: weight decay and momentum have moved it."""
        for key, stays in self._stays.items():
            self._named[key].data[stays] = self._start[key][stays]

    @property
    def unsent_bytes(self) -> int:
        """What need not be sent, as the server has it."""
        sizes = (self._named[k].element_size() * int(m.sum()) for k, m in self._stays.items())
        return sum(sizes)

    def remembered(self) -> dict[str, Tensors]:
        """What the device remembers from now on."""
        kept: dict[str, Tensors] = {name: {} for name in self.rule.device_memory}
        for key, parameter in self._named.items():
            end = self._step(key, torch.zeros_like(parameter))
            for name, value in self.rule.remember(end).items():
                kept[name][key] = value.detach()
                if key in self._stays:
                    kept[name][key] = value.detach().where(~self._stays[key], end.device[name])
        # What it knows of blocks that it did not train now stays.
        return {name: {**self._device[name], **own} for name, own in kept.items()}

    def _step(self, key: str, gradient: Tensor) -> LocalStep:
        start = self._start[key]

        def of(memory: dict[str, Tensors]) -> Tensors:
            return {name: own.get(key, torch.zeros_like(start)) for name, own in memory.items()}

        return LocalStep(
            parameter=self._named[key].detach(),
            start=start,
            gradient=gradient,
            lr=self._lr,
            steps=float(self._steps),
            server=of(self._server),
            device=of(self._device),
        )
