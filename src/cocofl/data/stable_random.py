"""Draws that are the same on every machine and under every version of NumPy.

NumPy promises that the raw output of a bit generator never changes. It makes no such promise for
the methods of ``Generator`` (NEP 19), and ``Generator.dirichlet`` has changed before. Everything
random about data is therefore made from raw bits, here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cocofl.rng import stream

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def uniform(n_draws: int, rng: np.random.Generator) -> Floats:
    """Uniform draws in (0, 1]: never 0, so that a logarithm may follow."""
    bits = np.asarray(rng.bit_generator.random_raw(n_draws), np.uint64) >> np.uint64(11)
    return (bits.astype(np.float64) + 1.0) * 2.0**-53


def shuffled(values: Ints, rng: np.random.Generator) -> Ints:
    """A copy of ``values`` in random order."""
    bits = np.asarray(rng.bit_generator.random_raw(len(values)), np.uint64)
    return values[np.argsort(bits, kind="stable")]


def log_gamma_draws(shape: float, n_draws: int, rng: np.random.Generator) -> Floats:
    """Logarithms of Gamma(``shape``) draws.

    Marsaglia and Tsang (2000) for shape + 1, brought down by U^(1/shape). The logarithm matters:
    at small shapes most draws underflow to 0, and a row of zeros has no proportions.
    """
    d = shape + 1.0 - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    logs = np.empty(n_draws)
    missing = np.arange(n_draws)
    while len(missing):
        u, v, w = (uniform(len(missing), rng) for _ in range(3))
        normal = np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)
        cube = np.maximum(1.0 + c * normal, 0.0) ** 3
        # log(0) is -inf, which is never accepted: exactly what a negative cube needs.
        with np.errstate(divide="ignore"):
            log_cube = np.log(cube)
            accepted = np.log(w) < 0.5 * normal**2 + d - d * cube + d * log_cube
        logs[missing[accepted]] = np.log(d) + log_cube[accepted]
        missing = missing[~accepted]
    return logs + np.log(uniform(n_draws, rng)) / shape


def dirichlet(alpha: float, n_parts: int, rng: np.random.Generator) -> Floats:
    """Proportions over ``n_parts`` from Dirichlet(alpha, …, alpha)."""
    logs = log_gamma_draws(alpha, n_parts, rng)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def hold_out(n_samples: int, n_test: int, purpose: str) -> dict[str, Ints]:
    """Rows of a train and a test part drawn from one table, each in the table's order."""
    test = draw_rows(n_samples, n_test, f"hold out {purpose}")
    return {"train": np.setdiff1d(np.arange(n_samples), test), "test": test}


def draw_rows(n_rows: int, n_drawn: int, purpose: str) -> Ints:
    """Some rows at random, in the table's order.

    The seed is fixed: a preset belongs to the data set, not to an experiment.
    """
    return np.sort(shuffled(np.arange(n_rows), stream(0, f"draw {purpose}"))[:n_drawn])
