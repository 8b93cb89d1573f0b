"""Training a narrower network: what HeteroFL's and FjORD's devices do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.chain.graphs import called_with
from cocofl.fl.batches import Ints
from cocofl.fl.stacked import (
    NotStacked,
    StackedNetworks,
    StackedWork,
    Window,
    classifier_keys,
    statistics_key,
)
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.trainer import Task, Trainer, norms_of, parameter_keys
from cocofl.freeze import FrozenNet, Network, freeze
from cocofl.freeze.layout import channels_first
from cocofl.span import Span
from cocofl.vector import DeviceWork


@dataclass(frozen=True)
class WidthWork:
    """HeteroFL: train the network at one width, BatchNorm with batch statistics only.

    ``scaler`` divides what narrowed layers put out by the width, so that a narrow network's
    activations are as large as the full one's. ``masked`` leaves classes that the device does not
    have out of its loss and out of the merge of the classifier. ``roll`` is the channel at which
    the narrower network begins in every layer: FedRolex moves it.
    """

    width: float
    scaler: bool = False
    masked: bool = False
    roll: int = 0

    def __str__(self) -> str:
        return f"{self.width:g}"

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends parameters, and no statistics."""
        narrow = _at_places(state.tensors, trainer, self.width, self.roll)
        if self.scaler and self.width < 1.0:
            chain = trainer.scaled_chain(self.width)
            net = freeze(chain, Span(0, len(chain)), variant="f", state=narrow)
        else:
            net = trainer.whole_network(narrow, self.width)
        net.train()
        present = self.present(trainer, task)
        losses = self._losses(net, trainer, task, present)
        loss = trainer.training.descend(net.parameters(), losses, task.lr)
        learned = parameter_keys(trainer.model(self.width))
        sent = {key: t for key, t in net.update().tensors.items() if key in learned}
        rows = {} if present is None else dict.fromkeys(classifier_keys(trainer), present)
        return Contribution(sent, len(task.indices), loss, self.width, rows, roll=self.roll)

    def present(self, trainer: Trainer, task: Task) -> Ints | None:
        """The classes that a device has; None where all count."""
        if not self.masked:
            return None
        labels = np.unique(trainer.spec.train.labels[task.indices])
        return np.asarray(labels[labels >= 0])

    def _losses(
        self, net: FrozenNet, trainer: Trainer, task: Task, present: Ints | None
    ) -> Iterator[Tensor]:
        for inputs, labels in trainer.load(task):
            scores = net(inputs)
            if present is not None:
                # As in HeteroFL: the scores of absent classes become 0, and get no gradient.
                mask = torch.zeros(scores.shape[-1])
                mask[torch.from_numpy(present)] = 1.0
                scores = scores * mask
            yield trainer.loss(scores, labels)

    def stacked(self, networks: StackedNetworks, task: Task) -> StackedWork:
        """A level of the cohort, at which all steps are taken."""
        networks.check_widths((self.width,))
        if self.masked and not networks.gives_scores:
            raise NotStacked("masked losses need a network that returns scores of classes")
        level = networks.level(self.width, scaled=self.scaler)
        present = self.present(networks.trainer, task)
        classes = None if present is None else tuple(present.tolist())
        device = DeviceWork(networks.everything, "f", task.lr, level=level, classes=classes)
        # Factors other than 0 and 1 are multiplied into every step.
        window = Window(self.width, self.roll) if self.roll and self.width < 1.0 else None
        return StackedWork(device, steps_at=[level] if self.scaler else None, window=window)


@dataclass(frozen=True)
class StatisticsWork:
    """Measure the norms' statistics of the whole network on a device's data; nothing is trained.

    What HeteroFL's static BatchNorm asks of devices after training: means over mini-batches.
    """

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's statistics."""
        net = trainer.whole_network(state.tensors).eval()
        for norm in norms_of(net):
            norm.reset_running_stats()
            norm.train()
            norm.momentum = None  # the plain mean over all mini-batches
        with torch.no_grad():
            for inputs, _ in trainer.load(task):
                net(inputs)
        learned = parameter_keys(trainer.model())
        sent = {key: t for key, t in net.update().tensors.items() if key not in learned}
        return Contribution(sent, len(task.indices))

    def stacked(self, networks: StackedNetworks, task: Task) -> StackedWork:
        """A forward pass of its own, where nothing in the network runs device by device."""
        if not networks.program.is_capturable:
            raise NotStacked("a layer of the network runs device by device")
        device = DeviceWork(networks.everything, "f", task.lr)
        return StackedWork(device, sends_parameters=False)


