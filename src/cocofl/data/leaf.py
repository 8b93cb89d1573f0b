"""LEAF's JSON files: ``users``, ``num_samples`` and per user the pixels and labels.

Caldas et al., *LEAF: A Benchmark for Federated Settings* (2018). One file holds about a hundred
writers; a writer's ``x`` is a list of 784 floats from 0 to 1 per image, ``y`` a list of labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidData

SIDE = 28


def read_femnist(
    files: Sequence[Path],
) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """All images (n, 28, 28), their labels, and the writer of each."""
    images, labels, writers = [], [], []
    for path in files:
        for user, samples in _users(path).items():
            where = f"{path}, user {user}"
            user_images, user_labels = _samples(samples, where)
            images.append(user_images)
            labels.append(user_labels)
            writers += [user] * len(user_labels)
    return np.concatenate(images), np.concatenate(labels), writers


def _users(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(f"cannot read {path} as JSON: {error}. Fetch it again.") from error
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict) or not users:
        raise InvalidData(
            f"{path} is no LEAF file: expected users, num_samples and user_data with one entry "
            "per user"
        )
    return users


def _samples(samples: Any, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        pixels = np.asarray(samples["x"], np.float64)
        labels = np.asarray(samples["y"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidData(f"{where}: expected lists x and y, got {error!r}") from error
    if pixels.shape != (len(labels), SIDE * SIDE) or labels.dtype.kind not in "iu":
        raise InvalidData(
            f"{where}: x of shape {pixels.shape} and y of {labels.dtype}; "
            f"expected {len(labels)} images of {SIDE * SIDE} pixels, and integer labels"
        )
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise InvalidData(f"{where}: pixels must lie between 0 and 1")
    grey = np.round(pixels * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)
    return grey, labels.astype(np.int64)
