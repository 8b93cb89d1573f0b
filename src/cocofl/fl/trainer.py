"""Where devices are trained: a trainer has the model at every width, and the data.

A strategy says what a device does in a round as a :class:`Work`; a :class:`Task` adds whose data,
which round and which learning rate; a :class:`Trainer` carries it out. The result is a function
of task and state alone, so it does not matter which process trains which device, or in what order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cocofl.chain import BlockChain, split
from cocofl.data import Samples
from cocofl.errors import InvalidSetting
from cocofl.fl.batches import Ints, mini_batches, tensors
from cocofl.fl.codec import Upload, transmitted
from cocofl.fl.metrics import Sums, Tally
from cocofl.fl.state import Contribution, KeyLayout, Memory, ServerState
from cocofl.fl.training import Training, calibrated
from cocofl.freeze import AdaptedChain, FrozenNet, KernelPlan, freeze
from cocofl.models.widths import Place, places
from cocofl.profiling.subject import Inputs, Subject
from cocofl.rng import stream
from cocofl.span import Span


class Work(Protocol):
    """What a device does in a round. Works are values: they travel to worker processes.

    One that stops before its device's mini-batches end has an attribute ``steps``. One that many
    devices can do as a single computation has a method ``stacked(networks, task)``, too: it
    returns a :class:`cocofl.fl.stacked.StackedWork`.
    """

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
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
    memory: Memory = field(default_factory=dict)
    """What the device remembers of earlier rounds."""
    moment: int = 0
    """The round whose budget it was planned with."""

    @property
    def steps(self) -> int | None:
        """How many mini-batches it trains on; None for all."""
        return getattr(self.work, "steps", None)

    def rng(self, purpose: str) -> np.random.Generator:
        """Randomness of this device in this round."""
        return stream(self.seed, purpose, self.round_index, self.device)


@dataclass(frozen=True, eq=False)
class TrainerSpec:
    """What a trainer is made of; it travels to worker processes as names and paths."""

    subject: Subject
    training: Training
    train: Samples
    test: Samples
    backend: str = "auto"
    metrics: tuple[str, ...] = ("accuracy", "f1")
    upload: Upload = field(default_factory=Upload)


class Trainer:
    """Models by width, built and split once; the data; the kernel plan that all trainers obey."""

    def __init__(self, spec: TrainerSpec, kernels: KernelPlan | None = None) -> None:
        self.spec, self.training = spec, spec.training
        self.kernels = KernelPlan() if kernels is None else kernels
        self.calibrates = False
        """Whether a device measures scales that nobody has sent once, in its first mini-batch.

        A device in the field does, for speed; in a simulation they are made on the fly in every
        mini-batch, as a cohort does.
        """
        self.loss = self.training.loss_function()
        self.codec = spec.upload.made()
        self.tally = Tally(spec.metrics, spec.test.facts.num_classes)
        self._build = cache(self._build_at)
        self.chain = cache(self._chain_at)
        self.scaled_chain = cache(self._scaled_chain_at)
        # A window that rolls lies elsewhere in every round: only the last ones are kept.
        self.places = lru_cache(maxsize=64)(self._places_of)

    def model(self, width: float = 1.0) -> nn.Module:
        """The plain network at a width; not to be changed."""
        return self._build(width)[0]

    def _build_at(self, width: float) -> tuple[nn.Module, Inputs]:
        return self.spec.subject.build(None if width == 1.0 else width)

    def _chain_at(self, width: float = 1.0) -> BlockChain:
        """The network at a width as a chain."""
        model, inputs = self._build(width)
        chain = model if isinstance(model, BlockChain) else split(model, inputs)
        return self.spec.subject.adapted(chain)

    def _scaled_chain_at(self, width: float) -> BlockChain:
        """The network at a width, its narrowed layers divided by the width while they train."""
        model, inputs = self.spec.subject.build(width)
        for name in scaled_layers(model, self.model()):
            model.get_submodule(name).register_forward_hook(partial(_divide, width=width))
        return split(model, inputs)

    def _places_of(self, width: float, roll: int = 0, within: float = 1.0) -> dict[str, Place]:
        """Where the tensors of the network at ``width`` lie in those of a wider one."""
        return places(self.model(within), self.model(width), roll)

    def server_state(self, tensors: Mapping[str, Tensor]) -> ServerState:
        """A state of this network, in the memory of the CPU."""
        blocks = enumerate(self.chain().blocks)
        block_of = {key: index for index, block in blocks for key in block.state_dict()}
        layout = KeyLayout(self.places, self.learned, block_of)
        return ServerState.from_flat(tensors).placed(layout)

    @property
    def learned(self) -> frozenset[str]:
        """The keys of what can learn: all parameters, or adapters and the head."""
        by_block = self.chain().learned
        if by_block is None:
            return frozenset(parameter_keys(self.model()))
        return frozenset(key for own in by_block for key in own)

    def merged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A state under the model's own keys: adapters, if any, are a part of their weights."""
        chain = self.chain()
        return chain.merged(tensors) if isinstance(chain, AdaptedChain) else tensors

    def train(self, task: Task, state: ServerState) -> Contribution:
        """Carry out a task."""
        # Dropout draws from PyTorch's global generator: make that the device's own.
        torch.manual_seed(int(task.rng("dropout").integers(2**63)))
        try:
            sent = replace(task.work.train(self._for(task), task, state), device=task.device)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise one_sample_refused(task.device) from error
        return self.transmitted(sent, task, state)

    def _for(self, task: Task) -> Trainer:
        """The same with the loss of a device, where each has its own."""
        margins = self.margins(task)
        if margins is None:
            return self
        own = copy.copy(self)
        own.loss = calibrated(self.loss, torch.from_numpy(margins))
        return own

    def margins(self, task: Task) -> NDArray[np.float64] | None:
        """By how much a device's loss lowers the scores of each class; None where it does not."""
        if not self.training.calibration:
            return None
        train = self.spec.train
        return self.training.margins(train.labels[task.indices], train.facts.num_classes)

    def transmitted(self, sent: Contribution, task: Task, state: ServerState) -> Contribution:
        """A contribution as the server gets it."""
        if self.codec.is_exact:
            return sent
        places = {} if sent.width == 1.0 else self.places(sent.width, sent.roll)
        start = {
            key: state.tensors[key][places.get(key, ...)]
            for key in sent.tensors
            if key in state.tensors
        }
        memory = {name: state.layout.by_key(own) for name, own in task.memory.items()}
        return transmitted(self.codec, sent, start, task.rng("codec"), memory)

    def batches(self, task: Task) -> list[Ints]:
        """The samples of a task's mini-batches, in order."""
        training, rng = self.training, task.rng("batches")
        every = mini_batches(
            task.indices, training.batch, training.last_batch, training.epochs, rng
        )
        return every[: task.steps]

    def load(self, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels, one mini-batch at a time."""
        return (tensors(self.spec.train, indices) for indices in self.batches(task))

    def whole_network(self, state: Mapping[str, Tensor], width: float = 1.0) -> FrozenNet:
        """The network at a width with nothing frozen; the state may have more than it needs."""
        adapted = chain = self.chain(width)
        if isinstance(adapted, AdaptedChain):
            chain, state = adapted.plain, adapted.merged(state)
        own = {key: state[key] for key in chain.state_dict() if key in state}
        return freeze(chain, Span(0, len(chain)), variant="f", state=own, state_is_checked=True)

    def choose_kernels(self, state: ServerState) -> None:
        """Choose the kernel of every int8 operation: each block once frozen, once passing."""
        chain = self.chain()
        n, tensors, learning = len(chain), state.tensors, chain.learning_blocks
        spans = [Span(i, i + 1) for i in (learning[-1], learning[0]) if n > 1]
        if isinstance(chain, AdaptedChain):  # trained blocks have int8 maps, too
            spans.append(Span(0, n))
        for span in spans:
            freeze(chain, span, backend=self.spec.backend, state=tensors, plan=self.kernels)

    def test(self, state: ServerState, chunks: Sequence[Ints], statistics: str) -> list[list[Sums]]:
        """Of each chunk of the test data the sums of the metrics."""
        net = self.whole_network(state.tensors).eval()
        if statistics == "batch":
            for norm in norms_of(net):
                norm.train()
                norm.momentum = 0.0
        with torch.inference_mode():
            found = []
            for indices in chunks:
                inputs, labels = tensors(self.spec.test, indices)
                found.append([part.numpy() for part in self.tally.sums(net(inputs), labels)])
        return found


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
