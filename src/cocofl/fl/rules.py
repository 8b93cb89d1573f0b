"""Rules of merging under which no one device owns the model.

A rule is a function from a :class:`Ballot` to a ballot: it shortens changes, or takes weight away.
What is merged in the end is always the weighted mean of what the ballot says. So rules follow each
other in any order, and a rule of one's own is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocofl.checks import check_number
from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.named import lookup


class Ballot(NamedTuple):
    """What devices want of one group of tensors: the parameters of a block, or its statistics.

    Those who did not train it are not here.
    """

    changes: Tensor
    """(device, element), in float64."""
    weights: Tensor
    """(device, element): how much each counts, 0 where a device has no such element."""
    usual: float
    """How large changes of this group usually are in this round, as a root of a mean square."""

    @property
    def sizes(self) -> Tensor:
        """By device the root of the mean square of its change, over the elements that it has."""
        counts = (self.weights > 0).double()
        return ((self.changes.square() * counts).sum(1) / counts.sum(1).clamp(min=1)).sqrt()

    @property
    def mean(self) -> Tensor:
        """What all of them come to; 0 where nobody has any weight."""
        total = self.weights.sum(0)
        return (self.changes * self.weights).sum(0) / total.where(total > 0, 1.0)


Rule = Callable[[Ballot], Ballot]


def norm_clip(ballot: Ballot, clip: float = 1.0) -> Ballot:
    """A change that is larger than usual is made shorter, in its own direction.

    >>> sent = Ballot(torch.tensor([[1.0], [-50.0]]).double(), torch.ones(2, 1), usual=1.0)
    >>> norm_clip(sent, clip=2.0).changes.tolist()
    [[1.0], [-2.0]]
    """
    return _shortened(ballot, clip, 1)


def norm_fade(ballot: Ballot, clip: float = 1.0) -> Ballot:
    """Beyond what a clip leaves whole, a change is made the shorter the larger it is.

    Devices with rare data send large changes, and liars larger ones. So the clip can be wide.

    >>> sent = Ballot(torch.tensor([[4.0], [-64.0]]).double(), torch.ones(2, 1), usual=1.0)
    >>> norm_fade(sent, clip=2.0).changes.tolist()
    [[1.0], [-0.0625]]
    """
    return _shortened(ballot, clip, 2)


def _shortened(ballot: Ballot, clip: float, power: int) -> Ballot:
    sizes, most = ballot.sizes, clip * ballot.usual
    factors = torch.where(sizes > most, (most / sizes) ** power, 1.0)
    return ballot._replace(changes=ballot.changes * factors[:, None])


def trimmed_mean(ballot: Ballot, trim: float = 0.3) -> Ballot:
    """Element by element, the lowest and the highest values that make up a share of the weight go.

    Who is at the border keeps a part of its weight, so equal values are treated alike.

    >>> trimmed_mean(Ballot(torch.tensor([[1.0], [2], [3], [99]]), torch.ones(4, 1), 1), 0.25).mean
    tensor([2.5000])
    """
    order, weights, upto = _in_order(ballot)
    low, high = trim * upto[-1], (1 - trim) * upto[-1]
    kept = torch.minimum(upto, high) - torch.maximum(upto - weights, low)
    return _reweighted(ballot, order, kept.clamp(min=0))


def median(ballot: Ballot) -> Ballot:
    """Element by element, the value with half of the weight on either side; the mean of two."""
    order, weights, upto = _in_order(ballot)
    half, rounding = upto[-1] / 2, upto[-1] * 1e-9
    kept = (weights > 0) & (upto - weights <= half + rounding) & (upto >= half - rounding)
    return _reweighted(ballot, order, kept.double())


def least_change_in_the_middle(ballot: Ballot) -> Tensor:
    """Element by element, of all that the median may be, what changes least.

    Of two devices that disagree, nobody knows which one lies: the smaller change does less harm.

    >>> least_change_in_the_middle(Ballot(torch.tensor([[-9.0], [-1.0]]), torch.ones(2, 1), 1))
    tensor([-1.])
    """
    middle = median(ballot).weights > 0
    low = ballot.changes.masked_fill(~middle, torch.inf).amin(0)
    high = ballot.changes.masked_fill(~middle, -torch.inf).amax(0)
    return torch.where(middle.any(0), torch.zeros_like(low).clamp(low, high), 0.0)


def _in_order(ballot: Ballot) -> tuple[Tensor, Tensor, Tensor]:
    """The devices by the size of each element, their weights, and these summed up."""
    order = ballot.changes.argsort(dim=0, stable=True)
    weights = ballot.weights.gather(0, order)
    return order, weights, weights.cumsum(0)


def _reweighted(ballot: Ballot, order: Tensor, kept: Tensor) -> Ballot:
    return ballot._replace(weights=torch.zeros_like(kept).scatter(0, order, kept))


def krum(ballot: Ballot, trim: float = 0.3) -> Ballot:
    """Those whose change is far from its nearest others are left out (Blanchard et al., 2017).

    As many as ``trim`` says, of all who trained this block; the others count as before
    (*multi-Krum*).
    """
    devices = len(ballot.changes)
    hostile = most_hostile(devices, trim)
    if not hostile:
        return ballot
    has = (ballot.weights > 0).double()
    own, squares = ballot.changes * has, ballot.changes.square() * has
    distances = (squares @ has.T + has @ squares.T - 2 * own @ own.T) / (has @ has.T).clamp(min=1)
    # Two that are each other's nearest are as far from it, to the bit: then the first is chosen.
    distances = (distances + distances.T).fill_diagonal_(torch.inf)
    nearest = distances.clamp(min=0).sort(1).values[:, : max(1, devices - hostile - 2)]
    chosen = nearest.sum(1).argsort(stable=True)[: devices - hostile]
    keeps = torch.zeros(devices, 1, dtype=torch.float64, device=chosen.device)
    keeps[chosen] = 1.0
    return ballot._replace(weights=ballot.weights * keeps)


def most_hostile(devices: int, trim: float) -> int:
    """How many of so many devices a share is, and less than half.

    >>> [most_hostile(n, 0.3) for n in (2, 3, 4, 6, 10)]
    [0, 1, 1, 2, 3]
    """
    return min(int(trim * devices + 0.5), (devices - 1) // 2)


def capped(weights: Sequence[float], share: float) -> list[float]:
    """Weights of which none is above a share of all; all alike where that cannot be.

    >>> capped([10, 10, 10, 970], 0.4)
    [10.0, 10.0, 10.0, 20.0]
    >>> capped([1, 2, 3], 0.0)
    [1.0, 1.0, 1.0]
    """
    if max(weights) <= share * sum(weights):
        return [float(weight) for weight in weights]
    if share * len(weights) <= 1:
        return [1.0] * len(weights)
    largest = sorted(weights, reverse=True)
    for above in range(len(largest)):
        most = share * sum(largest[above:]) / (1 - share * above)
        if largest[above] <= most:
            return [float(min(weight, most)) for weight in weights]
    raise AssertionError("the least of several weights is never above its share")


AUTO = "auto"
RULES: dict[str, Callable[[Merging], Rule]] = {
    "norm-clip": lambda settings: partial(norm_clip, clip=settings.clip),
    "norm-fade": lambda settings: partial(norm_fade, clip=settings.clip),
    "trimmed-mean": lambda settings: partial(trimmed_mean, trim=settings.trim),
    "median": lambda _settings: median,
    "krum": lambda settings: partial(krum, trim=settings.trim),
}


@dataclass(frozen=True)
class Merging:
    """The section ``[merge]`` of an experiment: how much one device can do to the model."""

    rules: tuple[str, ...] = (AUTO,)
    """In their order; none for the plain mean. ``auto`` is that in simulation, and
    :data:`DEPLOYED` where devices are on a network."""
    clip: float = 5.0
    """``norm-clip``, ``norm-fade``: the largest change of a block that stays whole, in multiples of
    what is usual in the round."""
    trim: float = 0.3
    """``trimmed-mean``: the share of the weight that goes at either end. ``krum``, ``agreement``:
    the share of devices that are left out at most."""
    share: float = 1.0
    """No device has more of the weight than this; 0 for the same weight for all."""
    agreement: float = 0.0
    """Devices that agree less with others than this part of what is usual are left out."""
    bound: float = 4.0
    """With rules, the largest factor by which a round moves a scale or a variance."""

    def __post_init__(self) -> None:
        check_number("merge.clip", self.clip, above=0)
        check_number("merge.trim", self.trim, least=0, below=0.5)
        check_number("merge.share", self.share, least=0, most=1)
        check_number("merge.agreement", self.agreement, least=0, most=1)
        check_number("merge.bound", self.bound, above=1)
        if AUTO in self.rules and len(self.rules) > 1:
            raise InvalidExperiment(
                f"merge.rules is {list(self.rules)}; expected [{AUTO!r}] alone, or rules by name"
            )

    @property
    def deployed(self) -> Merging:
        """What ``auto`` is where devices are on a network."""
        if self.rules != (AUTO,):
            return self
        return replace(
            self,
            rules=DEPLOYED.rules,
            share=min(self.share, DEPLOYED.share),
            agreement=max(self.agreement, DEPLOYED.agreement),
        )

    def made(self) -> Rules | None:
        """The rules that the names stand for; None where what is merged is the plain mean."""
        names = () if self.rules == (AUTO,) else self.rules
        if not names and self.share == 1 and not self.agreement:
            return None
        made = tuple(self._rule(name) for name in names)
        return Rules(made, self.share, self.agreement, self.trim, self.bound)

    def _rule(self, name: str) -> Rule:
        found: Any = lookup(name, RULES, "rule of merging", InvalidExperiment)
        return found(self) if name in RULES else partial(_own, name, found)


DEPLOYED = Merging(("norm-fade",), share=0.0, agreement=0.5)
"""What a deployment does if nothing else is said; ``docs/guides/robust-merging.md`` says why."""


@dataclass(frozen=True)
class Rules:
    """How ballots are counted."""

    rules: tuple[Rule, ...] = ()
    share: float = 1.0
    agreement: float = 0.0
    trim: float = Merging.trim
    bound: float = Merging.bound

    def __call__(self, ballot: Ballot) -> Tensor:
        """The change that devices agree on."""
        for rule in self.rules:
            ballot = rule(ballot)
        return ballot.mean


def _own(name: str, rule: Rule, ballot: Ballot) -> Ballot:
    found = rule(ballot)
    if not isinstance(found, Ballot) or not (
        found.changes.shape == found.weights.shape == ballot.changes.shape
    ):
        raise InvalidSetting(
            f"the rule of merging {name} gives {type(found).__name__}; expected a "
            f"cocofl.strategies.Ballot with changes and weights of {tuple(ballot.changes.shape)}"
        )
    return found
