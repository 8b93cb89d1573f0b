"""Data that lies on the GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cocofl.data import Split


class GpuSplit:
    """A split's samples on a device, as they are stored; images are normalised when asked for."""

    def __init__(self, split: Split, on: torch.device) -> None:
        self.on, facts = on, split.facts
        self.classes = facts.num_classes
        self._is_image = facts.task == "image"
        self._inputs = torch.from_numpy(np.array(split.inputs)).to(on)
        self._labels = torch.from_numpy(np.array(split.labels)).to(on)
        if self._is_image:
            mean, std = (np.asarray(values, np.float32) for values in (facts.mean, facts.std))
            self._mean = torch.from_numpy(mean * np.float32(255)).to(on)
            self._scale = torch.from_numpy(np.float32(1) / (std * np.float32(255))).to(on)

    def __call__(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Inputs and labels at ``indices``, of any shape; images (…, channel, height, width)."""
        stored = self._inputs[indices]
        if self._is_image:
            pixels = (stored.float() - self._mean) * self._scale
            inputs = pixels.movedim(-1, -3)  # stored channels last, and so it stays in memory
        else:
            inputs = stored.long()
        return (inputs,), self._labels[indices]
