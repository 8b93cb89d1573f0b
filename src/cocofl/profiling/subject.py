"""What is profiled: a model by name, the mini-batch it gets, and one step of its training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.chain import BlockChain, split
from cocofl.errors import InvalidModel
from cocofl.models import MODELS
from cocofl.named import lookup

CLASSES = {"transformer": 2, "transformer-seq2seq": 81}  # 10 of all others

Inputs = tuple[Tensor, ...]
Mark = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A registry name or ``package.module:factory``, and the size of a mini-batch.

    A factory returns a module with ``example_input(batch_size)``, as the built-in networks have,
    or a pair of a module and an example input. For widths it takes ``width=``.
    """

    model: str
    batch: int = 32
    num_classes: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Further keyword arguments of the factory."""

    def build(self, width: float | None = None, *, seed: int = 0) -> tuple[nn.Module, Inputs]:
        """The model with the weights that ``seed`` gives, and a mini-batch."""
        if self.batch < 1:
            raise InvalidModel(f"batch is {self.batch}; a mini-batch has at least 1 sample")
        factory, arguments = self._factory()
        if width is not None:
            if "width" not in inspect.signature(factory).parameters:
                raise InvalidModel(
                    f"{self.model} takes no width=, which HeteroFL and FjORD need: give its "
                    "factory a keyword `width`, a ratio in (0, 1], that scales its channels"
                )
            arguments["width"] = width
        try:
            # Not the caller's random numbers: building a model must not change what is drawn next.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                made = factory(**arguments, **dict(self.options))
        except TypeError as error:
            raise InvalidModel(f"{self.model} cannot be built: {error}") from error
        model, example = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise InvalidModel(f"{self.model} gave a {type(model).__name__}; expected an nn.Module")
        return model, self._mini_batch(model, example)

    def chain(
        self, width: float | None = None, *, samples: int | None = None
    ) -> tuple[BlockChain, Inputs]:
        """The model split into blocks by the look of ``samples`` (or all), and a mini-batch."""
        model, inputs = self.build(width)
        if isinstance(model, BlockChain):
            return model, inputs
        return split(model, tuple(x[:samples] for x in inputs)), inputs

    def _factory(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        factory, classes = lookup(self.model, MODELS, "model", InvalidModel), self.num_classes
        if self.model in MODELS:
            classes = CLASSES.get(self.model, 10) if classes is None else classes
        elif "num_classes" not in inspect.signature(factory).parameters:
            classes = None
        return factory, {} if classes is None else {"num_classes": classes}

    def _mini_batch(self, model: nn.Module, example: Any) -> Inputs:
        if example is None:
            make = getattr(model, "example_input", None)
            if make is None:
                raise InvalidModel(
                    f"{self.model} has no example_input(batch_size); add it, or let the factory "
                    "return (model, example)"
                )
            example = make(self.batch)
        tensors = (example,) if isinstance(example, Tensor) else tuple(example)
        batches = (torch.cat([x] * -(-self.batch // len(x)))[: self.batch] for x in tensors)
        return tuple(
            x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in batches
        )


def training_step(
    net: nn.Module, inputs: Inputs, target: Tensor | None = None, mark: Mark = lambda _: None
) -> Callable[[], None]:
    """One step as the paper times it: forward, zero-grad, backward, optimizer.

    Without a ``target`` a random class is made for each row of the first output.
    """
    net.train()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)

    def step() -> None:
        nonlocal target
        mark("step")
        output = net(*inputs)
        logits = output.flatten(0, -2)
        if target is None:
            target = torch.randint(logits.shape[-1], logits.shape[:1])
        loss = F.cross_entropy(logits, target)
        del output, logits
        mark("zero")
        optimizer.zero_grad()
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        mark("end")

    return step
