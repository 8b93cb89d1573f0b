"""What is to be known of a round, and a line of ``metrics.jsonl`` that says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from cocofl.checks import Amount, Check, Score, check_of, in_short
from cocofl.errors import InvalidSetting, RunFolderProblem
from cocofl.fl.metrics import STATISTICS

METRICS = "metrics.jsonl"

Record = dict[str, Any]
Fate = Literal["merged", "late", "lost", "rejected", "infeasible"]
FATES: tuple[str, ...] = get_args(Fate)
"""What can become of a device that is asked."""


Scores = Mapping[str, Any]
"""What a model was tested for: a number under each metric's name, and further numbers beside it."""


class DeviceRecord(NamedTuple):
    """A device's part in a round."""

    device: int
    group: str
    work: str | None
    """What it trained; None where that is not known, or nothing fits it."""
    fate: str


class DeviceFigures(NamedTuple):
    """How an update that was merged looks beside the others of its round."""

    device: int
    samples: int
    loss: float
    norm: float
    """Of the change that it sent."""
    against_median: float
    """Its norm over the median norm, in that block where this is largest."""
    scale_change: float
    """The largest factor by which it moves a known scale, up or down; 1 where it moves none."""
    outlier: bool


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What is to be known of a round; every figure has its one definition here."""

    round: int
    """Counted from 1."""
    lr: float
    simulated_s: float
    """How long the server of a simulation waits."""
    bytes_up: int
    """The size of all updates that arrived, whatever became of them."""
    loss: float | None
    """The mean over the devices that were merged."""
    devices: Sequence[DeviceRecord]
    scores: Scores = field(default_factory=dict)
    """What the model was tested for, where it was."""
    other_scores: Mapping[str, Scores] = field(default_factory=dict)
    """The same with other norm statistics, by their kind; at the end of a run."""
    averaged_scores: Mapping[str, Scores] = field(default_factory=dict)
    """Of the mean of the model over rounds, where one is kept, by the kind of norm statistics."""
    bytes_broadcast: int | None = None
    """The size of all that devices were sent, where they are on a network."""
    reasons: Sequence[tuple[int, str]] | None = None
    """Why updates were refused or did not come, where devices are on a network."""
    figures: Sequence[DeviceFigures] | None = None
    """Of every update that was merged, where devices are on a network."""
    quarantined: Sequence[int] | None = None
    """Nodes that were there and were not asked for what they sent before."""
    epsilon: float | None = None
    """What all rounds so far come to, where there is privacy."""
    energy_j: float | None = None
    """What training took on all devices that were asked, where their power is known."""

    def count(self, fate: str) -> int:
        """How many devices that became of."""
        return [one.fate for one in self.devices].count(fate)

    def to_json(self) -> Record:
        """As ``metrics.jsonl`` has it."""
        own = {key: getattr(self, key) for key in _OWN_KEYS if key not in FATES}
        own |= {fate: self.count(fate) for fate in FATES}
        own["devices"] = [list(one) for one in self.devices]
        for key in ("reasons", "figures"):
            own[key] = None if own[key] is None else [list(one) for one in own[key]]
        return {
            **{k: own[k] for k in _OWN_KEYS if k not in _NOT_ALWAYS or own[k] is not None},
            **self.scores,
            **{_OTHER[kind]: dict(found) for kind, found in self.other_scores.items()},
            **{_AVERAGED[kind]: dict(found) for kind, found in self.averaged_scores.items()},
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any], where: str) -> RoundRecord:
        """A line of ``metrics.jsonl``, which anybody may have made; ``where`` it stands."""
        for key, check in _OWN_KEYS.items():
            if key not in line and key not in _NOT_ALWAYS:
                raise RunFolderProblem(f"{where} lacks {key!r}")
            if key in line and not check(line[key]):
                raise RunFolderProblem(f"{where}: {key!r} is {in_short(line[key])}")
        others = {kind: line[key] for kind, key in _OTHER.items() if key in line}
        averaged = {kind: line[key] for kind, key in _AVERAGED.items() if key in line}
        taken = (*_OWN_KEYS, *_OTHER.values(), *_AVERAGED.values())
        scores = {key: value for key, value in line.items() if key not in taken}
        for found in (scores, *others.values(), *averaged.values()):
            if not _are_scores(found):
                raise RunFolderProblem(f"{where}: what the model was tested for is not numbers")
        reasons, of_devices = line.get("reasons"), line.get("figures")
        figures: Record = {key: line.get(key) for key in _FIGURES}
        found = cls(
            **figures,
            devices=[_device_record(*one) for one in line["devices"]],
            scores=scores,
            other_scores=others,
            averaged_scores=averaged,
            reasons=None if reasons is None else [(node, why) for node, why in reasons],
            figures=None if of_devices is None else [DeviceFigures(*one) for one in of_devices],
            quarantined=line.get("quarantined"),
        )
        fates = [one.fate for one in found.devices]
        for fate in FATES:
            if line[fate] != fates.count(fate):
                raise RunFolderProblem(f"{where}: {fate!r} is {line[fate]}, unlike its devices")
        return found


def metric_names(scores: Scores) -> list[str]:
    """The metrics among what a model was tested for, in the order of the experiment.

    >>> metric_names({"accuracy": 0.5, "f1": 0.4, "group_accuracy": {"weak": 0.3}})
    ['accuracy', 'f1']
    """
    return [name for name, value in scores.items() if isinstance(value, int | float)]


def scores_by_name(scores: Scores, key: str) -> Mapping[str, float]:
    """Numbers by name among what a model was tested for, as those of groups; none elsewhere."""
    found = scores.get(key)
    return found if isinstance(found, dict) else {}


def check_metric_names(names: Sequence[str]) -> None:
    """Refuse metrics that could not be told apart in a line of ``metrics.jsonl``."""
    for name in names:
        taken = (*_OWN_KEYS, *_OTHER.values(), *_AVERAGED.values())
        if name in taken or names.count(name) > 1:
            raise InvalidSetting(
                f"a metric is called {name!r}, and so is something else in {METRICS}; give it "
                "another name"
            )


_is_device = check_of(tuple[int, str, str | None, Fate])


@lru_cache(maxsize=2**14, typed=True)
def _device_record(*fields: Any) -> DeviceRecord:
    """A device's part in a round, if it can be one; rounds that are alike share it."""
    if not _is_device(list(fields)):
        raise ValueError
    return DeviceRecord(*fields)


