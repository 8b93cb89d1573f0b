"""What a run with noise comes to: ε by the number of rounds, as ``dp-accounting`` counts it.

The guarantee is about one device's data against none of it, for whoever sees the model after every
round. It is counted with Rényi divergences (Mironov, 2017), which bound ε from above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocofl.errors import InvalidExperiment

SAMPLINGS = ("poisson", "fixed")
# Whole orders: of sampled noise others are costly, and matter where ε is too large to mean much.
_ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 1024)


@dataclass(frozen=True)
class Sampling:
    """How the devices of a round are chosen.

    ``poisson``: each of ``population`` with probability ``per_round / population``, on its own.
    ``fixed``: exactly ``per_round`` of them. Where all are asked, or who is asked is known, there
    is nothing to gain from it: ``Sampling("fixed", n, n)``.
    """

    kind: str
    population: int
    per_round: int

    @property
    def is_everyone(self) -> bool:
        """Whether nobody's part in a round is left to chance."""
        return self.per_round >= self.population


class _Curve(NamedTuple):
    """Rényi divergences of one round by their order."""

    orders: Sequence[float]
    divergences: NDArray[np.float64]


@dataclass(frozen=True)
class Accountant:
    """ε after so many rounds, each of which adds noise of ``noise`` times what one device can move.

    >>> Accountant(noise=1.0, delta=1e-5, sampling=Sampling("fixed", 30, 30)).epsilon(1)
    4.7286
    """

    noise: float
    delta: float
    sampling: Sampling

    def epsilon(self, rounds: int) -> float:
        """The smallest that can be shown, rounded up to four decimals."""
        curves = self._curves
        from dp_accounting.rdp import compute_epsilon  # noqa: PLC0415 - not everybody has it

        found = min(
            compute_epsilon(curve.orders, rounds * curve.divergences, self.delta)[0]
            for curve in curves
        )
        return math.ceil(float(found) * 1e4) / 1e4

    def most_rounds(self, epsilon: float, rounds: int) -> int:
        """How many of so many rounds stay within an ε."""
        found = 0
        for step in (1 << bit for bit in reversed(range(rounds.bit_length()))):
            if found + step <= rounds and self.epsilon(found + step) <= epsilon:
                found += step
        return found

    @cached_property
    def _curves(self) -> list[_Curve]:
        """Each shows an ε of its own, and all of them hold."""
        dp, sampling = _library(), self.sampling
        # Who takes part is no secret here: one device moves a sum by the clip, in every round.
        everyone = _curve(dp, dp.GaussianDpEvent(self.noise), "REPLACE_SPECIAL")
        if sampling.is_everyone:
            return [everyone]
        if sampling.kind == "poisson":
            rate = sampling.per_round / sampling.population
            event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(self.noise))
            return [everyone, _curve(dp, event, "REPLACE_SPECIAL", _ORDERS)]
        # Of a fixed number one device takes another's place, which moves a sum by twice the clip.
        event = dp.SampledWithoutReplacementDpEvent(
            sampling.population, sampling.per_round, dp.GaussianDpEvent(self.noise / 2)
        )
        return [everyone, _curve(dp, event, "REPLACE_ONE", _ORDERS)]


def check_epsilon(accountant: Accountant, most: float, rounds: int) -> None:
    """Refuse so many rounds where they come to more than an ε."""
    if most == math.inf or (found := accountant.epsilon(rounds)) <= most:
        return
    raise InvalidExperiment(
        f"{rounds} rounds come to ε = {found:g} at δ = {accountant.delta:g}, and "
        f"privacy.max_epsilon is {most:g}: so much is reached after "
        f"{accountant.most_rounds(most, rounds)} rounds. Play fewer, raise privacy.noise "
        f"({accountant.noise:g}), or ask a smaller share of the devices in each round"
    )


def _curve(dp: Any, event: Any, neighbours: str, orders: Sequence[float] | None = None) -> _Curve:
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    accountant = RdpAccountant(orders, dp.NeighboringRelation[neighbours])
    accountant.compose(event)
    return _Curve(accountant.orders, accountant.rdp)


def _library() -> Any:
    try:
        import dp_accounting  # noqa: PLC0415
    except ImportError as error:
        raise InvalidExperiment(
            "privacy is on, and ε is counted with dp-accounting, which is not here: "
            "pip install 'cocofl[privacy]'"
        ) from error
    return dp_accounting
