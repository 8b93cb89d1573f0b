"""Training a narrower network: what HeteroFL's and FjORD's devices do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.chain import BlockChain, split
from cocofl.fl.batches import Ints
from cocofl.fl.local import Task, Workshop, parameter_keys
from cocofl.fl.merge import Contribution, State
from cocofl.freeze import FrozenNet, freeze
from cocofl.freeze.layout import channels_first
from cocofl.freeze.lowering import lower
from cocofl.span import Span

STATISTICS_PREFIX = "widths."


@dataclass(frozen=True)
class WidthWork:
    """HeteroFL: train the network at one width, BatchNorm with batch statistics only.

    ``scaler`` divides what narrowed layers put out by the width, so that a narrow network's
    activations are as large as the full one's. ``masked`` leaves classes that the device does not
    have out of its loss and out of the merge of the classifier.
    """

    width: float
    scaler: bool = False
    masked: bool = False

    def __str__(self) -> str:
        return f"{self.width:g}"

    def train(self, workshop: Workshop, task: Task, state: State) -> Contribution:
        """One device's local training; it sends parameters, and no statistics."""
        narrow = _at_places(state, workshop, self.width)
        if self.scaler and self.width < 1.0:
            chain = _scaled_chain(workshop, self.width)
            net = freeze(chain, Span(0, len(chain)), variant="f", state=narrow)
        else:
            net = workshop.whole_network(narrow, self.width)
        net.train()
        present = self.present(workshop, task)
        losses = self._losses(net, workshop, task, present)
        loss = workshop.recipe.descend(net.parameters(), losses, task.lr)
        learned = parameter_keys(workshop.model(self.width))
        sent = {key: t for key, t in net.update().tensors.items() if key in learned}
        rows = {} if present is None else dict.fromkeys(classifier_keys(workshop), present)
        return Contribution(sent, len(task.indices), loss, self.width, rows)

    def present(self, workshop: Workshop, task: Task) -> Ints | None:
        """The classes that a device has; None where all count."""
        return np.unique(workshop.materials.train.labels[task.indices]) if self.masked else None

    def _losses(
        self, net: FrozenNet, workshop: Workshop, task: Task, present: Ints | None
    ) -> Iterator[Tensor]:
        for inputs, labels in workshop.load(task):
            scores = net(inputs)
            if present is not None:
                # As in HeteroFL: the scores of absent classes become 0, and get no gradient.
                mask = torch.zeros(scores.shape[-1])
                mask[torch.from_numpy(present)] = 1.0
                scores = scores * mask
            yield workshop.loss(scores, labels)


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

    def train(self, workshop: Workshop, task: Task, state: State) -> Contribution:
        """One device's local training; it sends parameters, and statistics of the widths drawn."""
        widest = self.widths[-1]
        narrow = _at_places(state, workshop, widest)
        parameters = {
            key: nn.Parameter(narrow[key].clone())
            for key, _ in workshop.model(widest).named_parameters()
        }
        buffers: dict[float, State] = {}

        def scores(width: float, inputs: Tensor) -> Tensor:
            if width not in buffers:
                buffers[width] = _own_statistics(workshop.model(width), state, width)
            places = workshop.places(width, widest)
            sliced = {key: p[places[key]] for key, p in parameters.items()}
            model = workshop.model(width).train()
            if not all(block.channels_last for block in lower(workshop.chain(width))):
                inputs = channels_first(inputs)
            result: Tensor = torch.func.functional_call(model, {**sliced, **buffers[width]}, inputs)
            return result

        losses = self._losses(workshop, task, scores)
        loss = workshop.recipe.descend(parameters.values(), losses, task.lr)
        keys = parameter_keys(workshop.model(widest)).items()
        sent = {key: parameters[first].detach() for key, first in keys}
        for width, own in buffers.items():
            # What is counted, like mini-batches or positions, is no statistic.
            floats = {key: t for key, t in own.items() if t.is_floating_point()}
            sent |= {statistics_key(key, width): t for key, t in floats.items()}
        return Contribution(sent, len(task.indices), loss, widest)

    def draws(self, task: Task) -> Iterator[float]:
        """The width of each mini-batch."""
        rng = task.rng("widths")
        while True:
            yield self.widths[int(rng.integers(len(self.widths)))]

    def _losses(self, workshop: Workshop, task: Task, scores: Any) -> Iterator[Tensor]:
        for (inputs, labels), width in zip(workshop.load(task), self.draws(task), strict=False):
            student = scores(width, inputs)
            loss = workshop.loss(student, labels)
            if self.distillation and width < self.widths[-1]:
                teacher = scores(self.widths[-1], inputs)
                distance = F.kl_div(
                    F.log_softmax(student, -1),
                    F.log_softmax(teacher.detach(), -1),
                    reduction="batchmean",
                    log_target=True,
                )
                alpha = self.distillation
                loss = (1 - alpha) * loss + alpha * distance + workshop.loss(teacher, labels)
            yield loss


def _at_places(state: Mapping[str, Tensor], workshop: Workshop, width: float) -> State:
    """The part of the server's state that the network at a width has."""
    return {key: state[key][at] for key, at in workshop.places(width).items() if key in state}


def statistics_key(key: str, width: float) -> str:
    """Under which name the server has a norm statistic of a width."""
    return key if width == 1.0 else f"{STATISTICS_PREFIX}{width:g}.{key}"


def _own_statistics(model: nn.Module, state: Mapping[str, Tensor], width: float) -> State:
    """The server's statistics of a width, or fresh ones where nobody has trained it yet."""
    learned = parameter_keys(model)
    return {
        key: state.get(statistics_key(key, width), buffer).clone()
        for key, buffer in model.state_dict().items()
        if key not in learned
    }


def classifier_keys(workshop: Workshop) -> list[str]:
    """The tensors of the last layer with one row per class."""
    classes = workshop.materials.train.facts.num_classes
    layers = [
        name
        for name, module in workshop.model().named_modules()
        if isinstance(module, nn.Linear) and module.out_features == classes
    ]
    return [f"{layers[-1]}.weight", f"{layers[-1]}.bias"] if layers else []


_SCALED: WeakKeyDictionary[Workshop, dict[float, BlockChain]] = WeakKeyDictionary()


def _scaled_chain(workshop: Workshop, width: float) -> BlockChain:
    """The network at a width, its narrowed layers divided by the width while they train."""
    known = _SCALED.setdefault(workshop, {})
    if width not in known:
        model, inputs = workshop.materials.subject.build(width)
        for name in scaled_layers(model, workshop.model()):
            model.get_submodule(name).register_forward_hook(partial(_divide, width=width))
        known[width] = split(model, inputs)
    return known[width]


def scaled_layers(narrow: nn.Module, full: nn.Module) -> list[str]:
    """The layers that put out fewer channels than in the full network."""
    return [
        name
        for name, layer in narrow.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
        and layer.weight.shape[0] < full.get_parameter(f"{name}.weight").shape[0]
    ]


def _divide(layer: nn.Module, _inputs: Any, output: Tensor, *, width: float) -> Tensor | None:
    return output / width if layer.training else None
