"""What a model is judged by: sums that can be added over samples, and what they come to.

A metric sums something up over a mini-batch. Sums of mini-batches, processes and devices add up,
so a metric is the same wherever the test data is looked at. ``evaluation.metrics`` names them;
one's own is a ``package.module:function`` that returns a :class:`Metric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cocofl.checks import check_choice, check_number
from cocofl.errors import InvalidExperiment
from cocofl.named import made_by_name

Floats = NDArray[np.float64]
Sums = NDArray[Any]

_SPREAD = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
STATISTICS = ("running", "batch")
_CLASSES = ("classes", "tokens")


@dataclass(frozen=True)
class Evaluation:
    """The section ``[evaluation]`` of an experiment."""

    every: int = 5
    """Rounds; the last one is always tested."""
    batch: int = 256
    """Samples per test batch."""
    samples: int = 0
    """How many of the test samples are looked at, always the same ones; 0 for all."""
    statistics: str = "running"
    """BatchNorm's: those that training left (``running``), or those of each test ``batch``."""
    metrics: tuple[str, ...] = ("accuracy", "f1")
    """What the model is judged by: names, or one's own as ``package.module:function``.

    By the first runs are compared, learning rates chosen and curves drawn.
    """
    average: int = 0
    """Over about how many rounds a mean of the model is kept, and tested beside it; 0 for none."""

    def __post_init__(self) -> None:
        check_number("evaluation.every", self.every, least=1)
        check_number("evaluation.batch", self.batch, least=1)
        check_number("evaluation.samples", self.samples, least=0)
        check_number("evaluation.average", self.average, least=0)
        check_choice("evaluation.statistics", self.statistics, STATISTICS)
        if not self.metrics:
            raise InvalidExperiment("evaluation.metrics is empty; name at least one, like accuracy")

    def with_fewer_rounds(self, times: float) -> Evaluation:
        """The same for a run that has so many times fewer rounds, or more if below 1."""
        average = math.ceil(self.average / times)  # a mean that is wanted stays one
        return replace(self, every=max(1, int(self.every / times)), average=average)


@dataclass(frozen=True)
class MetricFacts:
    """What a reader of results must know of a metric; run folders hold it, as none is imported."""

    name: str
    higher_is_better: bool = True
    is_share: bool = False

    @property
    def scale(self) -> float:
        """By what a value is multiplied to be shown."""
        return 100.0 if self.is_share else 1.0

    @property
    def heading(self) -> str:
        """Of a column, or beside an axis."""
        return f"{self.name}{self.unit}"

    @property
    def unit(self) -> str:
        """What stands behind the name of a number in a heading."""
        return " / %" if self.is_share else ""

    def number(self, value: float) -> str:
        """A value below its heading.

        >>> MetricFacts("f1", is_share=True).number(0.5), MetricFacts("perplexity").number(12.3456)
        ('50.0', '12.35')
        """
        return f"{self.scale * value:.1f}" if self.is_share else f"{value:.4g}"

    def text(self, value: float) -> str:
        """A value in a sentence."""
        return f"{self.number(value)} %" if self.is_share else self.number(value)

    def found_in(self, scores: Mapping[str, Any]) -> list[str]:
        """Its name and value, where a model was tested."""
        return [f"{self.name} {self.text(scores[self.name])}"] if self.name in scores else []

    def merit(self, value: float) -> float:
        """Larger where it is better; a model that gives no number is the worst."""
        if math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value


@dataclass(frozen=True)
class Metric:
    """A figure with a name."""

    name: str
    sums: Callable[[Tensor, Tensor, int], Tensor]
    """From outputs, labels and the number of classes to sums of one shape for all mini-batches."""
    value: Callable[[Sums], float]
    """What the sums over all of the test data come to."""
    by_class: Callable[[Sums], Floats] | None = None
    """The same for each class, where that has a meaning: then groups and devices have it, too."""
    higher_is_better: bool = True
    is_share: bool = False
    """Whether it is a share of 1, which people read in percent."""
    of_classes: bool = False
    """Whether it counts every pair of classes: labels are classes then, and not too many."""
    reads: tuple[str, ...] = ()
    """What labels may be: of ``classes``, ``tokens``, ``multilabel``, ``numbers``; else any."""
    capturable: bool = False
    """Whether ``sums`` may be captured in a CUDA graph: it asks no tensor for its values."""

    @property
    def facts(self) -> MetricFacts:
        """What is kept beside its values."""
        return MetricFacts(self.name, self.higher_is_better, self.is_share)


