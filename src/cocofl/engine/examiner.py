"""Tests the server's model on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cocofl.engine.resident import ResidentSplit
from cocofl.fl.batches import Ints
from cocofl.fl.local import norms_of
from cocofl.fl.merge import SCALE_PREFIX
from cocofl.vector import Graphs, Precision


class Examiner:
    """A model and test data that stay on a device, so that testing can be captured as well."""

    def __init__(
        self,
        model: nn.Module,
        tests: ResidentSplit,
        on: torch.device,
        precision: Precision,
        *,
        capture: bool,
    ) -> None:
        self._model = model.to(on).eval().requires_grad_(False)
        if on.type == "cuda":
            # As the images lie.
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._tests, self._on, self._precision = tests, on, precision
        self._graphs = Graphs(capture and on.type == "cuda")
        self._chunks: dict[int, Tensor] = {}  # by their length, where captured tests find them
        self._counts = torch.zeros(tests.classes**2, dtype=torch.long, device=on)

    def confusion(
        self, state: Mapping[str, Tensor], chunks: Sequence[Ints], statistics: str
    ) -> NDArray[np.int64]:
        """How often each true class (row) was taken for each class (column)."""
        own = {key: t for key, t in state.items() if not key.startswith(SCALE_PREFIX)}
        self._model.load_state_dict(own, strict=False)
        for norm in norms_of(self._model):
            norm.train(statistics == "batch")
            norm.momentum = 0.0
        self._counts.zero_()
        for chunk in chunks:
            if len(chunk) not in self._chunks:
                self._chunks[len(chunk)] = torch.empty(
                    len(chunk), dtype=torch.long, device=self._on
                )
            place = self._chunks[len(chunk)]
            place.copy_(torch.from_numpy(chunk))
            self._graphs.run((len(chunk), statistics), partial(self._count, place))
        found: NDArray[np.int64] = self._counts.view([self._tests.classes] * 2).cpu().numpy()
        return found

    def _count(self, indices: Tensor) -> None:
        classes = self._tests.classes
        with torch.no_grad(), self._precision.active():
            inputs, labels = self._tests(indices)
            guesses = self._model(*inputs).flatten(0, -2)[:, :classes].argmax(1)
            cells = labels.flatten() * classes + guesses
            self._counts.scatter_add_(0, cells, torch.ones_like(cells))
