"""Where devices are trained: a workshop has the model at every width, and the data.

A strategy says what a device does in a round as a :class:`Work`; a :class:`Task` adds whose data,
which round and which learning rate; a :class:`Workshop` carries it out. The result is a function
of task and state alone, so it does not matter which process trains which device, or in what order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cocofl.chain import BlockChain, split
from cocofl.data import Split
from cocofl.errors import InvalidSetting
from cocofl.fl.batches import Ints, batch_stream, mini_batches, tensors
from cocofl.fl.merge import Contribution, State
from cocofl.fl.recipe import Recipe
from cocofl.freeze import FrozenNet, KernelPlan, freeze
from cocofl.models.widths import Place, places
from cocofl.profiling.subject import Inputs, Subject
from cocofl.rng import stream
from cocofl.span import Span

STATISTICS = ("running", "batch")


class Work(Protocol):
    """What a device does in a round. Works are values: they travel to worker processes."""

    def train(self, workshop: Workshop, task: Task, state: State) -> Contribution:
        """Train on the task's mini-batches, beginning with the server's state."""


@dataclass(frozen=True, eq=False)
class Task:
    """One device's part of one round."""

    seed: int
    round_index: int
    device: int
    indices: Ints
    """The device's samples."""
    work: Work
    lr: float

    def rng(self, purpose: str) -> np.random.Generator:
        """Randomness of this device in this round."""
        return stream(self.seed, purpose, self.round_index, self.device)


@dataclass(frozen=True, eq=False)
class Materials:
    """What a workshop is made of; they travel to worker processes as names and paths."""

    subject: Subject
    recipe: Recipe
    train: Split
    test: Split
    backend: str = "auto"

    def same_as(self, other: Materials) -> bool:
        """Whether a workshop made of these can do what one made of the others can."""
        return (self.subject, self.recipe, self.backend) == (
            other.subject,
            other.recipe,
            other.backend,
        ) and (self.train.path, self.test.path) == (other.train.path, other.test.path)


class Workshop:
    """Models by width, built and split once; the data; the kernel plan that all workshops obey."""

    def __init__(self, materials: Materials, plan: KernelPlan | None = None) -> None:
        self.materials, self.recipe = materials, materials.recipe
        self.plan = KernelPlan() if plan is None else plan
        self.loss = self.recipe.loss_function()
        self._checked: Mapping[str, Tensor] | None = None
        self._build = cache(self._build_at)
        self.chain = cache(self._chain_at)
        self.places = cache(self._places_of)

    def model(self, width: float = 1.0) -> nn.Module:
        """The plain network at a width; not to be changed."""
        return self._build(width)[0]

    def _build_at(self, width: float) -> tuple[nn.Module, Inputs]:
        return self.materials.subject.build(None if width == 1.0 else width)

    def _chain_at(self, width: float = 1.0) -> BlockChain:
        """The network at a width as a chain."""
        model, inputs = self._build(width)
        return model if isinstance(model, BlockChain) else split(model, inputs)

    def _places_of(self, width: float, within: float = 1.0) -> dict[str, Place]:
        """Where the tensors of the network at ``width`` lie in those of a wider one."""
        return places(self.model(within), self.model(width))

    def train(self, task: Task, state: State) -> Contribution:
        """Carry out a task."""
        # Dropout draws from PyTorch's global generator: make that the device's own.
        torch.manual_seed(int(task.rng("dropout").integers(2**63)))
        try:
            return task.work.train(self, task, state)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise one_sample_refused(task.device) from error

    def batches(self, task: Task) -> list[Ints]:
        """The samples of a task's mini-batches, in order."""
        recipe, rng = self.recipe, batch_stream(task.seed, task.round_index, task.device)
        return mini_batches(task.indices, recipe.batch, recipe.last_batch, recipe.epochs, rng)

    def load(self, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels, one mini-batch at a time."""
        return (tensors(self.materials.train, indices) for indices in self.batches(task))

    def whole_network(self, state: Mapping[str, Tensor], width: float = 1.0) -> FrozenNet:
        """The network at a width with nothing frozen; the state may have more than it needs."""
        chain = self.chain(width)
        own = {key: state[key] for key in chain.state_dict() if key in state}
        checked = self.has_checked(state)
        return freeze(chain, Span(0, len(chain)), variant="f", state=own, state_is_checked=checked)

    def has_checked(self, state: Mapping[str, Tensor]) -> bool:
        """Whether this very state, the server's, was used here before; from now on it was."""
        seen = self._checked is state
        self._checked = state
        return seen

    def resolve_plan(self, state: State) -> None:
        """Choose the kernel of every int8 operation: each block once frozen, once passing."""
        chain = self.chain()
        n = len(chain)
        for span in (Span(n - 1, n), Span(0, 1)) if n > 1 else ():
            freeze(chain, span, backend=self.materials.backend, state=state, plan=self.plan)

    def confusion(self, state: State, chunks: list[Ints], statistics: str) -> NDArray[np.int64]:
        """How often each true class (row) was taken for each class (column), on test samples."""
        net = self.whole_network(state).eval()
        if statistics == "batch":
            for norm in norms_of(net):
                norm.train()
                norm.momentum = 0.0
        classes = self.materials.test.facts.num_classes
        counts = np.zeros((classes, classes), np.int64)
        with torch.inference_mode():
            for indices in chunks:
                inputs, labels = tensors(self.materials.test, indices)
                guesses = net(inputs).flatten(0, -2)[:, :classes].argmax(1)
                np.add.at(counts, (labels.flatten().numpy(), guesses.numpy()), 1)
        return counts

    @property
    def has_norm_statistics(self) -> bool:
        """Whether a norm of the network keeps statistics, so that evaluation has a choice."""
        return any(norm.track_running_stats for norm in norms_of(self.model()))

    def statistics(self, task: Task, state: State) -> Contribution:
        """The norms' statistics of the whole network on a device's data, nothing trained.

        What HeteroFL's static BatchNorm asks of devices after training: means over mini-batches.
        """
        net = self.whole_network(state).eval()
        for norm in norms_of(net):
            norm.reset_running_stats()
            norm.train()
            norm.momentum = None  # the plain mean over all mini-batches
        with torch.no_grad():
            for inputs, _ in self.load(task):
                net(inputs)
        learned = parameter_keys(self.model())
        sent = {key: t for key, t in net.update().tensors.items() if key not in learned}
        return Contribution(sent, len(task.indices))


def one_sample_refused(device: int) -> InvalidSetting:
    """What is wrong with the mini-batches of a device."""
    return InvalidSetting(
        f"device {device} has a mini-batch of one sample, which leaves a BatchNorm of this network "
        'without a variance; set training.last_batch = "drop", or another training.batch, and give '
        "every device two samples or more"
    )


def norms_of(net: nn.Module) -> list[_NormBase]:
    """Its norms that keep statistics."""
    return [module for module in net.modules() if isinstance(module, _NormBase)]


def parameter_keys(net: nn.Module) -> dict[str, str]:
    """By key of a parameter the first key of the same one: a tied weight has several.

    >>> ends = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> ends[1].weight = ends[0].weight
    >>> parameter_keys(ends)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[nn.Parameter, str] = {}
    named = net.named_parameters(remove_duplicate=False)
    return {key: first.setdefault(parameter, key) for key, parameter in named}