def _are_devices(value: Any) -> bool:
    with suppress(TypeError, ValueError):
        return isinstance(value, list) and all(
            isinstance(one, list) and _device_record(*one) is not None for one in value
        )
    return False


_FIGURES = (
    "round",
    "lr",
    "simulated_s",
    "bytes_up",
    "bytes_broadcast",
    "loss",
    "epsilon",
    "energy_j",
)
_SHAPES = (int, float, Amount, int, int, float | None, Amount, Amount)
_OWN_KEYS: dict[str, Check] = {
    **dict(zip(_FIGURES, map(check_of, _SHAPES), strict=True)),
    **dict.fromkeys(FATES, check_of(int)),
    "devices": _are_devices,
    "reasons": check_of(list[tuple[int, str]]),
    "figures": check_of(list[tuple[int, int, float, float, float, float, bool]]),
    "quarantined": check_of(list[int]),
}
"""What a line of ``metrics.jsonl`` begins with, in this order, before what was tested."""
_NOT_ALWAYS = ("bytes_broadcast", "reasons", "figures", "quarantined", "epsilon", "energy_j")
"""The last two where there is privacy, and power; the others on a network."""
_OTHER = {kind: f"{kind}_statistics" for kind in STATISTICS}
_AVERAGED = {kind: f"averaged_{kind}_statistics" for kind in STATISTICS}
_are_scores = check_of(dict[str, Score | list[Score] | dict[str, Score]])
