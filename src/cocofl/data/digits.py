"""scikit-learn's digits: the data set that is always there."""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from sklearn.datasets import load_digits

from cocofl.data.origin import Origin
from cocofl.data.samples import Facts, NewSamples
from cocofl.data.stable_random import hold_out


@contextmanager
def digits(_origin: Origin, _preset: str) -> Iterator[dict[str, NewSamples]]:
    """scikit-learn's 1797 handwritten digits of 8×8, one fifth of them for the test."""
    bunch = load_digits()
    # 17 grey levels, spread over the range of a byte like any other image.
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    facts = Facts("image", tuple(string.digits), channels=1)
    labels = bunch.target.astype(np.int64)
    yield {
        part: NewSamples(facts, labels[rows], images.shape[1:], [images[rows]])
        for part, rows in hold_out(len(labels), len(labels) // 5, "digits").items()
    }
