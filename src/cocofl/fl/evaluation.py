"""From a confusion matrix to what people ask: accuracy, F1, per class, group and device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocofl.data import Partition

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Enough to read a curve and to compare runs; it keeps a run's log small and its bytes the same.
_DIGITS = 6


def class_densities(labels: Ints, groups: Ints, partition: Partition, classes: int) -> Floats:
    """How the samples of each group are spread over the classes: (groups, classes), rows sum to 1.

    A group of one device each gives densities per device.
    """
    owner = np.repeat(groups, partition.sizes)
    counts = np.zeros((int(groups.max()) + 1, classes))
    np.add.at(counts, (owner, labels[partition.indices]), 1)
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))


def class_accuracies(confusion: Ints) -> Floats:
    """The share of each class that was recognised; 0 for a class that the test data lacks."""
    return np.asarray(np.diag(confusion) / np.maximum(confusion.sum(axis=1), 1))


def macro_f1(confusion: Ints) -> float:
    """The mean over classes of the harmonic mean of precision and recall."""
    hits = np.diag(confusion)
    total = confusion.sum(axis=0) + confusion.sum(axis=1)
    present = total > 0
    return float(np.mean(2 * hits[present] / total[present]))


def metrics(
    confusion: Ints, group_names: list[str], group_densities: Floats, device_densities: Floats
) -> dict[str, Any]:
    """What a round's line in the log says about accuracy.

    A group's accuracy is what its devices would see: class accuracies weighted by how often the
    group has each class. The same for devices, of which the spread is logged.
    """
    by_class = class_accuracies(confusion)
    by_group = group_densities @ by_class
    by_device = device_densities @ by_class
    quantiles = np.quantile(by_device, [0.0, 0.1, 0.5, 0.9, 1.0])
    return {
        "accuracy": _rounded(np.trace(confusion) / max(confusion.sum(), 1)),
        "f1": _rounded(macro_f1(confusion)),
        "class_accuracy": [_rounded(value) for value in by_class],
        "group_accuracy": {
            name: _rounded(value) for name, value in zip(group_names, by_group, strict=True)
        },
        "device_accuracy": {
            name: _rounded(value)
            for name, value in zip(("min", "p10", "median", "p90", "max"), quantiles, strict=True)
        },
    }


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS)