def confusion(outputs: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often each true class (row) was taken for each class (column)."""
    guesses, labels = outputs.flatten(0, -2)[:, :classes].argmax(1), labels.flatten()
    cells = labels.clamp_min(0) * classes + guesses
    counts = torch.zeros(classes**2, dtype=torch.long, device=cells.device)
    return counts.scatter_add_(0, cells, (labels >= 0).long()).view(classes, classes)


def class_accuracies(counts: Sums) -> Floats:
    """The share of each class that was recognised; 0 for a class that the test data lacks."""
    return np.asarray(np.diag(counts) / np.maximum(counts.sum(axis=1), 1))


def macro_f1(counts: Sums) -> float:
    """The mean over classes of the harmonic mean of precision and recall."""
    hits = np.diag(counts)
    total = counts.sum(axis=0) + counts.sum(axis=1)
    present = total > 0
    return float(np.mean(2 * hits[present] / total[present]))


def accuracy() -> Metric:
    """The share of samples (of tokens, where labels are sequences) that were recognised."""
    return Metric(
        "accuracy",
        confusion,
        lambda counts: float(np.trace(counts) / max(counts.sum(), 1)),
        class_accuracies,
        is_share=True,
        of_classes=True,
        reads=_CLASSES,
        capturable=True,
    )


def f1() -> Metric:
    """The mean F1 of the classes."""
    return Metric(
        "f1",
        confusion,
        macro_f1,
        is_share=True,
        of_classes=True,
        reads=_CLASSES,
        capturable=True,
    )


def label_counts(outputs: Tensor, labels: Tensor, _classes: int) -> Tensor:
    """Of each of several labels: how often it was rightly found, wrongly found, missed, left out.

    A label is found where its score is above 0, which is a probability above one half.
    """
    found, there = outputs > 0, labels > 0
    cells = (found & there, found & ~there, ~found & there, ~found & ~there)
    return torch.stack([cell.sum(0) for cell in cells], 1)


def label_f1_by_class(counts: Sums) -> Floats:
    """The harmonic mean of precision and recall of each label; 0 where it is never right."""
    hits, false, missed, _ = counts.T
    return np.asarray(2 * hits / np.maximum(2 * hits + false + missed, 1))


def label_f1() -> Metric:
    """Of samples with several labels: the mean over labels that occur of each one's F1."""

    def value(counts: Sums) -> float:
        occurs = counts[:, :3].sum(1) > 0
        return float(label_f1_by_class(counts[occurs]).mean()) if occurs.any() else 0.0

    return Metric(
        "label_f1",
        label_counts,
        value,
        label_f1_by_class,
        is_share=True,
        reads=("multilabel",),
        capturable=True,
    )


def label_accuracy() -> Metric:
    """Of samples with several labels: the share of all labels that are told rightly."""
    return Metric(
        "label_accuracy",
        label_counts,
        lambda counts: float((counts[:, 0] + counts[:, 3]).sum() / max(counts.sum(), 1)),
        is_share=True,
        reads=("multilabel",),
        capturable=True,
    )


def error_sums(outputs: Tensor, labels: Tensor, _classes: int) -> Tensor:
    """Of each number that is predicted: squared and absolute errors, labels, squares, how many."""
    wanted = labels.double().flatten(1) if labels.ndim > 1 else labels.double()[:, None]
    errors = outputs.double().reshape(wanted.shape) - wanted
    sums = (errors.square(), errors.abs(), wanted, wanted.square(), torch.ones_like(wanted))
    return torch.stack([each.sum(0) for each in sums], 1)


def _r2(sums: Sums) -> float:
    """The share of the variance that is explained, as a mean over the numbers that vary."""
    squared, _, total, squares, count = sums.T
    variation = squares - total**2 / np.maximum(count, 1)
    varies = variation > 1e-12 * np.maximum(squares, 1e-300)
    if not varies.any():
        return math.nan
    return float(np.mean(1 - squared[varies] / variation[varies]))


def _of_errors(facts: MetricFacts, value: Callable[[Sums], float]) -> Metric:
    """Of numbers that a network predicts."""
    return Metric(sums=error_sums, value=value, reads=("numbers",), capturable=True, **vars(facts))


def rmse() -> Metric:
    """The root of the mean squared error, in the unit of what is predicted."""
    return _of_errors(
        MetricFacts("rmse", higher_is_better=False),
        lambda sums: math.sqrt(sums[:, 0].sum() / max(sums[:, 4].sum(), 1)),
    )


def mae() -> Metric:
    """The mean absolute error, in the unit of what is predicted."""
    return _of_errors(
        MetricFacts("mae", higher_is_better=False),
        lambda sums: float(sums[:, 1].sum() / max(sums[:, 4].sum(), 1)),
    )


def r2() -> Metric:
    """The share of the variance that is explained: 1 is perfect, 0 as good as the mean."""
    return _of_errors(MetricFacts("r2"), _r2)


def _mean(
    facts: MetricFacts,
    reads: tuple[str, ...],
    each: Callable[[Tensor, Tensor], Tensor],
    of_mean: Callable[[float], float] = lambda mean: mean,
) -> Metric:
    """What the mean comes to of a number for each label; classes below 0 are labels of nothing."""

    def sums(outputs: Tensor, labels: Tensor, _classes: int) -> Tensor:
        labels = labels.flatten()
        values = each(outputs, labels).double()
        counts = labels >= 0 if reads == _CLASSES else torch.ones_like(labels, dtype=torch.bool)
        return torch.stack([torch.where(counts, values, 0.0).sum(), counts.double().sum()])

    def value(sums: Sums) -> float:
        return of_mean(float(sums[0] / max(sums[1], 1)))

    return Metric(sums=sums, value=value, reads=reads, capturable=True, **vars(facts))


def token_accuracy() -> Metric:
    """The share of tokens that were recognised; it needs no memory for each pair of classes."""
    return _mean(
        MetricFacts("token_accuracy", is_share=True),
        _CLASSES,
        lambda outputs, labels: outputs.flatten(0, -2).argmax(1) == labels,
    )


def _cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), labels, reduction="none")