@dataclass(frozen=True)
class OrderedWork:
    """FjORD: ordered dropout. Each mini-batch trains at one of the ``widths``, drawn at random.

    Every width has statistics of its own. With ``distillation`` above 0 the widest network is
    trained on each mini-batch, and teaches the drawn one: of that one's loss this share is its
    distance from the teacher.
    """

    widths: tuple[float, ...]
    distillation: float = 0.0

    def __str__(self) -> str:
        return f"{self.widths[-1]:g}"

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends parameters, and statistics of the widths drawn."""
        widest = self.widths[-1]
        narrow = _at_places(state.tensors, trainer, widest)
        parameters = {
            key: nn.Parameter(narrow[key].clone())
            for key, _ in trainer.model(widest).named_parameters()
        }
        buffers: dict[float, Tensors] = {}

        def scores(width: float, inputs: Tensor) -> Tensor:
            if width not in buffers:
                buffers[width] = own_statistics(trainer.model(width), state.tensors, width)
            places = trainer.places(width, within=widest)
            sliced = {key: p[places[key]] for key, p in parameters.items()}
            return narrow_scores(trainer, width, {**sliced, **buffers[width]}, inputs)

        losses = self._losses(trainer, task, scores)
        loss = trainer.training.descend(parameters.values(), losses, task.lr)
        keys = parameter_keys(trainer.model(widest)).items()
        # The server has a weight that several blocks share under its first key.
        sent = {key: parameters[first].detach() for key, first in keys if key in state.tensors}
        for width, own in buffers.items():
            # What is counted, like mini-batches or positions, is no statistic.
            floats = {key: t for key, t in own.items() if t.is_floating_point()}
            sent |= {statistics_key(key, width): t for key, t in floats.items()}
        return Contribution(sent, len(task.indices), loss, widest)

    def drawn_widths(self, task: Task) -> Iterator[float]:
        """The width of each mini-batch."""
        rng = task.rng("widths")
        while True:
            yield self.widths[int(rng.integers(len(self.widths)))]

    def stacked(self, networks: StackedNetworks, task: Task) -> StackedWork:
        """A level of the cohort for each width, at which steps are taken in turn."""
        networks.check_widths(self.widths)
        level = networks.level(self.widths[-1])
        device = DeviceWork(
            networks.everything, "f", task.lr, level=level, distillation=self.distillation
        )
        widths = islice(self.drawn_widths(task), len(networks.trainer.batches(task)))
        return StackedWork(device, [networks.level(one) for one in widths], sends_statistics=True)

    def _losses(self, trainer: Trainer, task: Task, scores: Any) -> Iterator[Tensor]:
        widths = self.drawn_widths(task)
        for (inputs, labels), width in zip(trainer.load(task), widths, strict=False):
            student = scores(width, inputs)
            loss = trainer.loss(student, labels)
            if self.distillation and width < self.widths[-1]:
                teacher = scores(self.widths[-1], inputs)
                distance = F.kl_div(
                    F.log_softmax(student, -1),
                    F.log_softmax(teacher.detach(), -1),
                    reduction="batchmean",
                    log_target=True,
                )
                alpha = self.distillation
                loss = (1 - alpha) * loss + alpha * distance + trainer.loss(teacher, labels)
            yield loss


def narrow_scores(
    trainer: Trainer, width: float, tensors: Mapping[str, Tensor], inputs: Tensor
) -> Tensor:
    """What the network at a width makes of inputs, in training, with these tensors for its own."""
    model, blocks = trainer.model(width).train(), Network.of(trainer.chain(width)).lowered.blocks
    if not all(block.channels_last for block in blocks):
        inputs = channels_first(inputs)
    result: Tensor = called_with(model, tensors, (inputs,))
    return result


def _at_places(
    state: Mapping[str, Tensor], trainer: Trainer, width: float, roll: int = 0
) -> Tensors:
    """The part of the server's state that the network at a width has."""
    where = trainer.places(width, roll)
    return {key: state[key][at] for key, at in where.items() if key in state}


def own_statistics(model: nn.Module, state: Mapping[str, Tensor], width: float) -> Tensors:
    """The server's statistics of a width, or fresh ones where nobody has trained it yet."""
    learned = parameter_keys(model)
    return {
        key: state.get(statistics_key(key, width), buffer).clone()
        for key, buffer in model.state_dict().items()
        if key not in learned
    }
