"""Data that lies on a GPU, and testing the server's model there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cocofl.data import Samples
from cocofl.fl.batches import Ints
from cocofl.fl.metrics import Sums
from cocofl.fl.state import ServerState, is_scale
from cocofl.fl.trainer import Trainer, norms_of
from cocofl.vector import Graphs, Precision


class GpuSamples:
    """A split's samples on a device, as they are stored; they are normalised when asked for."""

    def __init__(self, split: Samples, on: torch.device) -> None:
        self.on, facts = on, split.facts
        self.classes = facts.num_classes
        self._task = facts.task
        self._inputs = torch.from_numpy(np.array(split.inputs)).to(on)
        self._labels = torch.from_numpy(np.array(split.labels)).to(on)
        self._mean, self._scale = (
            torch.from_numpy(values).to(on) for values in facts.normalisation(split.inputs.ndim)
        )

    def __call__(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Inputs and labels at ``indices``, of any shape; images (…, channel, height, width)."""
        stored = self._inputs[indices]
        if self._task == "text":
            return (stored.long(),), self._labels[indices]
        inputs = (stored.float() - self._mean) * self._scale
        if self._task == "image":
            inputs = inputs.movedim(-1, -3)  # stored channels last, and so it stays in memory
        return (inputs,), self._labels[indices]


class GpuEvaluator:
    """A model and test data that stay on a device, so that testing can be captured as well."""

    def __init__(
        self, trainer: Trainer, tests: GpuSamples, precision: Precision, *, capture: bool
    ) -> None:
        on_gpu = tests.on.type == "cuda"
        model, _ = trainer.spec.subject.build()
        self._model = model.to(tests.on).eval().requires_grad_(False)
        if on_gpu:  # as the images lie
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._tests, self._precision, self._tally = tests, precision, trainer.tally
        self._merged = trainer.merged
        self._graphs = Graphs(capture and self._tally.capturable and on_gpu)
        self._chunks: dict[int, Tensor] = {}  # by their length, where captured tests find them
        self._sums = list[Tensor]()

    def test(self, state: ServerState, chunks: Sequence[Ints], statistics: str) -> list[Sums]:
        """The sums of the metrics over chunks of the test data."""
        tensors = self._merged(state.layout.by_key(state.parts)).items()
        own = {key: tensor for key, tensor in tensors if not is_scale(key)}
        self._model.load_state_dict(own, strict=False)
        for norm in norms_of(self._model):
            norm.train(statistics == "batch")
            norm.momentum = 0.0
        for total in self._sums:
            total.zero_()
        for chunk in chunks:
            samples = torch.from_numpy(chunk)
            place = self._chunks.setdefault(len(chunk), samples.to(self._tests.on, copy=True))
            place.copy_(samples)
            if not self._sums:  # not within a captured computation, whose memory is its own
                self._sums = [torch.zeros_like(part) for part in self._look(place)]
            self._graphs.run((len(chunk), statistics), partial(self._add, place))
        return [total.cpu().numpy() for total in self._sums]

    def _add(self, indices: Tensor) -> None:
        for total, part in zip(self._sums, self._look(indices), strict=True):
            total.add_(part)

    def _look(self, indices: Tensor) -> list[Tensor]:
        with torch.no_grad(), self._precision.active():
            inputs, labels = self._tests(indices)
            return self._tally.sums(self._model(*inputs), labels)