def cross_entropy() -> Metric:
    """The mean cross-entropy of the test data."""
    facts = MetricFacts("test_loss", higher_is_better=False)
    return _mean(facts, _CLASSES, _cross_entropies)


def perplexity() -> Metric:
    """Of language models: among how many tokens it is as if they had to guess."""
    facts = MetricFacts("perplexity", higher_is_better=False)
    # Beyond what a float holds, any number is as bad.
    return _mean(facts, _CLASSES, _cross_entropies, lambda mean: math.exp(min(mean, 700.0)))


def squared_error() -> Metric:
    """The mean squared error, for networks that predict numbers."""
    return _mean(
        MetricFacts("squared_error", higher_is_better=False),
        ("numbers",),
        lambda outputs, labels: (outputs.flatten() - labels.to(outputs.dtype)).square(),
    )


METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": accuracy,
    "f1": f1,
    "token_accuracy": token_accuracy,
    "loss": cross_entropy,
    "perplexity": perplexity,
    "label_f1": label_f1,
    "label_accuracy": label_accuracy,
    "squared_error": squared_error,
    "rmse": rmse,
    "mae": mae,
    "r2": r2,
}


@cache
def metric(name: str) -> Metric:
    """A metric by its name in the experiment."""
    return made_by_name(name, METRICS, "metric", Metric)


def recorded_metric(name: str, content: Any = None) -> MetricFacts:
    """The facts of a metric by the name of its values, as a run folder has them.

    Where it has none, those of ours of that name; of another: a plain number, more is better.

    >>> recorded_metric("test_loss").higher_is_better, recorded_metric("mine").is_share
    (False, False)
    """
    if isinstance(content, Mapping):
        lower = content.get("higher_is_better") is False
        return MetricFacts(name, not lower, content.get("is_share") is True)
    ours = {one.name: one.facts for one in map(metric, METRICS)}
    return ours.get(name, MetricFacts(name))


class Tally:
    """Sums of several metrics over the chunks of the test data; equal sums are made once."""

    def __init__(self, names: Sequence[str], classes: int) -> None:
        self.metrics, self._classes = [metric(name) for name in names], classes
        self._kinds = list(dict.fromkeys(one.sums for one in self.metrics))

    @property
    def capturable(self) -> bool:
        """Whether all of it may be captured in a CUDA graph."""
        return all(one.capturable for one in self.metrics)

    def sums(self, outputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Of one mini-batch."""
        return [kind(outputs, labels, self._classes) for kind in self._kinds]

    def of_each(self, sums: Sequence[Sums]) -> list[tuple[Metric, Sums]]:
        """The metrics, and what each goes by."""
        of_kind = dict(zip(self._kinds, sums, strict=True))
        return [(one, of_kind[one.sums]) for one in self.metrics]


@dataclass(frozen=True, eq=False)
class Populations:
    """Whose classes weigh how much: of the groups of devices, and of each device."""

    group_names: tuple[str, ...]
    groups: Floats
    devices: Floats


def scores(tally: Tally, sums: Sequence[Sums], populations: Populations | None) -> dict[str, Any]:
    """What a round's line in the log says about the model.

    A group's accuracy is what its devices would see: class accuracies weighted by how often the
    group has each class. The same for devices, of which the spread is logged.
    """
    record: dict[str, Any] = {
        one.name: _rounded(one.value(own)) for one, own in tally.of_each(sums)
    }
    for one, own in tally.of_each(sums):
        if one.by_class is None:
            continue
        by_class = one.by_class(own)
        record[f"class_{one.name}"] = [_rounded(value) for value in by_class]
        if populations is not None:
            by_group = map(_rounded, populations.groups @ by_class)
            by_device = np.quantile(populations.devices @ by_class, list(_SPREAD.values()))
            record[f"group_{one.name}"] = dict(zip(populations.group_names, by_group, strict=True))
            record[f"device_{one.name}"] = dict(zip(_SPREAD, map(_rounded, by_device), strict=True))
    return record


def _rounded(value: float) -> float:
    # Enough to read a curve and to compare runs; it keeps a run's log small and its bytes the same.
    return round(float(value), 6)
